"""What `--backend` sets and starts for each framework: one entry of `BACKENDS` each."""

import importlib.util
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric
from carme_runtime.launcher.placement import Place, is_spread

Variables = dict[int, dict[str, str]]
PORT_TRIES = 20  # per rank: a node may name a port twice, as nothing listens there yet


@dataclass(frozen=True)
class Backend:
    """A framework as carme-run knows it.

    Args:
        sets: The variables that ranks get on top of every run's.
        starts: What is started beside or instead of the ranks, and stopped with the run.
        variables: By rank, the values of `sets`, from the places and a free port for each rank; None: other
            modules of the launcher see to them.
        modules: What this Python must have, by the names that people install.
    """

    sets: tuple[str, ...]
    starts: str = "nothing beside the ranks"
    variables: Callable[[list[Place], list[int]], Variables] | None = None
    modules: tuple[str, ...] = ()


def _tensorflow(places: list[Place], ports: list[int]) -> Variables:
    hosts = [_host(place, places) for place in places]
    workers = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    return {
        place.rank: {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.rank}}
            ),
            "TF_USE_LEGACY_KERAS": "1",
        }
        for place in places
    }


BACKENDS = {
    "torch": Backend(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")),
    "tensorflow": Backend(
        ("TF_CONFIG", "TF_USE_LEGACY_KERAS"), variables=_tensorflow, modules=("tensorflow", "tf_keras")
    ),
    "horovod": Backend(("HOROVOD_*",), "Horovod's rendezvous server on the first node"),
    "mpi": Backend((), "the mpirun that is installed, which starts the ranks"),
    "gaspi": Backend(("GASPI_*",)),
}


def check_installed(name: str) -> None:
    """Raise CarmeRuntimeError where this Python lacks what the backend needs."""
    missing = [module for module in BACKENDS[name].modules if not importlib.util.find_spec(module)]
    if missing:
        raise CarmeRuntimeError(
            f"--backend {name} needs {' and '.join(missing)}, which this Python does not have.",
            f"Use an image with it, or install it: pip install {' '.join(missing)}",
        )


def described(name: str) -> str:
    """What the backend would set and start, for people."""
    backend = BACKENDS[name]
    return f"--backend {name} sets: {', '.join(backend.sets) or 'nothing'}\nstarts: {backend.starts}"


async def variables(fabric: Fabric, name: str, places: list[Place]) -> Variables | None:
    """By rank, what the framework reads on top of every run's variables.

    Raises:
        CarmeRuntimeError: A node was lost, or has no free ports.
    """
    make = BACKENDS[name].variables
    return make(places, [port async for port in _ports(fabric, places)]) if make else None


async def _ports(fabric: Fabric, places: list[Place]) -> AsyncIterator[int]:
    taken: set[tuple[int, int]] = set()
    for place in places:
        node = place.member.number
        for _ in range(PORT_TRIES):
            port = await _port(fabric, node, place.member.host)
            if (node, port) not in taken:
                break
        else:
            raise CarmeRuntimeError(f"{place.member.host} has no free port left.", "Start fewer ranks.")
        taken.add((node, port))
        yield port


async def _port(fabric: Fabric, node: int, host: str) -> int:
    fabric.send(node, {"type": "port"})
    while True:
        event = await fabric.next_event()
        if event.gone or node not in {member.number for member in fabric.members.present}:
            raise CarmeRuntimeError(f"The job's agent on {host} was lost.", "Start a new job.")
        if event.node == node and event.content["type"] == "port":
            return event.content["port"]


def _host(place: Place, places: list[Place]) -> str:
    address = place.member.address if is_spread(places) else "127.0.0.1"
    return f"[{address}]" if ":" in address else address
