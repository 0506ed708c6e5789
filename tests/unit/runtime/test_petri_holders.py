"""Where copies of ranges are, whatever nodes do at the same time and whichever is lost."""

from typing import Any

import pytest

from carme_runtime.petri.holders import Holders
from carme_runtime.petri.store import Description

NODES = ("n1", "n2", "n3")


class Places(Holders):
    """Holders of a run on three nodes, and what they sent and noted."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.noted: list[str] = []
        super().__init__("n1", {}, {}, lambda *message: self.sent.append(message), self.noted.append)
        for node in NODES:
            self.report(node, (node, 1), {})

    def allocate(self, node: str, name: str = "x") -> None:
        """A task has ended well that has made a range."""
        assert not self.is_refused(node, [Description(name, 8, "net", copies=2)], {})
        self.known[name] = Description(name, 8, "net", copies=2)
        self.change(node, [name], {})

    def ask(self, node: str, kind: str, name: str = "x") -> list[Any]:
        """The answer, when there is one."""
        answers: list[Any] = []
        self.answer(node, kind, name, answers.append)
        return answers

    def push(self, node: str) -> tuple[str, int, list[Any]]:
        """A task wants a copy of what it has written: (target, number, answer when there is one)."""
        answers = self.ask(node, "copy")
        target, kind, _, number, _ = self.sent[-1]
        assert kind == "pull"
        return target, number, answers


@pytest.fixture
def places() -> Places:
    return Places()


def test_a_copy_under_way_does_not_count_yet(places: Places):
    places.allocate("n1")
    [(source, _)] = places.ask("n2", "where")
    assert source == ("n1", 1)
    assert places.bytes_at(["x"]) == {"n1": 8}
    places.lose("n1", True)
    assert places.missing() == ["x"] and places.homes["x"] == []
    assert places.ask("n2", "where") == [None]


def test_a_repeated_query_is_sent_to_another_node(places: Places):
    """The first one stands still, and is not lost yet."""
    places.allocate("n1")
    target, number, _ = places.push("n1")
    places.take_pulled(target, "x", number, True)
    third_node = next(each for each in NODES if each not in ("n1", target))
    answers = [places.ask(third_node, "where")[0] for _ in range(4)]
    assert [node for (node, _), _ in answers] == ["n1", target, "n1", target]
    assert places.ask(third_node, "confirm", f"{answers[-1][1]} x") == [True]
    assert places.ask(third_node, "where")[0][0] == ("n1", 1)  # the last one came


def test_a_copy_that_has_come_is_the_range_when_its_source_is_lost(places: Places):
    places.allocate("n1")
    [(_, number)] = places.ask("n2", "where")
    assert places.ask("n2", "confirm", f"{number} x") == [True]
    places.lose("n1", True)
    assert places.missing() == [] and places.homes["x"] == ["n2"]
    assert places.noted == ["x"]


def test_a_copy_that_another_task_changed_meanwhile_is_not_confirmed(places: Places):
    places.allocate("n1")
    [(_, number)] = places.ask("n2", "where")
    places.change("n1", [], {"x": 0})
    assert places.ask("n2", "confirm", f"{number} x") == [False]
    assert places.bytes_at(["x"]) == {"n1": 8}


def test_what_was_written_into_a_copy_counts_before_it_is_confirmed(places: Places):
    places.allocate("n1")
    [(_, number)] = places.ask("n2", "where")
    assert places.is_refused("n2", [], {"x": number}) == ""
    assert places.change("n2", [], {"x": number}) == [("n1", "x")]
    assert places.ask("n2", "confirm", f"{number} x") == [True]
    assert places.homes["x"] == ["n2"]


@pytest.fixture
def two(places: Places) -> tuple[str, str, int]:
    """n1 and another node are the homes of a range; the third node has a copy, too: it and its copy."""
    places.allocate("n1")
    home, number, answers = places.push("n1")
    places.take_pulled(home, "x", number, True)
    assert answers == ["there"]
    places.change("n1", [], {"x": 0})
    assert places.homes["x"] == ["n1", home]
    third = next(each for each in NODES if each not in ("n1", home))
    [(_, copy)] = places.ask(third, "where")
    assert places.ask(third, "confirm", f"{copy} x") == [True]
    return home, third, copy


def push_to(places: Places, node: str, target: str) -> tuple[int, list[Any]]:
    for _ in NODES:
        found, number, answers = places.push(node)
        if found == target:
            return number, answers
    raise AssertionError("It is never asked.")


def test_the_copy_of_a_task_that_ends_later_is_not_that_of_the_first(
    places: Places, two: tuple[str, str, int]
):
    home, third, copy = two
    for node in ("n1", third):
        number, answers = push_to(places, node, home)
        places.take_pulled(home, "x", number, True)
        assert answers == ["there"]
    # The first task ends: its second node has the other's bytes now.
    assert (home, "x") in places.change("n1", [], {"x": 0})
    assert places.homes["x"] == ["n1"] and places.copies["x"] == {"n1": 0}
    assert places.is_refused(third, [], {"x": copy}) == "changed x"
    # It is to have a second copy again.
    assert places.single == {"x"}
    places.restore_copies(places.single)
    target, kind, _, number, _ = places.sent[-1]
    assert kind == "pull"
    places.take_pulled(target, "x", number, True)
    assert places.homes["x"] == ["n1", target] and places.noted == ["x"]


def test_a_copy_that_comes_when_another_task_has_ended_is_refused(places: Places, two: tuple[str, str, int]):
    home, third, _ = two
    late, answers = push_to(places, third, home)
    number, _ = push_to(places, "n1", home)
    places.take_pulled(home, "x", number, True)
    places.change("n1", [], {"x": 0})
    assert places.homes["x"] == ["n1", home]
    places.take_pulled(home, "x", late, True)
    assert answers == ["none"]
    assert places.copies["x"] == {"n1": 0} and places.homes["x"] == ["n1"]
    assert (home, "drop", ["x"]) in places.sent and places.noted == ["x"]
