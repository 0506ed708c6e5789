"""The processes that serve the portal, about one for each core, forked from one that watches them."""

import asyncio
import contextlib
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from multiprocessing.context import ForkProcess
from types import FrameType

import uvicorn

from carme.errors import ConfigError
from carme_webui.notifier import notifier

__all__ = ["BACKLOG", "serve"]

logger = logging.getLogger(__name__)

#: Seconds that the processes may take to end when they are told to.
PATIENCE = 20.0
#: A process that lived for fewer seconds than this is replaced only after them.
SHORT_LIFE = 1.0
BACKLOG = 2048

ENDS = (signal.SIGTERM, signal.SIGINT)
_fork = multiprocessing.get_context("fork")


class _Server(uvicorn.Server):
    """Uvicorn's server as one process of several: it hears their news, and ends with who watches them."""

    def __init__(self, config: uvicorn.Config, number: int) -> None:
        super().__init__(config)
        self._number = number

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        notifier.be(self._number)
        watcher = multiprocessing.parent_process()
        assert watcher is not None
        asyncio.get_running_loop().add_reader(watcher.sentinel, self._orphaned, watcher.sentinel)
        await super().startup(sockets)

    def _orphaned(self, sentinel: int) -> None:
        asyncio.get_running_loop().remove_reader(sentinel)
        self.should_exit = True


class _Watch:
    """Starts the processes, replaces those that die, and ends them all.

    It has no threads and no connections, so that what is forked from it is clean.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[list[socket.socket]]) -> None:
        self._config = config
        self._sockets = sockets
        self._ending = False
        self._running: dict[int, ForkProcess] = {}
        self._begun: dict[int, float] = {}
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)

    def run(self) -> None:
        """Until a signal says so."""
        assert threading.active_count() == 1, "what is forked from a process with threads may hang"
        before = {number: signal.signal(number, self._end) for number in ENDS}
        earlier = signal.set_wakeup_fd(self._waker.fileno())
        try:
            for number in range(len(self._sockets)):
                self._start(number)
            while not self._ending:
                self._wait(None)
                for number in self._dead():
                    self._replace(number)
            self._stop()
        finally:
            signal.set_wakeup_fd(earlier)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ending = True

    def _start(self, number: int) -> None:
        process = _fork.Process(target=self._serve, args=(number,), name=f"portal {number}")
        # A signal that came before the new process has its own handlers would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        self._running[number], self._begun[number] = process, time.monotonic()

    def _serve(self, number: int) -> None:
        """What a process does."""
        signal.set_wakeup_fd(-1)
        for each in ENDS:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        for other, sockets in enumerate(self._sockets):
            for one in sockets if other != number else ():
                one.close()
        _Server(self._config, number).run(self._sockets[number])

    def _dead(self) -> list[int]:
        return [number for number, process in self._running.items() if process.exitcode is not None]

    def _replace(self, number: int) -> None:
        process = self._running.pop(number)
        logger.error(
            "Process %s, which served the portal, ended with %s; another one takes its place",
            process.pid,
            process.exitcode,
        )
        process.close()
        if (rest := self._begun[number] + SHORT_LIFE - time.monotonic()) > 0:
            time.sleep(rest)
        if not self._ending:
            self._start(number)

    def _wait(self, seconds: float | None) -> None:
        """Until a process ends, a signal comes or the time is over."""
        sentinels = [process.sentinel for process in self._running.values()]
        multiprocessing.connection.wait([self._woken, *sentinels], seconds)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1024)

    def _stop(self) -> None:
        for one in itertools.chain(*self._sockets):
            one.close()  # who comes now is refused, and need not wait
        for process in self._running.values():
            process.terminate()
        end = time.monotonic() + PATIENCE
        for process in self._running.values():
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                logger.error("Process %s does not end and is killed", process.pid)
                process.kill()
                process.join()


def serve(config: uvicorn.Config, processes: int) -> None:
    """Serve until SIGTERM or SIGINT; a process that dies is replaced.

    The application is loaded before they are forked, so that they share its memory and a new one serves at
    once. Each has a socket of its own for the same address, among which the kernel shares out connections.
    They stay open here: whoever asks while a process is replaced waits for a moment and is not refused.

    Raises:
        ConfigError: The portal cannot listen there.
    """
    sockets = _listen(config.host, config.port, processes)
    config.load()
    notifier.share(processes)
    # Looking for garbage among what was loaded, again and again, would take time and unshare its memory.
    gc.collect()
    gc.freeze()
    _Watch(config, sockets).run()


def _listen(host: str, port: int, processes: int) -> list[list[socket.socket]]:
    """For each process a socket for each address of the host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = {(family, address) for family, _type, _protocol, _name, address in found}
        for family, address in addresses:
            # Another portal on the same address would go unnoticed: sockets that share one ask for no more.
            socket.create_server(address, family=family).close()
        return [
            [
                socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=True)
                for family, address in addresses
            ]
            for _ in range(processes)
        ]
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError(
            f"The portal cannot listen on {host}:{port}: {why}.",
            "End what listens there, or change 'listen' in [portal] of carme.toml.",
        ) from None
