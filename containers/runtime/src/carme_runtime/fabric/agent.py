"""An agent: passes messages between clients on its node and the nodes of the job, and runs ranks.

The first node's agent has a link to every other one, and passes on what is not for itself. A frame
on these links is one of

    {"members": ...}                                      first to others, whenever a node comes or goes
    {"to": node, "channel": c, "request": {...}}          from a client to a node
    {"to": node, "channel": c, "node": n, "event": {...}} from node n back to the client's node
    {"end": true}                                         first to others: the job is over
    {"beat": true}

where channel "K.N" is client N of node K. Clients say {"node": n, "request": {...}} and hear
{"members": ...} and {"node": n, "event": {...}}.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

from carme_runtime.fabric import handshake
from carme_runtime.fabric.frames import FRAME_LIMIT, UNKNOWN_PEER_LIMIT, FrameError, Link, LinkClosed, Message
from carme_runtime.fabric.local_socket import is_own_peer
from carme_runtime.fabric.members import Member, Members
from carme_runtime.ranks import Node

HANDSHAKE_SECONDS = 3.0
BEAT_SECONDS = 5.0
SILENCE_SECONDS = 30.0  # an agent that says nothing for so long is frozen or cut off
UNKNOWN_PEERS = 64  # connections at a time that have not proved yet that they know the key
LOGGED_REFUSALS = 20  # a port scan must not fill the job's log

log = logging.getLogger("carme-agent")


class Agent:
    """One node's agent.

    Args:
        node: runs the ranks of this node.
        members: the nodes known at the start, this one included.
        number: this node's number.
        uplink: the link to the first node's agent; None on the first node.
    """

    def __init__(self, node: Node, members: Members, number: int, uplink: Link | None = None) -> None:
        self._node = node
        self._members = members
        self._number = number
        self._uplink = uplink
        self._joined: dict[int, Link] = {}
        self._clients: dict[int, Link] = {}
        self._last_client = 0
        self._last_number = number
        self._unknown_peers = 0
        self._refusals = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def serve_clients(self, listener: socket.socket) -> asyncio.Server:
        """Accept clients of this node at a Unix socket."""
        return await asyncio.start_unix_server(self._serve_client, sock=listener)

    async def serve_agents(self, host: str, key: bytes) -> asyncio.Server:
        """Accept the agents of the other nodes at a free port of `host`. Raises OSError."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve_agent(Link(reader, writer, UNKNOWN_PEER_LIMIT), key)

        return await asyncio.start_server(serve, host, 0)

    async def follow(self) -> bool:
        """Serve the first node's agent until the job is over (True) or that agent is lost (False)."""
        assert self._uplink
        beats = asyncio.create_task(_keep_alive(self._uplink))
        try:
            while True:
                message = await self._uplink.receive()
                if "end" in message:
                    return True
                self._take(message)
        except (LinkClosed, FrameError, KeyError, TypeError, ValueError):
            first = next(member for member in self._members.present if member.number == 0)
            log.error("the agent of %s, the job's first node, was lost: ending the ranks here", first.host)
            mine = [member for member in self._members.present if member.number == self._number]
            self._set_members(Members.of(mine, [*self._members.lost, first.host], self._members.expected))
            return False
        finally:
            beats.cancel()

    async def close(self) -> None:
        """End the ranks on this node, and let clients and the other agents go."""
        self._closing = True
        for link in self._joined.values():
            link.send({"end": True})
        await self._node.close()
        links = [*self._joined.values(), *self._clients.values(), *([self._uplink] if self._uplink else [])]
        await asyncio.gather(*(link.flush(1) for link in links))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve_agent(self, link: Link, key: bytes) -> None:
        with self._remember_task():
            if self._unknown_peers >= UNKNOWN_PEERS:
                self._refuse(link, "too many connections that have not proved yet that they know the key")
                return
            self._unknown_peers += 1
            try:
                await asyncio.wait_for(handshake.admit(link, key), HANDSHAKE_SECONDS)
                about = (await asyncio.wait_for(link.receive(), HANDSHAKE_SECONDS))["node"]
                self._last_number += 1
                member = Member(number=self._last_number, **about)
            except asyncio.TimeoutError:
                self._refuse(link, f"no proof of the key within {HANDSHAKE_SECONDS:g} seconds")
                return
            except handshake.WrongKey:
                self._refuse(link, "it does not hold this job's key")
                return
            except (FrameError, LinkClosed, KeyError, TypeError) as error:
                self._refuse(link, str(error))
                return
            finally:
                self._unknown_peers -= 1
            if len(self._members.present) >= self._members.expected:
                self._refuse(link, f"all {self._members.expected} nodes of the job are here already")
                return
            await self._serve_member(link, member)

    async def _serve_member(self, link: Link, member: Member) -> None:
        link.send({"number": member.number})
        self._joined[member.number] = link
        self._set_members(
            Members.of([*self._members.present, member], list(self._members.lost), self._members.expected)
        )
        log.info("%s joined: %d of %d nodes", member.host, len(self._members.present), self._members.expected)
        beats = asyncio.create_task(_keep_alive(link))
        reason = ""
        try:
            while True:
                self._take(await link.receive())
        except (LinkClosed, FrameError, KeyError, TypeError, ValueError) as error:
            reason = str(error)
        finally:
            beats.cancel()
            link.abort()
        if not self._closing:
            log.error("the agent of %s was lost: %s", member.host, reason)
        del self._joined[member.number]
        present = [each for each in self._members.present if each.number != member.number]
        self._set_members(Members.of(present, [*self._members.lost, member.host], self._members.expected))

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._remember_task():
            link = Link(reader, writer, FRAME_LIMIT)
            if not is_own_peer(writer.get_extra_info("socket")):
                self._refuse(link, "a process of another user at the Unix socket")
                return
            self._last_client += 1
            client = self._last_client
            channel = f"{self._number}.{client}"
            self._clients[client] = link
            link.send({"members": self._members.as_json()})
            try:
                while True:
                    frame = await link.receive()
                    if type(frame.get("node")) is not int or "type" not in frame["request"]:
                        raise FrameError("a request without node and type")
                    self._route({"to": frame["node"], "channel": channel, "request": frame["request"]})
            except LinkClosed:
                pass
            except (FrameError, KeyError, TypeError, ValueError) as error:
                log.warning("dropped a client at the Unix socket: %s", error)
            finally:
                link.abort()
                del self._clients[client]
                for member in self._members.present:
                    self._route({"to": member.number, "channel": channel, "request": {"type": "end"}})

    def _take(self, message: Message) -> None:
        if "members" in message:
            self._set_members(Members.from_json(message["members"]))
        elif "to" in message:
            self._route(message)

    def _route(self, frame: Message) -> None:
        to = frame["to"]
        if to == self._number:
            self._deliver(frame)
        elif self._uplink:
            self._uplink.send(frame)
        elif to in self._joined:
            self._joined[to].send(frame)
        # Else that node was lost, which everybody learns from the list of members.

    def _deliver(self, frame: Message) -> None:
        channel: str = frame["channel"]
        node, client = map(int, channel.split("."))
        if "event" in frame:
            if client in self._clients:
                self._clients[client].send({"node": frame["node"], "event": frame["event"]})
        elif frame["request"]["type"] == "end":
            self._node.end(channel)
        else:
            answer = {"to": node, "channel": channel, "node": self._number}
            try:
                self._node.handle(
                    channel, frame["request"], lambda event: self._route(answer | {"event": event})
                )
            except (KeyError, TypeError, ValueError) as error:  # the client's fault, not that of the link
                log.warning("dropped the run %s: a request without sense (%r)", channel, error)
                self._node.end(channel)

    def _set_members(self, members: Members) -> None:
        self._members = members
        news: Message = {"members": members.as_json()}
        for link in (*self._joined.values(), *self._clients.values()):
            link.send(news)
        numbers = {member.number for member in members.present}
        for channel in self._node.channels():
            if int(channel.split(".")[0]) not in numbers:
                self._node.end(channel)

    def _refuse(self, link: Link, reason: str) -> None:
        self._refusals += 1
        if self._refusals <= LOGGED_REFUSALS:
            log.warning("refused a connection from %s: %s", link.peer_address(), reason)
        if self._refusals == LOGGED_REFUSALS:
            log.warning("further refused connections are not logged")
        link.abort()

    @contextlib.contextmanager
    def _remember_task(self) -> Iterator[None]:
        """So that `close` can end it."""
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            pass  # asyncio's server would print a traceback for a handler that ends as cancelled
        finally:
            self._tasks.discard(task)


async def _keep_alive(link: Link) -> None:
    """Let the peer know that we live, and break the link when it has been silent for too long."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        if loop.time() - link.heard > SILENCE_SECONDS:
            link.abort()
            return
        link.send({"beat": True})
