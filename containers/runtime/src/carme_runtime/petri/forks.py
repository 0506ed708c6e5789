"""The process from which workers are forked.

It is forked from the user's program when a run starts, with the functions of the net as they are there,
notebooks' too, and has a single thread. It ends its workers when the coordinator is gone, those at a
task that takes longer than its limit, and the programs that a killed worker has left. It collects what
workers print, up to a limit.
"""

import contextlib
import gc
import mmap
import os
import random
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from carme_runtime.petri.channel import encode
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.memory import Memory
from carme_runtime.petri.store import Store
from carme_runtime.petri.worker import SLOT, Worker

#: The most that output.log takes of what workers print.
MOST_OUTPUT = 16 << 20
#: Seconds between two looks for tasks that take longer than their limit, which is exceeded by so much.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0

#: Sockets of all coordinators in this process, which no child may keep: their end is how a child sees
#: that a coordinator is gone.
open_descriptors: set[int] = set()


def start(
    net: Definition, folder: Path, slots: mmap.mmap, close: list[int], store: Store
) -> tuple[int, socket.socket]:
    """Fork it: its process and the connection for its requests.

    A request is the number of a worker, with its two sockets. The answers are ("started", slot, process),
    ("overdue", slot, process, number of the task), ("ended", slot, process, status) and ("flood",).
    """
    coordinator_end, server_end = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        server_end.close()
        open_descriptors.add(coordinator_end.fileno())
        return process, coordinator_end
    try:
        for descriptor in {*open_descriptors, *close, coordinator_end.fileno()} - {store.alive}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        _become_quiet()
        # Workers never free what they have of the program: the threads of native objects are not there.
        gc.freeze()
        _ForkServer(net, folder, slots, server_end, store).serve()
    finally:
        os._exit(0)


def _become_quiet() -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class _ForkServer:
    def __init__(
        self, net: Definition, folder: Path, slots: mmap.mmap, requests: socket.socket, store: Store
    ) -> None:
        self._store = store
        self._net, self._folder, self._slots, self._requests = net, folder, slots, requests
        self._workers: dict[int, int] = {}
        limits = [each.limit for each in net.transitions.values() if each.limit]
        #: Between two looks for tasks that take longer than their limit; None: no task has one.
        self._pause = min(max(min(limits) / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE) if limits else None
        self._next_check = 0.0
        self._written = 0
        self._out, self._out_write = os.pipe()
        os.set_blocking(self._out, False)
        self._log = -1
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._inner = [self._out, self._woken, wake, requests.fileno()]

    def serve(self) -> None:
        """Serve until the coordinator is gone, and end the workers then."""
        try:
            with selectors.DefaultSelector() as selector:
                self._selector = selector
                for each in (self._requests, self._out, self._woken):
                    selector.register(each, selectors.EVENT_READ)
                while self._step({key.fileobj for key, _ in selector.select(self._pause)}):
                    pass
        finally:
            for process in self._workers:
                with contextlib.suppress(OSError):
                    os.killpg(process, signal.SIGKILL)

    def _step(self, ready: set[Any]) -> bool:
        if self._pause is not None and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + self._pause
            self._end_overdue()
        if self._out in ready:
            self._collect()
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._reap()
        if self._requests in ready:
            data, descriptors, _, _ = socket.recv_fds(self._requests, 4, 2)
            if not data:
                return False
            self._fork(int.from_bytes(data, "little"), *descriptors)
        return True

    def _end_overdue(self) -> None:
        """End workers whose task takes longer than its limit."""
        for process, slot in self._workers.items():
            number, deadline = SLOT.unpack_from(self._slots, slot * SLOT.size)
            if deadline and deadline < time.monotonic():
                self._answer(("overdue", slot, process, number))
                with contextlib.suppress(OSError):
                    os.killpg(process, signal.SIGKILL)
                SLOT.pack_into(self._slots, slot * SLOT.size, number, 0.0)

    def _fork(self, slot: int, tasks: int, control: int) -> None:
        process = os.fork()
        if process:
            os.close(tasks)
            os.close(control)
            # Here as well: a worker that is killed at once has no group of its own yet.
            with contextlib.suppress(OSError):
                os.setpgid(process, process)
            self._workers[process] = slot
            self._answer(("started", slot, process))
            return
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            os.dup2(self._out_write, 1)
            os.dup2(self._out_write, 2)
            null_device = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null_device, 0)
            for descriptor in (*self._inner, self._out_write, null_device):
                os.close(descriptor)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            random.seed()
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed()  # type: ignore[attr-defined]
            try:
                memory = Memory(self._store)
                memory.register()
                # For programs in other languages, which find ranges by their names: see carme_ranges.h.
                os.environ["CARME_RANGES"] = os.pathsep.join(map(str, self._store.folders))
                channels = socket.socket(fileno=tasks), socket.socket(fileno=control)
                Worker(self._net, *channels, self._slots, slot, memory).run()
            except (BrokenPipeError, ConnectionResetError):  # the coordinator is gone
                pass
            except Exception:  # goes into output.log, which says why workers end at once
                traceback.print_exc()
        finally:
            os._exit(0)

    def _reap(self) -> None:
        """Report workers that have ended; what they have started goes with them."""
        while self._workers:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            # Before it is reaped, as its number can be another's after that.
            with contextlib.suppress(OSError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            slot = self._workers.pop(ended.si_pid, None)
            if slot is not None:
                self._answer(("ended", slot, ended.si_pid, status))

    def _collect(self) -> None:
        try:
            data = os.read(self._out, 1 << 16)
        except BlockingIOError:
            return
        if self._written >= MOST_OUTPUT or not data:
            return
        self._written += len(data)
        try:
            if self._log < 0:
                self._log = os.open(
                    self._folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
                )
            os.write(self._log, data)
            if self._written >= MOST_OUTPUT:
                os.write(self._log, f"\n(More than {MOST_OUTPUT >> 20} MiB: the rest is dropped.)\n".encode())
        except OSError:  # a full disk: the journal's error says so
            self._written = MOST_OUTPUT
        if self._written >= MOST_OUTPUT:
            self._answer(("flood",))

    def _answer(self, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):
            self._requests.sendall(encode(message))
