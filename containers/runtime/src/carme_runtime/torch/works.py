"""What stands for a collective under way."""

# As in backend.py.
# pyright: reportIncompatibleMethodOverride=false, reportMissingImports=false

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives import FromAny, Pending
from carme_runtime.collectives.errors import Timeout


class CarmeWork(dist.Work):
    """A collective under way; `finish` brings its result to where the caller wants it."""

    # For who waits without a limit, and what such a wait that is over says. The core ends collectives itself.
    _limit = -1
    _late = "A collective was not over in time.", "Wait longer."

    def __init__(
        self,
        group: Any,
        pending: Sequence[Pending | FromAny],
        results: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._group = group
        self._pending = list(pending)
        self._results = results
        self._finish = finish
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is over. Raises what went wrong."""
        limit = milliseconds(timeout)
        if limit < 0:
            limit = self._limit
        end = time.monotonic() + limit / 1000
        # Another thread may wait in here, for longer.
        over = self._lock.acquire(timeout=-1 if limit < 0 else min(limit / 1000, threading.TIMEOUT_MAX))
        if over:
            try:
                over = self._over or self._await(-1 if limit < 0 else end)
            finally:
                self._lock.release()
        if not over:
            raise Timeout(*self._late)
        if self._error:
            raise self._error
        return True

    def _await(self, end: float) -> bool:
        """Wait until it is over, or until `end`, -1: for ever; whether it is over."""
        try:
            for pending in self._pending:
                left = -1 if end < 0 else max(int((end - time.monotonic()) * 1000), 0)
                if not pending.wait(left):
                    return False
            if self._finish:
                self._finish()
        except BaseException as error:
            self._conclude(error)
            raise
        self._conclude(None)
        return True

    def _conclude(self, error: BaseException | None) -> None:
        self._over, self._error = True, error
        self._pending.clear()

    def is_completed(self) -> bool:
        """Whether it is over; then its result is where it belongs."""
        if not self._over and all(pending.done() for pending in self._pending):
            with contextlib.suppress(Exception):  # `exception` has it
                self.wait()
        return self._over

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong; None where nothing did, or it is not over."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._results

    def synchronize(self) -> None:
        """The same as wait, for host tensors."""
        self.wait()

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":  # pyright: ignore
        """Completed, by a thread of the group, when this is over."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._group.complete_later(self, self._future)
        return self._future


class MessageWork(CarmeWork):
    """A message between two members under way.

    Who waits for it without a limit waits for as long as the group allows when the message begins, as on
    Gloo. It may still come after that. `late`: what did not happen then, as a sentence.
    """

    def __init__(
        self,
        group: Any,
        pending: Sequence[Pending | FromAny],
        results: list[torch.Tensor],
        late: str,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(group, pending, results, finish)
        self._limit = group.limit
        self._late = late, "See what the other ranks do, or allow more time: init_process_group(timeout=...)."


class WorkFromAny(MessageWork):
    """A message whose sender `source` knows once it has come."""

    def __init__(
        self,
        group: Any,
        pending: Sequence[Pending | FromAny],
        results: list[torch.Tensor],
        finish: Callable[[], None] | None,
        source: Callable[[], int],
    ) -> None:
        super().__init__(group, pending, results, "No message came from any rank in time.", finish)
        self._source = source

    def _source_rank(self) -> int:
        """For torch: the sender's number in the group."""
        self.wait()
        return self._source()


_completing = threading.local()  # `completes`: in a thread that completes futures


def complete(later: "queue.SimpleQueue[tuple[dist.Work, Any] | None]") -> None:
    """What a thread does that completes futures, one after the other, until None comes."""
    _completing.completes = True
    while (item := later.get()) is not None:
        work, future = item
        try:
            work.wait()
            result = work.result()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del item, work, future


def milliseconds(timeout: timedelta | None) -> int:
    """-1 where there is no limit."""
    if timeout is None or timeout.total_seconds() <= 0:
        return -1
    return max(int(timeout.total_seconds() * 1000), 1)


def completes_here() -> bool:
    """Whether this thread completes futures."""
    return getattr(_completing, "completes", False)
