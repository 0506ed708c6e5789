"""How a client on a node reaches the nodes of its job, or this host alone where there is no job."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.frames import FRAME_LIMIT, FrameError, Link, LinkClosed, Message
from carme_runtime.fabric.local_socket import default_path, is_own_peer
from carme_runtime.fabric.members import Member, Members
from carme_runtime.ranks import Node


@dataclass(frozen=True)
class Event:
    """What happened: on a node, or (without one) to the list of members; after `gone` nothing follows."""

    node: int | None
    content: Message
    gone: bool = False


class Fabric(Protocol):
    """Nodes that take requests and answer with events (see `carme_runtime.ranks.node`)."""

    members: Members
    in_job: bool

    def send(self, node: int, request: dict[str, Any]) -> None:
        """Ask something of a node."""
        ...

    async def next_event(self) -> Event:
        """Wait for what happens next."""
        ...

    async def close(self) -> None:
        """Let go. Ranks that still run are stopped."""
        ...


class AgentConnection:
    """All nodes of the job, by way of this node's agent."""

    in_job = True

    def __init__(self, link: Link, members: Members) -> None:
        self._link = link
        self.members = members

    def send(self, node: int, request: dict[str, Any]) -> None:
        self._link.send({"node": node, "request": request})

    async def next_event(self) -> Event:
        try:
            message = await self._link.receive()
        except (LinkClosed, FrameError):
            return Event(None, {}, gone=True)
        if "members" in message:
            self.members = Members.from_json(message["members"])
            return Event(None, {})
        return Event(message["node"], message["event"])

    def descriptor(self) -> int:
        """Of the connection, which no child of this process should keep."""
        return self._link.descriptor()

    async def close(self) -> None:
        await self._link.flush(1)


class LocalFabric:
    """This host alone, with no agent: for a laptop, or a shell outside of jobs."""

    in_job = False

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._node = Node(environment, "127.0.0.1")
        own = Member(number=0, **self._node.describe())
        self.members = Members.of([own], [], 1)
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def send(self, node: int, request: dict[str, Any]) -> None:
        self._node.handle("run", request, lambda event: self._events.put_nowait(Event(node, event)))

    async def next_event(self) -> Event:
        return await self._events.get()

    async def close(self) -> None:
        self._node.end("run")
        await self._node.close()


async def connect(environment: Mapping[str, str]) -> Fabric:
    """The fabric of the job that this process is part of, or this host alone outside of jobs."""
    named = environment.get("CARME_AGENT")
    path = Path(named) if named else default_path(environment)
    if path is None or (not named and not path.exists()):
        return LocalFabric(environment)
    remedy = "Start a new job, or unset CARME_AGENT and add --nodes 1 to run on this node alone."
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError as error:
        raise CarmeRuntimeError(
            f"The job's agent does not answer at {path}: {error.strerror or error}.", remedy
        ) from None
    if not is_own_peer(writer.get_extra_info("socket")):
        writer.transport.abort()
        raise CarmeRuntimeError(
            f"The agent at {path} runs as another user, not as user {os.getuid()}.",
            "Point CARME_AGENT to the agent of your own job.",
        )
    link = Link(reader, writer, FRAME_LIMIT)
    try:
        return AgentConnection(link, Members.from_json((await link.receive())["members"]))
    except (LinkClosed, FrameError, KeyError):
        raise CarmeRuntimeError(f"The job's agent at {path} ended the connection.", remedy) from None
