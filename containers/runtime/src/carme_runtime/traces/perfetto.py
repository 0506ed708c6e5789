"""Recordings as events of chrome://tracing and ui.perfetto.dev (Trace Event Format, JSON)."""

import itertools
from collections.abc import Iterator
from typing import Any

from carme_runtime.traces.kinds import CATEGORIES, Kind, title
from carme_runtime.traces.recordings import Recording

_BESIDE = (
    Kind.COLLECTIVE,
    Kind.FIRING,
)  # several may run at a time: tracks of their own, where they may overlap


def events(recording: Recording, begin: int, most: int) -> Iterator[dict[str, Any]]:
    """Events of one rank.

    Args:
        recording: Of it.
        begin: Nanoseconds, from which times count.
        most: So many of them.
    """
    rank = recording.rank
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for thread, name in recording.threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
    for number, event in enumerate(itertools.islice(recording.events(), most)):
        kind = Kind(event.kind)
        name = event.name
        if kind == Kind.PIPELINE:
            name = title(kind, name, event.object, event.extra)
        shown = {"name": name, "cat": CATEGORIES[kind], "pid": rank, "tid": event.thread}
        shown["args"] = {"bytes": event.size}
        first, last = ((at - begin) // 1000 for at in (event.begin, event.end))
        if kind in _BESIDE:
            numbered = shown | {"id": number}
            yield numbered | {"ph": "b", "ts": first}
            yield numbered | {"ph": "e", "ts": last}
        else:
            yield shown | {"ph": "X", "ts": first, "dur": last - first}
