"""Progress of training, which each rank sends to the listener that CARME_METRICS names.

Where that variable names a Unix datagram socket, every rank that trains sends it, every five seconds, one
JSON object of sums since its first step:

    {"rank": 0, "size": 4, "seconds": 60.0, "steps": 120, "samples": 7680, "loss": 0.41,
     "wait": {"data": 12.5, "ranks": 3.1}}

`samples`, `loss` and the parts of `wait` are left out where nobody has measured them. Nobody waits for an
answer, a message that cannot be sent is forgotten, and who listens sees sums, so that none is missed.

Steps of optimizers of PyTorch, samples of its DataLoader and waits for it, and Keras' batches are seen
without a word of the script. A PyTorch script reports its loss itself: `report(loss=loss)`.
"""

import atexit
import contextlib
import importlib
import json
import math
import os
import socket
import threading
import time
import warnings
import weakref
from typing import Any

from carme_runtime import profile

__all__ = ["METRICS", "Progress", "active", "batch", "begin", "report", "watch_optimizers"]

METRICS = "CARME_METRICS"
INTERVAL = 5.0  # seconds between two messages


class Progress:
    """Of one rank.

    Args:
        where: The socket's path.
        rank, size: Of the run.
    """

    def __init__(self, where: str, rank: int, size: int) -> None:
        self._where, self._rank, self._size = where, rank, size
        self._process = os.getpid()
        self._begin = 0.0
        self._steps = self._samples = self._pending = 0
        self._loss: float | None = None
        self._loss_due = 0.0
        self._waited: tuple[float, float] = (0.0, 0.0)
        self._optimizer: weakref.ref[Any] | None = None
        self._over = threading.Event()
        self._socket: socket.socket | None = None

    def report(self, steps: int = 0, samples: int = 0, loss: Any = None) -> None:
        """So much more was done.

        Args:
            steps: Of the optimizer.
            samples: That this rank has used for them.
            loss: This rank's last one: a number, or what `float` makes one of, which is done every five
                seconds, since a GPU has to be waited for.
        """
        if os.getpid() != self._process:
            return  # a worker of the loader
        now = time.perf_counter()
        if self._socket is None:
            self._start(now)
        self._steps += steps
        self._samples += samples
        if loss is not None and now >= self._loss_due:
            self._loss_due = now + INTERVAL
            with contextlib.suppress(TypeError, ValueError):
                # PyTorch warns where a tensor that gradients flow through becomes a number.
                self._loss = float(loss.detach() if hasattr(loss, "detach") else loss)

    def loaded(self, samples: int) -> None:
        """A batch of so many samples is there; they count with the next step."""
        self._pending += samples

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step. Where there are several, the first of them counts."""
        known = self._optimizer() if self._optimizer else None
        if known is None:
            self._optimizer = weakref.ref(optimizer)
        elif known is not optimizer:
            return
        samples, self._pending = self._pending, 0
        self.report(steps=1, samples=samples)

    def message(self) -> bytes:
        """What is sent."""
        ranks, data = self._waits()
        wait = {"ranks": round(ranks - self._waited[0], 6), "data": round(data - self._waited[1], 6)}
        seconds = time.perf_counter() - self._begin
        message: dict[str, Any] = {
            "rank": self._rank,
            "size": self._size,
            "seconds": round(seconds, 6),
            "steps": self._steps,
            # The first step may have waited before it was over, and the clock began.
            "wait": {name: min(value, seconds) for name, value in wait.items() if value > 0},
        }
        if self._samples:
            message["samples"] = self._samples
        if self._loss is not None and math.isfinite(self._loss):
            message["loss"] = self._loss
        return json.dumps(message).encode()

    def _waits(self) -> tuple[float, float]:
        return profile.recorder.waits() if profile.recorder else (0.0, 0.0)

    def _start(self, now: float) -> None:
        self._begin, self._waited = now, self._waits()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        atexit.register(self._send)
        threading.Thread(target=self._run, name="carme-progress", daemon=True).start()

    def _run(self) -> None:
        self._send()
        while not self._over.wait(INTERVAL):
            self._send()

    def _send(self) -> None:
        if self._socket is not None and os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._socket.sendto(self.message(), self._where)


progress: Progress | None = None


def begin() -> None:
    """Count from now on, where CARME_METRICS says so."""
    global progress
    where = os.environ.get(METRICS)
    rank, size = (os.environ.get(name, usual) for name, usual in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if progress is None and where and rank.isdecimal() and size.isdecimal():
        progress = Progress(where, int(rank), int(size))


def active() -> bool:
    """Whether somebody wants to know."""
    return progress is not None


def report(*, loss: Any = None, samples: int = 0, steps: int = 0) -> None:
    """Report progress from a loop that is not seen by itself; see `Progress.report`.

    In a PyTorch script only the loss needs this. Of a loss on a GPU, the value is read every five seconds:

        carme_runtime.progress.report(loss=loss)
    """
    if progress:
        progress.report(steps, samples, loss)


def __getattr__(name: str) -> Any:
    if name == "tell":
        warnings.warn("carme_runtime.progress.tell is now called report.", DeprecationWarning, stacklevel=2)
        return report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def batch(data: Any) -> None:
    """A batch of torch's DataLoader has come. What is read without gradients is not training."""
    if progress is None:
        return
    import torch  # pyright: ignore[reportMissingImports]

    if torch.is_grad_enabled():
        progress.loaded(_length(data))


def watch_optimizers() -> None:
    """Count the steps of all optimizers of PyTorch, which must have been imported."""
    if progress is None:
        return
    optimizers: Any = importlib.import_module("torch.optim.optimizer")
    register = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register and not getattr(watch_optimizers, "done", False):
        watch_optimizers.done = True  # pyright: ignore[reportFunctionMemberAccess]
        register(lambda stepping, arguments, keywords: progress.stepped(stepping) if progress else None)


def _length(data: Any) -> int:
    """The first dimension of the first tensor in a batch."""
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, (list, tuple)):
        return next((found for each in data if (found := _length(each))), 0)
    shape = getattr(data, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else 0


begin()
