"""Ranks of a comparison: who is let in, what becomes of those that fail, and which cores each has."""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.compare import entries
from carme_runtime.compare.door import Door, Line, Lost, come_in
from carme_runtime.compare.results import Row
from carme_runtime.compare.worker import cores_of
from patience import HANG


@pytest.fixture
def door() -> Any:
    opened = Door("127.0.0.1")
    yield opened
    opened.close()


def beside(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_ranks_come_in_by_the_secret(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in door.environment.items():
        monkeypatch.setenv(name, value)
    inside: list[Line] = []
    thread = beside(lambda: inside.extend(come_in("torch-gloo", rank) for rank in (1, 0)))
    lines = door.admit("torch-gloo", 2, HANG, lambda: True)
    thread.join(HANG)
    lines[0].send(steps=3)
    assert inside[1].receive(HANG) == {"steps": 3}
    inside[1].close()
    with pytest.raises(Lost, match="the connection ended"):
        lines[0].receive(HANG)
    for line in (*lines, inside[0]):
        line.close()


def test_a_process_without_the_secret_is_refused(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def intrude() -> None:
        try:
            address = tuple(json.loads(door.environment["CARME_COMPARE_DOOR"]))
            with socket.create_connection(address, timeout=HANG) as connection:
                line = Line(connection)
                line.receive(HANG)
                line.send(challenge="00", proof="00" * 32, name="torch-gloo", rank=0)
                with pytest.raises(Lost):
                    line.receive(HANG)
        finally:
            over.set()

    thread = beside(intrude)
    with pytest.raises(Lost, match="it ended"):
        door.admit("torch-gloo", 1, HANG, lambda: not over.is_set())
    thread.join(HANG)
    monkeypatch.setenv("CARME_COMPARE_DOOR", door.environment["CARME_COMPARE_DOOR"])
    monkeypatch.setenv("CARME_COMPARE_SECRET", "11" * 32)
    refused: list[str] = []

    def wrong() -> None:
        try:
            come_in("torch-gloo", 0)
        except Lost as error:
            refused.append(str(error))

    thread = beside(wrong)
    with pytest.raises(Lost, match="it ended"):
        door.admit("torch-gloo", 1, HANG, lambda: not refused)
    thread.join(HANG)
    assert refused == ["the connection ended"]


def test_a_contestant_that_fails_is_void_with_its_own_words(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    entry = entries.Entry(Row("torch-gloo", "title", "mlp", 1), threads=1)
    entry.start(door, tmp_path / "none.npz", tmp_path)
    entry.end()
    assert entry.row.void.startswith("it did not start: it ended. Its last line: FileNotFoundError: ")
    assert "none.npz" in entry.row.void


@pytest.mark.parametrize(
    ("cores", "threads", "nodes", "size"),
    [(2, 1, 2, 1), (8, 2, 2, 2), (6, 2, 3, 1), (5, 2, 3, 2), (4, 1, 1, 4)],
)
def test_ranks_have_cores_of_their_own(cores: int, threads: int, nodes: int, size: int) -> None:
    """Those of a node always, and those of nodes that share a host as long as it has enough."""
    own = [
        [cores_of(list(range(10, 10 + cores)), rank, size, node, threads) for rank in range(size)]
        for node in range(nodes)
    ]
    for node in own:
        assert all(len(taken) == threads for taken in node) and len(set().union(*node)) == threads * size
    if threads * size * nodes <= cores:
        assert len(set().union(*(taken for node in own for taken in node))) == threads * size * nodes


def test_a_rank_for_which_there_are_no_cores_takes_none() -> None:
    assert [cores_of([4, 5], rank, 3, 1, 1) for rank in range(3)] == [{4}, {5}, set()]
