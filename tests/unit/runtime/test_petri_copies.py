"""Copies of ranges from node to node: who is busy is waited for, and who stops is not."""

import contextlib
import itertools
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.petri import serving, store
from carme_runtime.petri.asking import ask
from carme_runtime.petri.serving import RangeServer
from carme_runtime.petri.store import Description, Store
from patience import HANG

pytestmark = pytest.mark.usefixtures("shared")

SECRET = bytes(32)
#: Numbers the runs: sockets are named after them, also those of tests beside this one, and one that a process
#: of another test has inherited stays for a moment.
RUNS = itertools.count()
DATA = bytes(range(256)) * 4096


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Store]]:
    """The ranges of a run on two nodes; the first one has "there"."""
    identity, scratch = f"copies-{os.getpid()}-{next(RUNS)}", [tmp_path / "scratch"]
    found = [Store(identity, tmp_path / "run", 1 << 26, scratch, node) for node in ("n1", "n2")]
    (tmp_path / "run").mkdir()
    for each in found:
        each.begin()
    store.unlock(found[0].create(Description("there", len(DATA), "net"), memoryview(DATA)))
    yield found
    for each in found:
        each.end()
        each.let_go()


Serve = Callable[..., RangeServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Begins to serve the ranges of a node."""
    with contextlib.ExitStack() as last:

        def begin(node: Store, question: Any = lambda *_: None) -> RangeServer:
            server = RangeServer(node, "127.0.0.1", SECRET, question)
            last.callback(server.close)
            return server

        yield begin


def pull_in_thread(server: RangeServer, source: tuple[str, int]) -> tuple[threading.Thread, list[bool]]:
    found: list[bool] = []
    pull = threading.Thread(target=lambda: found.append(server.pull("there", 1, source)), daemon=True)
    pull.start()
    return pull, found


def test_a_node_whose_ranges_are_busy_for_long_does_not_stand_still(
    nodes: list[Store], serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    """Another process of its node moves a large range to the disk, say, and nobody else gets at them."""
    monkeypatch.setattr(serving, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(serving, "_STILL", int(HANG))
    beats, receive = threading.Semaphore(0), Connection.recv_bytes

    def count(connection: Any, *given: Any) -> bytes:
        found = receive(connection, *given)
        if found == b"":
            beats.release()
        return found

    monkeypatch.setattr(Connection, "recv_bytes", count)
    source, target = serve(nodes[0]), serve(nodes[1])
    busy = Store(nodes[0].identity, nodes[0].folder, 0, [], "n1")
    with busy.locked():
        pull, found = pull_in_thread(target, source.where)
        for _ in range(12):
            assert beats.acquire(timeout=HANG)
        assert found == [] and pull.is_alive()
    pull.join(HANG)
    there = nodes[1].find("there")
    assert found == [True] and there and there[0].read_bytes() == DATA


def test_the_wait_for_a_node_that_hangs_ends(
    nodes: list[Store], serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    """Its beats end, and the copy is given up: another node may have the range, too."""
    monkeypatch.setattr(serving, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(serving, "_HANGS", 0.3)
    monkeypatch.setattr(serving, "_STILL", 1)
    earlier = set(threading.enumerate())
    source, target = serve(nodes[0]), serve(nodes[1])
    busy = Store(nodes[0].identity, nodes[0].folder, 0, [], "n1")
    with busy.locked():
        pull, found = pull_in_thread(target, source.where)
        pull.join(HANG / 3)
        assert found == [False]
    for each in set(threading.enumerate()) - earlier:
        if each.name.endswith("(_serve)"):  # finds that nobody takes the bytes any more, and says nothing
            each.join(HANG)


def test_ranges_on_a_disk_are_read_before_they_are_sent(
    nodes: list[Store], serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "_PIECE", 1000)
    nodes[0].move_to_disk("there")
    assert pull_whole(serve(nodes[1]), serve(nodes[0]), nodes[1]) == DATA


def pull_whole(target: RangeServer, source: RangeServer, node: Store) -> bytes:
    assert target.pull("there", 1, source.where)
    found = node.find("there")
    assert found
    return found[0].read_bytes()


def stop_in_the_middle(listener: socket.socket, ends: bool) -> None:
    """A node that begins to send "there", and then its processes stand still, or one of them is killed."""
    client, _ = listener.accept()
    with client, Connection(client.detach()) as connection:
        deliver_challenge(connection, SECRET)
        answer_challenge(connection, SECRET)
        assert connection.recv_bytes() == b"there"
        connection.send_bytes(json.dumps(asdict(Description("there", len(DATA), "net"))).encode())
        connection.send_bytes(DATA[: len(DATA) // 2])
        with socket.socket(fileno=connection.fileno()) as raw:
            raw.sendall(struct.pack("!i", len(DATA) // 2) + b"a few bytes of the rest")
            if not ends:
                with contextlib.suppress(OSError):
                    raw.recv(1)  # until the other end gives up
            raw.detach()


@pytest.mark.parametrize("ends", [False, True])
def test_a_copy_whose_source_stops_in_the_middle_is_repeated_from_another_node(
    nodes: list[Store], serve: Serve, monkeypatch: pytest.MonkeyPatch, ends: bool
):
    monkeypatch.setattr(serving, "_STILL", 1)
    source = serve(nodes[0])
    requests: list[str] = []

    def coordinator(kind: str, name: str, reply: Callable[[Any], None]) -> None:
        if kind == "where":
            requests.append(name)
            where = listener.getsockname() if len(requests) == 1 else source.where
            reply([where, len(requests)])
        else:
            reply(True)  # the copy that has come is good

    with socket.create_server(("127.0.0.1", 0)) as listener:
        stopping = threading.Thread(target=stop_in_the_middle, args=(listener, ends), daemon=True)
        stopping.start()
        serve(nodes[1], coordinator)
        assert ask(nodes[1], "fetch", "there") == []
        stopping.join(HANG)
    found = nodes[1].find("there")
    assert requests == ["there", "there"] and found
    assert found[0].read_bytes() == DATA and found[1].copy == 2
    assert not list(nodes[1].shared.glob(".new-*"))


def test_a_copy_that_no_node_can_finish_is_the_coordinators_to_answer(
    nodes: list[Store], serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    """The only node that has it stops in the middle and is lost: the task fails with a sentence, or waits."""
    monkeypatch.setattr(serving, "_STILL", 1)
    answers: list[Any] = []

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers += [[listener.getsockname(), 1], None]
        threading.Thread(target=stop_in_the_middle, args=(listener, True), daemon=True).start()
        serve(nodes[1], lambda kind, name, reply: reply(answers.pop(0)))
        assert ask(nodes[1], "fetch", "there") == []
    assert answers == [] and nodes[1].find("there") is None
    assert not list(nodes[1].shared.glob(".new-*"))
