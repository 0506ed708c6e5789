"""Tasks run near the ranges in their tokens, wherever in a token these are."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.petri import Net
from carme_runtime.petri.activation import Activation, Task, Token
from carme_runtime.petri.placing import Placing, ranges_of

pytestmark = pytest.mark.usefixtures("shared")


@dataclass
class Pair:
    """What a user's token may be."""

    name: str
    found: Any


class Listed(list[Any]):
    """A list of the user's own."""


def refuse(*_: object) -> None:
    raise AssertionError("The coordinator runs nothing of a token.")


class Careful:
    """Runs something where it is unpickled."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def __reduce__(self) -> Any:
        return refuse, (self.found,)


@dataclass
class Worker:
    """As far as placing looks at one."""

    node: int | None

    def accepts(self) -> bool:
        """It has nothing to do."""
        return True


class Holding:
    """Says how many bytes of ranges each node has."""

    def __init__(self, found: dict[str, dict[str, int]]) -> None:
        self.holders, self._found = self, found

    def bytes_at(self, names: list[str]) -> dict[str, int]:
        """Of these ranges by node."""
        places: dict[str, int] = {}
        for name in names:
            for host, size in self._found[name].items():
                places[host] = places.get(host, 0) + size
        return places


@pytest.fixture
def task(tmp_path: Path) -> Any:
    """Makes a task of a token, which a function makes of two ranges."""
    net = Net("placing")
    place = net.place("place", object)
    net.transition(place >> None)(print)
    run = net.start(1, folder=tmp_path / "run", checked=False)
    with run:
        first, second = run.memory.allocate("first", 8), run.memory.allocate("second", 8)

        def make(token: Callable[[Any, Any], Any]) -> Task:
            rule = Activation(net, {}).rules[0]
            return Task(1, rule, [Token(1, pickle.dumps(token(first, second), 5))])

        yield make
        for each in (first, second):
            run.memory.delete(each)


TOKENS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (3, (a, b)),
    "dict": lambda a, b: {"a": [a], "b": {"c": b}},
    "class": lambda a, b: Pair("x", [a, Pair("y", b)]),
    "list of a class": lambda a, b: Listed([a, Listed([b])]),
    "what runs": lambda a, b: (a, Careful(b)),
}


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
def test_ranges_are_found_in_a_token(task: Any, token: Callable[[Any, Any], Any]):
    assert ranges_of(task(token)) == ["first", "second"]


def test_a_token_without_ranges_has_none(task: Any):
    assert ranges_of(task(lambda a, b: (1, "carme_runtime.petri.memory", b"restore"))) == []


def test_a_task_runs_where_most_of_its_tuples_bytes_are(task: Any):
    placing = Placing({})
    placing.hosts |= {1: "n1", 2: "n2"}
    placing._free |= {1: {}, 2: {}}
    holding: Any = Holding({"first": {"n1": 10}, "second": {"n2": 30, "n1": 5}})
    here, first, second = Worker(None), Worker(1), Worker(2)
    workers: Any = [here, first, second]

    def chosen(token: Callable[[Any, Any], Any]) -> Any:
        return placing.nearest(task(token), workers[0], workers, holding)

    assert chosen(lambda a, b: (1, a)) is first
    assert chosen(lambda a, b: (1, (a, b))) is second
    assert chosen(lambda a, b: (1, 2)) is here
