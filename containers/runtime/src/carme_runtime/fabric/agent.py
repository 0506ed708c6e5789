"""An agent: passes messages between clients on its node and the nodes of the job, and runs ranks.

The first node's agent has a link to every other one, and passes on what is not for itself. A frame
on these links is one of

    {"members": ...}                                      first to others, whenever a node comes or goes
    {"to": node, "channel": c, "request": {...}}          from a client to a node
    {"to": node, "channel": c, "node": n, "event": {...}} from node n back to the client's node
    {"end": true}                                         first to others: the job is over
    {"beat": true}

where channel "K.N" is client N of node K. Clients say {"node": n, "request": {...}} and hear
{"members": ...} and {"node": n, "event": {...}}. They come through the node's Unix socket, or over the
network as agents do, with the job's key and certificate: having proved that it holds the key, an agent
says {"node": ...} about itself, and a client {"client": true}.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from carme_runtime.fabric import handshake, hosts
from carme_runtime.fabric.frames import FRAME_LIMIT, UNKNOWN_PEER_LIMIT, FrameError, Link, LinkClosed, Message
from carme_runtime.fabric.local_socket import is_own_peer
from carme_runtime.fabric.members import Member, Members
from carme_runtime.fabric.tls import Certificate
from carme_runtime.ranks import Node

HANDSHAKE_SECONDS = 3.0
BEAT_SECONDS = 5.0
SILENT_BEATS = 7  # an agent that says nothing during so many (30 to 35 s) is frozen or cut off
UNKNOWN_PEERS = 64  # connections at a time that have not proved yet that they know the key
ACCEPT_PAUSE_SECONDS = 0.5  # when this process or host has run out of something
LOGGED_REFUSALS = 20  # a port scan must not fill the job's log

log = logging.getLogger("carme-agent")


class Agent:
    """One node's agent.

    Args:
        node: runs the ranks of this node.
        members: the nodes known at the start, this one included.
        number: this node's number.
        uplink: the link to the first node's agent; None on the first node.
        folder: where this node's lists of hosts for MPI are kept; None: nowhere.
    """

    def __init__(
        self,
        node: Node,
        members: Members,
        number: int,
        uplink: Link | None = None,
        folder: Path | None = None,
    ) -> None:
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
        self._folder = folder
        self._list_hosts()

    async def serve_clients(self, listener: socket.socket) -> asyncio.Server:
        """Accept clients of this node at a Unix socket."""
        return await asyncio.start_unix_server(self._serve_client, sock=listener)

    def serve_network(self, listener: socket.socket, key: bytes, certificate: Certificate | None) -> None:
        """Accept other nodes' agents, and clients, at a listening socket that does not block.

        Without a `certificate` nothing is encrypted.
        """
        self._spawn(self._accept(listener, key, certificate))

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
            own = [member for member in self._members.present if member.number == self._number]
            self._set_members(Members.of(own, [*self._members.lost, first.host], self._members.expected))
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
        if self._folder:
            hosts.remove(self._folder)

    async def _accept(self, listener: socket.socket, key: bytes, certificate: Certificate | None) -> None:
        with listener:
            while True:
                try:
                    connection, where = await asyncio.get_running_loop().sock_accept(listener)
                except OSError as error:
                    log.warning("cannot accept connections for a moment: %s", error.strerror)
                    await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                    continue
                self._spawn(self._serve_connection(connection, str(where[0]), key, certificate))

    async def _serve_connection(
        self, connection: socket.socket, address: str, key: bytes, certificate: Certificate | None
    ) -> None:
        if self._unknown_peers >= UNKNOWN_PEERS:
            connection.close()
            self._refuse(address, "too many connections that have not proved yet that they know the key")
            return
        self._unknown_peers += 1
        try:
            link, greeting = await asyncio.wait_for(_let_in(connection, key, certificate), HANDSHAKE_SECONDS)
        except asyncio.TimeoutError:
            self._refuse(address, f"no proof of the key within {HANDSHAKE_SECONDS:g} seconds")
            return
        except handshake.WrongKey:
            self._refuse(address, "it does not hold this job's key")
            return
        except ssl.SSLError as error:
            self._refuse(address, f"no TLS with this job's certificate ({error.reason})")
            return
        except (FrameError, LinkClosed, OSError) as error:
            self._refuse(address, str(error))
            return
        finally:
            self._unknown_peers -= 1
        with contextlib.closing(link):
            if greeting.get("client") is True:
                log.info("a client at %s was let in", address)
                await self._serve_proved_client(link)
            else:
                await self._serve_member(link, greeting, address)

    async def _serve_member(self, link: Link, greeting: Message, address: str) -> None:
        if len(self._members.present) >= self._members.expected:
            self._refuse(address, f"all {self._members.expected} nodes of the job are here already")
            return
        try:
            member = Member(number=self._last_number + 1, **greeting["node"])
        except (KeyError, TypeError):
            self._refuse(address, "neither an agent nor a client")
            return
        self._last_number = member.number
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
        if not self._closing:
            log.error("the agent of %s was lost: %s", member.host, reason)
        del self._joined[member.number]
        present = [each for each in self._members.present if each.number != member.number]
        self._set_members(Members.of(present, [*self._members.lost, member.host], self._members.expected))

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._remember_task(), contextlib.closing(Link(reader, writer, FRAME_LIMIT)) as link:
            if is_own_peer(writer.get_extra_info("socket")):
                await self._serve_proved_client(link)
            else:
                self._refuse("this node", "a process of another user at the Unix socket")

    async def _serve_proved_client(self, link: Link) -> None:
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
            log.warning("dropped a client: %s", error)
        finally:
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
                for event in _refusal(self._node.host, error):  # anyone who runs it must not wait for ever
                    self._route(answer | {"event": event})

    def _set_members(self, members: Members) -> None:
        self._members = members
        self._list_hosts()
        update: Message = {"members": members.as_json()}
        for link in (*self._joined.values(), *self._clients.values()):
            link.send(update)
        numbers = {member.number for member in members.present}
        for channel in self._node.channels():
            if int(channel.split(".")[0]) not in numbers:
                self._node.end(channel)

    def _list_hosts(self) -> None:
        if self._folder:
            hosts.write(self._folder, self._members)

    def _refuse(self, address: str, reason: str) -> None:
        self._refusals += 1
        if self._refusals <= LOGGED_REFUSALS:
            log.warning("refused a connection from %s: %s", address, reason)
        if self._refusals == LOGGED_REFUSALS:
            log.warning("further refused connections are not logged")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` beside the rest, until it ends or `close` ends it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.contextmanager
    def _remember_task(self) -> Iterator[None]:
        """So that `close` can end a task that asyncio's server made."""
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            pass  # asyncio's server would print a traceback for a handler that ends as cancelled
        finally:
            self._tasks.discard(task)


async def _let_in(
    connection: socket.socket, key: bytes, certificate: Certificate | None
) -> tuple[Link, Message]:
    """The link to the peer that proved the key, and its greeting."""
    link = await Link.accept(connection, UNKNOWN_PEER_LIMIT, certificate and certificate.accepting)
    try:
        await handshake.admit(link, key)
        return link, await link.receive()
    except BaseException:
        link.close()
        raise


def _refusal(host: str, error: Exception) -> list[Message]:
    """What a client hears whose request cannot be carried out as it is."""
    message = f"The agent of {host} cannot carry out what it was sent ({error!r})."
    remedy = "Use the same version of Carme's runtime on all nodes."
    return [{"type": "refused", "message": message, "remedy": remedy}, {"type": "over"}]


async def _keep_alive(link: Link) -> None:
    """Let the peer know that we live, and break the link when it has been silent for too long.

    Silence is counted in beats of our own, not by the clock: when this process stood still itself (a job that
    Slurm suspended, a virtual machine that was moved), what the peer sent meanwhile has not been read yet.
    """
    silent, received = 0, link.received_messages
    while silent < SILENT_BEATS:
        await asyncio.sleep(BEAT_SECONDS)
        silent = silent + 1 if link.received_messages == received else 0
        received = link.received_messages
        link.send({"beat": True})
    link.close()
