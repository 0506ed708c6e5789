"""What each thread does in a pipeline just now, for reports of hangs, for errors and for profiles."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from carme_runtime import profile

_doing: dict[int, str] = {}  # by thread


@contextmanager
def doing(stage: int, operation: str, micro: int) -> Iterator[None]:
    """This thread works on a micro-batch in a stage: `operation` is such as `forward pass`."""
    thread, text = threading.get_ident(), f"stage {stage}, {operation} of micro-batch {micro}"
    began = time.perf_counter()
    _doing[thread] = text
    try:
        yield
    finally:
        _doing.pop(thread, None)
        if profile.recorder:
            profile.recorder.add(profile.PIPELINE, operation, began, extra=micro, of=stage)


def of_thread(thread: int | None = None) -> str:
    """The stage, pass and micro-batch of a thread, or of this one; empty: it is in none."""
    return _doing.get(threading.get_ident() if thread is None else thread, "")
