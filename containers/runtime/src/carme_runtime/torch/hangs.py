"""Where the ranks are, when a collective waits for long: their Python stacks, printed by one of them.

A thread of each rank looks at the other threads' stacks now and then. One that finds a call waiting
longer than CARME_HANG_SECONDS asks all ranks, through the store by which they met, to tell where they are.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime import collectives
from carme_runtime.collectives.errors import InvalidCall

_DEFAULT = 300.0
_LONGEST_PAUSE = 5.0  # seconds between two looks
_PAUSES_TO_ANSWER = 2
_ANSWER_SECONDS = 3.0
_DEEPEST = 30  # lines of a stack that are shown
# The innermost Python frame of a thread that waits for other ranks is in one of these.
_WAITING_IN = (
    str(Path(collectives.__file__).parent) + os.sep,
    str(Path(torch.__file__).parent / "distributed") + os.sep,
)


def limit() -> float:
    """Seconds after which a wait is reported, from CARME_HANG_SECONDS; 0: never. Raises InvalidCall."""
    text = os.environ.get("CARME_HANG_SECONDS", "")
    try:
        seconds = float(text) if text else _DEFAULT
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidCall(f"CARME_HANG_SECONDS is '{text}'.", "Give a number of seconds, or 0 for no report.")
    return seconds


class Watch:
    """The thread that looks. `group`: whose life it shares; `store`: the group's; `seconds`: see `limit`."""

    def __init__(self, group: Any, store: Any, rank: int, size: int, seconds: float) -> None:
        self._group = weakref.ref(group)
        self._store = dist.PrefixStore("hangs", store.clone())
        self._rank, self._size, self._seconds = rank, size, seconds
        self._pause = min(seconds / 4, _LONGEST_PAUSE)
        self._answered = 0
        # Frames that were seen waiting, and since when. While they are held no other has their place.
        self._waiting: dict[int, tuple[FrameType, float, bool]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="carme-hangs", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.stop)

    def _work(self) -> None:
        # The store is gone when rank 0 has left, and then there is nobody to wait for.
        with contextlib.suppress(RuntimeError):
            while not self._stopped.wait(self._pause) and self._group() is not None:
                too_long = self._look()
                before = self._answered
                asked = self._store.add("asked", int(too_long))
                if asked > before:
                    self._answer(asked)
                if too_long and asked == before + 1:  # else another one was the first to ask
                    self._report(asked)

    def _look(self) -> bool:
        """Whether a call that was not reported yet has waited for too long."""
        now, before, self._waiting = time.monotonic(), self._waiting, {}
        too_long = False
        for thread, frame in sys._current_frames().items():
            if not frame.f_code.co_filename.startswith(_WAITING_IN) or thread == threading.get_ident():
                continue
            seen, since, reported = before.get(thread, (None, now, False))
            if seen is not frame:
                since, reported = now, False
            if not reported and now - since >= self._seconds:
                too_long = reported = True
            self._waiting[thread] = (frame, since, reported)
        return too_long

    def _answer(self, number: int) -> None:
        where = self._where()
        for unanswered in range(self._answered + 1, number + 1):
            self._store.set(f"{unanswered}/{self._rank}", where)
        self._answered = number

    def _where(self) -> str:
        """The stacks of the main thread, and of others that wait."""
        parts = []
        main = threading.main_thread().ident
        for thread, frame in sys._current_frames().items():
            waits = thread in self._waiting
            if thread != main and not waits:
                continue
            how = "waits" if waits else "runs"
            lines = traceback.format_stack(frame)[-_DEEPEST:]
            name = "" if thread == main else ", in a further thread"
            parts.append(f"{how}{name}:\n{''.join(lines)}".rstrip())
        return "\n".join(parts)

    def _report(self, number: int) -> None:
        end = time.monotonic() + _PAUSES_TO_ANSWER * self._pause + _ANSWER_SECONDS
        missing = set(range(self._size))
        places: dict[str, list[int]] = {}
        while missing and not self._stopped.wait(self._pause / 10):
            for rank in sorted(missing):
                if self._store.check([f"{number}/{rank}"]):
                    places.setdefault(self._store.get(f"{number}/{rank}").decode(), []).append(rank)
                    missing.remove(rank)
            if time.monotonic() > end:
                break
        text = [f"carme: A collective has waited for {self._seconds:g} s. Where the ranks are:"]
        text += [f"{_named(ranks)} {place}" for place, ranks in places.items()]
        if missing:
            text.append(
                f"{_named(sorted(missing))} did not answer: ended, was stopped, or is in a program part "
                "that holds up Python."
            )
        print("\n".join(text), file=sys.stderr, flush=True)


def _named(ranks: list[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Each of ranks {', '.join(map(str, ranks))}"
