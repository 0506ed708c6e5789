"""Sealed frames between agents."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest

from carme_runtime.fabric import agent
from carme_runtime.fabric.frames import FRAME_LIMIT, UNKNOWN_PEER_LIMIT, FrameError, Link, LinkClosed
from carme_runtime.fabric.handshake import WrongKey, admit, join
from patience import HANG

KEY = b"k" * 32


class Wire:
    """Two links whose bytes pass through the test's hands."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.ends: list[socket.socket] = []

    async def open(self) -> "Wire":
        for _ in range(2):
            inner, outer = socket.socketpair()
            outer.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=inner)
            self.links.append(Link(reader, writer, UNKNOWN_PEER_LIMIT))
            self.ends.append(outer)
        return self

    async def carry(self, source: int) -> bytes:
        """One frame from the link `source` to the other."""
        data = await self.take(source)
        await self.give(1 - source, data)
        return data

    async def take(self, source: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.ends[source], FRAME_LIMIT)

    async def give(self, target: int, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.ends[target], data)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    opened = await Wire().open()
    yield opened
    for link in opened.links:
        await link.flush(1)
    for end in opened.ends:
        end.close()


@pytest.fixture
async def sealed(wire: Wire) -> Wire:
    """A wire whose link 0 has joined link 1."""
    both = asyncio.gather(join(wire.links[0], KEY), admit(wire.links[1], KEY))
    seen = await wire.carry(0) + await wire.carry(1) + await wire.carry(0)
    await both
    assert KEY not in seen
    return wire


async def test_frames_pass_both_ways(sealed: Wire) -> None:
    for source in (0, 1, 0):
        sealed.links[source].send({"text": "ü\udc80" * 5000})
        await sealed.carry(source)
        assert await sealed.links[1 - source].receive() == {"text": "ü\udc80" * 5000}


@pytest.mark.parametrize("fault", ["changed", "repeated", "left out", "mirrored"])
async def test_frames_that_were_tampered_with_are_refused(sealed: Wire, fault: str) -> None:
    sealed.links[0].send({"n": 1})
    frame = await sealed.take(0)
    if fault == "changed":
        await sealed.give(1, frame.replace(b'"n":1', b'"n":2'))
    elif fault == "repeated":
        await sealed.give(1, frame + frame)
        await sealed.links[1].receive()
    elif fault == "left out":
        sealed.links[0].send({"n": 2})
        await sealed.carry(0)
    else:
        await sealed.give(0, frame)
    with pytest.raises(FrameError, match="seal"):
        await sealed.links[0 if fault == "mirrored" else 1].receive()


async def test_the_joining_agent_checks_the_first_one_too(wire: Wire) -> None:
    first = asyncio.ensure_future(admit(wire.links[1], b"z" * 32))
    joining = asyncio.ensure_future(join(wire.links[0], KEY))
    await wire.carry(0)
    await wire.carry(1)
    with pytest.raises(WrongKey):
        await joining
    first.cancel()


async def test_an_end_within_a_frame_is_an_error(wire: Wire) -> None:
    await wire.give(0, b"\0\0\0\x09{")
    wire.ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(LinkClosed, match="within a frame"):
        await wire.links[0].receive()


async def test_a_peer_that_falls_silent_is_given_up(sealed: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "BEAT_SECONDS", 0.01)
    await asyncio.wait_for(agent._keep_alive(sealed.links[0]), HANG)
    with pytest.raises(LinkClosed):
        await sealed.links[0].receive()
    await sealed.carry(0)
    assert await sealed.links[1].receive() == {"beat": True}  # it had called until then


async def test_a_peer_is_not_given_up_for_a_standstill_of_our_own(
    sealed: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that Slurm suspends, or a machine that stands still, stops both at once."""
    monkeypatch.setattr(agent, "BEAT_SECONDS", 0.1)
    beats = asyncio.ensure_future(agent._keep_alive(sealed.links[0]))
    hearing = asyncio.ensure_future(sealed.links[0].receive())
    await asyncio.sleep(0)
    time.sleep(agent.SILENT_BEATS * 0.3)  # noqa: ASYNC251 - nothing of this process goes on
    await asyncio.sleep(0.15)
    sealed.links[1].send({"beat": True})
    await sealed.carry(1)
    assert await hearing == {"beat": True}
    assert not beats.done()
    beats.cancel()
