"""One node's ranks: stopping the stubborn, and output that nobody takes."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.ranks import Node, outputs
from carme_runtime.ranks import node as node_module

from .conftest import MEET, PATIENCE, Witness


class Events:
    """What a node answers."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.put = self._queue.put_nowait

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """All events up to the first of `kind`."""
        found: list[dict[str, Any]] = []
        while not found or found[-1]["type"] != kind:
            found.append(await asyncio.wait_for(self._queue.get(), PATIENCE))
        return found


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    started = Node({"SLURMD_NODENAME": "n1"}, "127.0.0.1")
    yield started
    await started.close()


def start(script: Path | str, cwd: str = "/", **environment: str) -> dict[str, Any]:
    return {
        "type": "start",
        "command": [sys.executable, str(script)],
        "cwd": cwd,
        "environment": environment,
        "ranks": [{"rank": 0, "environment": {}}],
    }


async def test_a_rank_that_ignores_termination_is_killed(
    node: Node, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "GRACE", 0.05)
    events = Events()
    text = "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\nsignal.pause()"
    node.handle("r", start(script(text)), events.put)
    await events.until("output")
    node.handle("r", {"type": "stop"}, events.put)
    seen = await events.until("over")
    assert {"type": "exit", "rank": 0, "code": -9, "stopped": True} in seen


async def test_a_rank_that_somebody_else_kills_was_not_stopped(
    node: Node, script: Callable[[str], str]
) -> None:
    events = Events()
    node.handle("r", start(script("import os; os.kill(os.getpid(), 9)")), events.put)
    assert {"type": "exit", "rank": 0, "code": -9, "stopped": False} in await events.until("over")


async def test_children_that_a_rank_leaves_behind_are_killed(
    node: Node, script: Callable[[str], str], witness: Witness
) -> None:
    events = Events()
    text = MEET + "\nif not os.fork(): os.write(1, b'child'); witness.recv(1)\nelse: os.read(0, 1)"
    node.handle("r", start(script(text), **witness.environment), events.put)
    await events.until("over")
    witness.expect(1)
    assert witness.all_gone()


async def test_a_stray_process_that_holds_the_output_does_not_keep_the_run(
    node: Node, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, witness: Witness
) -> None:
    monkeypatch.setattr(outputs, "LINGER", 0.05)
    events = Events()
    # The rank ends only after its child has left the process group.
    text = MEET + (
        "readable, writable = os.pipe()\n"
        "if os.fork(): os.read(readable, 1)\n"
        "else: os.setsid(); os.write(writable, b'x'); witness.sendall(b'r'); witness.recv(2)"
    )
    node.handle("r", start(script(text), **witness.environment), events.put)
    await events.until("over")
    witness.expect(1)
    witness.wait_until_ready()
    witness.release()


async def test_output_waits_until_its_reader_has_printed_it(node: Node, script: Callable[[str], str]) -> None:
    events = Events()
    size = 3 * 2**20
    node.handle("r", start(script(f"print('x' * {size - 1})")), events.put)
    taken = 0
    while taken < outputs.WINDOW:
        taken += (await events.until("output"))[-1]["bytes"]
    with pytest.raises(asyncio.TimeoutError):  # the rank cannot end before somebody reads on
        await asyncio.wait_for(events.until("exit"), 0.2)
    assert taken < outputs.WINDOW + outputs.CHUNK
    node.handle("r", {"type": "more", "bytes": size}, events.put)
    taken += sum(event.get("bytes", 0) for event in await events.until("over"))
    assert taken == size


async def test_what_cannot_start_is_refused(node: Node) -> None:
    for request, words in (
        (start("x", cwd="/no/such/folder"), "The folder /no/such/folder does not exist on n1."),
        (start("x") | {"command": ["/no/program"]}, "/no/program cannot be started on n1: No such file"),
        (start("x") | {"command": ["/bin/true", "a\0b"]}, "/bin/true cannot be started on n1: embedded null"),
    ):
        events = Events()
        node.handle(words, request, events.put)
        assert words in (await events.until("over"))[0]["message"]
    assert node.channels() == []


def test_devices_are_those_of_the_job() -> None:
    counts = {"": 0, "-1": 0, "NoDevFiles": 0, "0": 1, "2,5": 2, "GPU-8f, MIG-1/2/3": 2}
    for value, count in counts.items():
        assert node_module.count_devices({"CUDA_VISIBLE_DEVICES": value}) == count
    assert node_module.count_devices({}) == 0
