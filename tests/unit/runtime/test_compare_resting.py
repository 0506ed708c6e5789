"""Ranks whose library never rests are stopped between turns, so that others have their cores."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.compare.contestants import CONTESTANTS
from patience import HANG

#: A rank with a thread that computes all the time; it answers each order with the time that it used.
RANK = """
import socket, sys, threading, time
from carme_runtime.compare.resting import Rest

connection = socket.socket(fileno=int(sys.argv[1]))

def compute():
    while True:
        pass

threading.Thread(target=compute, daemon=True).start()
rest = Rest(connection.fileno())
print(rest._watcher.pid, flush=True)
while True:
    rest.until_order()
    if not connection.recv(1):
        break
    connection.sendall(f"{time.process_time()}\\n".encode())
"""


@pytest.fixture
def rank() -> Iterator[Any]:
    """The rank, its watcher's number, and the other end of its connection."""
    connection, peer = socket.socketpair()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(peer.fileno())],
        pass_fds=[peer.fileno()], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    peer.close()
    connection.settimeout(HANG)
    assert process.stdout
    try:
        yield process, int(process.stdout.readline()), connection
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        connection.close()


def state(pid: int) -> str:
    """One letter, as /proc has it; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(pid: int, *states: str) -> None:
    end = time.monotonic() + HANG
    while state(pid) not in states:
        assert time.monotonic() < end, state(pid)
        time.sleep(0.01)


def used(connection: socket.socket) -> float:
    connection.sendall(b"?")
    return float(connection.makefile().readline())


def test_a_rank_that_waits_for_its_turn_does_not_compute(rank: Any) -> None:
    process, _, connection = rank
    for _ in range(20):
        wait_for(process.pid, "T")
        before = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        time.sleep(0.02)
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13] == before
        assert used(connection) > 0


def test_orders_that_come_while_it_is_about_to_stop_are_answered(rank: Any) -> None:
    _, _, connection = rank
    assert all(used(connection) > 0 for _ in range(300))


def test_a_resting_rank_ends_with_the_comparison_and_leaves_no_process(rank: Any) -> None:
    process, watcher, connection = rank
    wait_for(process.pid, "T")
    connection.close()
    assert process.wait(HANG) == 0
    wait_for(watcher, "", "Z")


def test_the_watcher_ends_with_a_rank_that_is_killed_while_it_rests(rank: Any) -> None:
    process, watcher, _ = rank
    wait_for(process.pid, "T")
    process.send_signal(signal.SIGKILL)
    process.wait(HANG)
    wait_for(watcher, "", "Z")


def test_horovods_ranks_rest() -> None:
    """They negotiate a thousand times a second, and had 14 % of the cores of all others."""
    restless = {name for name, contestant in CONTESTANTS.items() if contestant.is_restless}
    assert restless == {name for name, contestant in CONTESTANTS.items() if contestant.backend == "horovod"}
    assert all("HOROVOD_GLOO_TIMEOUT_SECONDS" in CONTESTANTS[name].environment for name in restless)
