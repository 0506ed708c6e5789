"""Whether ranks of GPI-2 are there, as their connections show; with messages within one process."""

import errno
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest

from carme_runtime.collectives.errors import PeerLost, Timeout
from carme_runtime.gaspi.gpi2.health import Health
from carme_runtime.gaspi.gpi2.mail import Mail
from patience import HANG

from .conftest import clean_environment

Boxes = defaultdict[tuple[int, int], queue.SimpleQueue[bytes]]


class Messages:
    """Those of one rank. `on_message` gets what has come before the rank does."""

    def __init__(self, boxes: Boxes, rank: int, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._boxes, self._rank, self._on_message = boxes, rank, on_message

    def post(self, rank: int, key: int, parts: list[Any]) -> bool:
        self._boxes[rank, self._rank].put(b"".join(parts))
        return True

    def take(self, rank: int, key: int, deadline: float) -> bytes | None:
        try:
            message = self._boxes[self._rank, rank].get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            return None
        self._on_message(json.loads(message))
        return message


def join(size: int, on_message: Callable[[dict[str, Any]], None] = lambda entry: None) -> list[Health]:
    """As many ranks. `on_message`: of the last one."""
    boxes: Boxes = defaultdict(queue.SimpleQueue)
    joined: dict[int, Health] = {}

    def run(rank: int) -> None:
        last = on_message if rank == size - 1 else lambda entry: None
        mail = cast(Mail, Messages(boxes, rank, last))
        joined[rank] = Health(rank, ["127.0.0.1"] * size, mail, time.monotonic() + HANG)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [joined[rank] for rank in range(size)]


def wait_for(expected: set[int], *ranks: Health) -> None:
    end = time.monotonic() + HANG
    while any(rank.lost() != expected for rank in ranks) and time.monotonic() < end:
        time.sleep(0.001)
    assert [rank.lost() for rank in ranks] == [expected] * len(ranks)


def test_a_rank_that_leaves_is_missed_by_all_others():
    first, second, third = join(3)
    assert [rank.lost() for rank in (first, second, third)] == [set()] * 3
    second.close()
    wait_for({1}, first, third)
    first.close()
    wait_for({0, 1}, third)
    third.close()


def test_unauthenticated_peers_are_not_taken_for_ranks():
    peers: list[socket.socket] = []

    def knock(entry: dict[str, Any]) -> None:
        for hello in (
            b"",
            b"GET / HTTP/1.0\r\n\r\n" + b"x" * 36,
            *(struct.pack("!I32s", n, b"0" * 32) for n in (0, 1, 7)),
        ):
            peer = socket.create_connection(("127.0.0.1", entry["port"]))
            peer.sendall(hello)
            with suppress(OSError):  # the rank may have closed it already
                peer.shutdown(socket.SHUT_WR)
            peers.append(peer)

    first, second = join(2, knock)
    assert len(peers) == 5
    for peer in peers:
        peer.close()
    assert first.lost() == second.lost() == set()
    second.close()
    wait_for({1}, first)
    first.close()


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_allowed():
    boxes: Boxes = defaultdict(queue.SimpleQueue)
    with pytest.raises(Timeout, match="Not all ranks joined in time"):
        Health(0, ["127.0.0.1"] * 2, cast(Mail, Messages(boxes, 0, lambda entry: None)), time.monotonic())
    boxes[0, 1].put(json.dumps({"port": 1, "secret": "", "pid": os.getpid(), "processes": ""}).encode())
    with pytest.raises(Timeout, match="Not all ranks joined in time"):
        Health(
            0, ["127.0.0.1"] * 2, cast(Mail, Messages(boxes, 0, lambda entry: None)), time.monotonic() + 0.05
        )


def test_a_rank_that_cannot_be_reached_is_named():
    boxes: Boxes = defaultdict(queue.SimpleQueue)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    boxes[1, 0].put(json.dumps({"port": port, "secret": "", "pid": os.getpid(), "processes": ""}).encode())
    with pytest.raises(PeerLost, match=r"Rank 0 cannot be reached at 127\.0\.0\.1: Connection refused"):
        Health(
            1, ["127.0.0.1"] * 2, cast(Mail, Messages(boxes, 1, lambda entry: None)), time.monotonic() + HANG
        )


# Rank 1 of 2 in a process of its own, with a child process that Python knows of or does not. Arguments: which
# of these; the place it reports; whether it leaves or waits for its end. Its output is also its messages.
RANK = """
import ctypes, os, signal, sys, time
from carme_runtime.gaspi.gpi2 import health

class Messages:
    def post(self, rank, key, parts):
        print(b"".join(parts).decode(), flush=True)

    def take(self, rank, key, deadline):
        return sys.stdin.readline()

fork, where, end = sys.argv[1:]
if where == "elsewhere":
    health.process_space = lambda: where
joined = health.Health(1, ["127.0.0.1"] * 2, Messages(), time.monotonic() + 60)
child = os.fork() if fork == "python" else ctypes.PyDLL(None).fork()
if not child:
    signal.pause()
print(child, flush=True)
sys.stdin.readline()
if end == "leaves":
    joined.close()
signal.pause()
"""


class Pipes:
    """Messages to and from `RANK`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin and process.stdout
        self.stdin, self.stdout = process.stdin, process.stdout

    def post(self, rank: int, key: int, parts: list[bytes]) -> bool:
        self.stdin.write(b"".join(parts).decode() + "\n")
        self.stdin.flush()
        return True

    def take(self, rank: int, key: int, deadline: float) -> str:
        return self.stdout.readline()


@contextmanager
def beside_a_rank_with_a_child(*arguments: str) -> Iterator[tuple[Health, subprocess.Popen[str]]]:
    """Rank 0, and the process of rank 1. The child lives until the end."""
    start = [sys.executable, "-c", RANK, *arguments]
    child = None
    with subprocess.Popen(
        start, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            pipes = Pipes(process)
            first = Health(0, ["127.0.0.1"] * 2, cast(Mail, pipes), time.monotonic() + HANG)
            child = int(pipes.stdout.readline())
            assert first.lost() == set()
            yield first, process
            first.close()
            os.kill(child, 0)
        finally:
            process.kill()
            if child is not None:
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(("fork", "where"), [("python", "elsewhere"), ("other", "here")])
def test_a_rank_that_ends_is_missed_though_a_child_of_it_lives(fork: str, where: str):
    with beside_a_rank_with_a_child(fork, where, "waits") as (first, process):
        process.kill()
        wait_for({1}, first)


def test_a_rank_that_leaves_is_missed_though_a_child_of_it_lives():
    with beside_a_rank_with_a_child("other", "elsewhere", "leaves") as (first, process):
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
        wait_for({1}, first)
        assert process.poll() is None


def test_a_rank_of_the_same_host_is_ended_though_a_child_of_it_lives():
    with beside_a_rank_with_a_child("other", "here", "waits") as (first, process):
        assert first.kill(1)
        assert process.wait(HANG) == -signal.SIGKILL
        wait_for({1}, first)
        assert first.kill(1)


def test_a_rank_that_runs_elsewhere_is_not_ended_from_here():
    with beside_a_rank_with_a_child("python", "elsewhere", "waits") as (first, process):
        assert not first.kill(1)
        assert process.poll() is None


@pytest.mark.parametrize("name", ["os.pidfd_open", "signal.pidfd_send_signal"])
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_where_the_system_cannot_end_a_rank_gpi2_has_to(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int
):
    def refuse(*arguments: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(name, refuse)
    first, second = join(2)
    assert not first.kill(1) and first.lost() == set()
    second.close()
    wait_for({1}, first)
    first.close()
