"""Each operation of the broker is declared once, and everything else follows from that."""

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carme.broker import AsyncBrokerClient, BrokerClient
from carme.broker import service as service_module
from carme.broker.operations import EVERYONE, Operation
from carme.broker.protocol import OPERATIONS
from carme.broker.reference import replaced
from carme.errors import Denied

INTERFACES = Path(__file__).parents[3] / "docs/developers/interfaces.md"

every = pytest.mark.parametrize("kind", OPERATIONS.values(), ids=list(OPERATIONS))
restricted = [kind for kind in OPERATIONS.values() if kind.rights != EVERYONE]
RESERVED = {"node_names": ["n1"], "start": "2030-01-01T08:00:00Z", "end": "2030-01-01T09:00:00Z"}
#: A valid value of each field that an operation for services has.
VALUES: dict[str, Any] = {
    "account": "physics",
    "drain": True,
    "grant": {"account": "carme-vision"},
    "hold": RESERVED | {"name": "carme-" + "0" * 12, "partition": "gpu", "users": ["ada"]},
    "job_id": 7,
    "minutes": 10,
    "name": "stage-1",
    "node_names": ["n1"],
    "note": {"server": "ready"},
    "partition": "gpu",
    "stage": [{"source": "/data/x"}],
    "user": "ada",
    "window": RESERVED | {"name": "carme-maintenance-" + "0" * 12},
}


@every
def test_an_operation_is_documented_and_has_a_typed_result(kind: type[Operation[Any]]) -> None:
    assert vars(kind).get("__doc__", "").strip().endswith(".")
    assert kind.result_type() is not Any
    assert kind.help().startswith(inspect.getdoc(kind) or "-")


def test_the_documentation_lists_the_operations_as_they_are_declared() -> None:
    page = INTERFACES.read_text("utf-8")
    assert replaced(page) == page, f"Run python -m carme.broker.reference {INTERFACES}"


@pytest.mark.parametrize("client", [BrokerClient, AsyncBrokerClient])
def test_help_shows_an_operation_s_words_and_parameters(client: type[Any]) -> None:
    method: Any = inspect.getattr_static(client, "node").__get__(None, client)
    assert inspect.iscoroutinefunction(method) == (client is AsyncBrokerClient)
    assert str(inspect.signature(method)) == (
        "(self, name: str, drain: bool, user: str, reason: str = '') -> None"
    )
    assert inspect.getdoc(method) == "Drain a node for a reason, or resume it.\n\nServices only."
    plain: Any = BrokerClient("/nowhere")
    with pytest.raises(TypeError, match="'drain'"):
        plain.node("n1")


def handlers(broker: object) -> dict[type[Operation[Any]], Callable[..., Any]]:
    """The function that handles each operation."""
    found = broker._dispatcher._handlers  # pyright: ignore[reportAttributeAccessIssue]
    return {kind: getattr(type(service), name) for kind, (service, name) in found.items()}


async def test_each_operation_has_the_handler_of_its_own_type(settings: Any, slurm: Any) -> None:
    found = handlers(service_module.Broker(settings, slurm))
    assert found.keys() == set(OPERATIONS.values())
    for kind, handler in found.items():
        assert [*typing.get_type_hints(handler).values()][1] is kind


@pytest.mark.parametrize("kind", restricted, ids=[kind.method for kind in restricted])
async def test_a_denied_request_gets_the_declared_message(site: Any, kind: type[Any]) -> None:
    names = kind.signature().parameters
    values = {name: VALUES[name] for name, field in names.items() if field.default is field.empty}
    with pytest.raises(Denied) as caught:
        await site.client._perform(kind(**values))
    assert (caught.value.message, caught.value.remedy) == (f"ada {kind.rights.message}", kind.rights.remedy)
