"""The other nodes of the job, as the coordinator sees them.

On each of them the job's agent starts `carme_runtime.petri.remote`, which forks workers as the coordinator
does on its own node. Tasks and results travel over the job fabric, so there are no further ports and keys.
"""

import asyncio
import base64
import concurrent.futures
import contextlib
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import carme_runtime
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import AgentConnection, Event, Fabric, connect
from carme_runtime.fabric.members import Member
from carme_runtime.launcher.nodes import wait_for_nodes
from carme_runtime.petri import forks
from carme_runtime.petri.channel import Reader, encode
from carme_runtime.petri.errors import PetriError
from carme_runtime.ranks import without_secrets
from carme_runtime.ranks.node import NODE_VARIABLES

#: Of one message to a program on another node.
_PIECE = 1 << 18
#: Without a word from them.
_MOST_STARTS = 5
#: Seconds that those programs have to end.
_ENDING_SECONDS = 5.0

#: (number of the node, what its program says); besides what `remote` sends these are ("gone",) when the
#: program has ended and starts again, and ("lost", host) when the node is gone.
Message = tuple[int, tuple[Any, ...]]


class Nodes:
    """The other nodes of the job; none outside of jobs.

    Args:
        folder: Of the run, with the journal that names the net's script.
        wake: Called, in another thread, whenever `take` has something.
        settings: What the programs there begin with, see `remote`.

    Raises:
        PetriError: The job's nodes cannot be reached.
    """

    def __init__(self, folder: Path, wake: Callable[[], None], settings: dict[str, Any]) -> None:
        self._command = [sys.executable, "-m", "carme_runtime.petri.remote", str(folder)]
        self._folder, self._settings = folder, settings
        self._wake = wake
        self._messages: deque[Message] = deque()
        self._waiting: dict[int, bytearray] = {}
        self._taken: dict[int, bool] = {}
        self._readers: dict[int, Reader] = {}
        self._vain: dict[int, int] = {}  # how often its program has ended without a word
        self._members: dict[int, Member] = {}
        self._fabric: Fabric | None = None
        self._closing = False
        #: The address of this node.
        self.host = "127.0.0.1"
        #: The report about nodes that are not there.
        self.notice = ""
        self._loop = asyncio.new_event_loop()
        found: concurrent.futures.Future[list[Member]] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._serve, args=(found,), name="carme-petri-nodes", daemon=True
        )
        self._thread.start()
        try:
            self.members = found.result()
        except CarmeRuntimeError as error:
            raise PetriError(error.message, error.remedy) from None

    def send(self, node: int, *message: Any) -> None:
        """Send to the program on a node, from any thread."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._send, node, encode(message))

    def take(self) -> list[Message]:
        """What has come meanwhile."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._messages.popleft())
        return found

    def close(self) -> None:
        """End the programs there."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(2 * _ENDING_SECONDS)

    def _serve(self, found: "concurrent.futures.Future[list[Member]]") -> None:
        try:
            self._loop.run_until_complete(self._run(found))
        except BaseException as error:
            if not found.done():
                found.set_exception(error)
            else:
                self._report(-1, "refused", f"The job's nodes are gone: {error}.", "Resume the run.")
        finally:
            self._loop.close()

    async def _run(self, found: "concurrent.futures.Future[list[Member]]") -> None:
        self._fabric = fabric = await connect(os.environ)
        descriptor = fabric.descriptor() if isinstance(fabric, AgentConnection) else -1
        forks.open_descriptors.add(descriptor)
        try:
            try:
                await wait_for_nodes(fabric, None)
            except CarmeRuntimeError as error:  # workers come and go: those that are there are enough
                self.notice = error.message
            own_host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
            peers = [each for each in fabric.members.present if fabric.in_job and each.host != own_host]
            self._members = {each.number: each for each in peers}
            self.host = next(
                (each.address for each in fabric.members.present if each.host == own_host), self.host
            )
            for number in self._members:
                self._start(number)
            found.set_result(peers)
            while self._members:
                self._take(await fabric.next_event())
        finally:
            forks.open_descriptors.discard(descriptor)
            await fabric.close()

    def _start(self, node: int) -> None:
        self._waiting[node], self._taken[node], self._readers[node] = bytearray(), True, Reader()
        # The runtime that this program has, whatever else is installed there.
        own = {"PYTHONPATH": os.pathsep.join([str(Path(carme_runtime.__file__).parents[1]), *sys.path])}
        passed_on = {k: v for k, v in without_secrets(os.environ).items() if k not in NODE_VARIABLES}
        request = {"type": "shell", "command": self._command, "environment": passed_on | own, "size": None}
        assert self._fabric
        self._fabric.send(node, request)
        member = self._members[node]
        own = {"node": member.host, "address": member.address, "version": carme_runtime.__version__}
        self._send(node, encode(("begin", 0, self._settings | own)))

    def _send(self, node: int, data: bytes) -> None:
        if node in self._members:
            self._waiting[node] += data
            self._pass_on(node)

    def _pass_on(self, node: int) -> None:
        waiting = self._waiting[node]
        if self._taken[node] and waiting:
            self._taken[node] = False
            piece = base64.b64encode(waiting[:_PIECE]).decode("ascii")
            del waiting[:_PIECE]
            assert self._fabric
            self._fabric.send(node, {"type": "input", "data": piece})

    def _take(self, event: Event) -> None:
        assert self._fabric
        if event.gone:
            lost = list(self._members)
        else:
            present = {member.number for member in self._fabric.members.present}
            lost = [number for number in self._members if number not in present]
        for number in lost:
            self._report(number, "lost", self._members.pop(number).host)
        node, content = event.node, event.content
        if node is None or node not in self._members:
            return
        if content["type"] == "taken":
            self._taken[node] = True
            self._pass_on(node)
        elif content["type"] == "shown":
            self._fabric.send(node, {"type": "more", "bytes": content["bytes"]})
            self._show(node, content["stream"], base64.b64decode(content["data"]))
        elif content["type"] == "refused":
            self._report(node, "refused", content["message"], content.get("remedy", ""))
        elif content["type"] == "ended":
            if self._closing:
                del self._members[node]
            elif self._vain.get(node, 0) >= _MOST_STARTS:
                host = self._members.pop(node).host
                sentence = f"The program for workers on {host} ends as soon as it starts."
                self._report(node, "refused", sentence, f"See {self._folder / 'output.log'}, and resume.")
            else:
                self._vain[node] = self._vain.get(node, 0) + 1
                self._report(node, "gone")
                self._start(node)

    def _show(self, node: int, stream: int, data: bytes) -> None:
        if stream == 1:
            self._vain[node] = 0
            for message in self._readers[node].feed(data):
                self._report(node, *message)
            return
        with contextlib.suppress(OSError), (self._folder / "output.log").open("ab") as log:
            log.write(data)

    def _report(self, node: int, *message: Any) -> None:
        self._messages.append((node, message))
        self._wake()

    def _end(self) -> None:
        self._closing = True
        assert self._fabric
        for node in self._members:
            self._fabric.send(node, {"type": "signal", "signal": 15})
        self._loop.call_later(_ENDING_SECONDS, self._members.clear)
