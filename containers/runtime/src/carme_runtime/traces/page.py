"""A timeline of a run as one page, with all that it needs in it: no server, no network.

Each rank has a row for each of its threads, and further rows where spans overlap. Lines join sends to their
receives.
"""

import heapq
import html
import json
import os
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from carme_runtime.traces.kinds import CATEGORIES, Kind, title
from carme_runtime.traces.recordings import Event, Recording

MOST_SPANS = 200_000  # the longest; more would make browsers slow
_SHORTEST_LANES = 64


class _Page:
    """What goes into the page.

    Args:
        most: Spans of each recording at most.
    """

    def __init__(self, most: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.names: dict[str, int] = {}
        self.totals: list[dict[str, Any]] = []
        self.left_out = self.spans = 0
        self._most = most
        self._sent: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._received: dict[tuple[Any, ...], tuple[int, int]] = {}

    def add(self, recording: Recording) -> None:
        """Take a process."""
        sums: dict[str, int] = {}
        count = 0

        def counted() -> Iterator[Event]:
            nonlocal count
            for event in recording.events():
                category = CATEGORIES[Kind(event.kind)]
                sums[category] = sums.get(category, 0) + event.end - event.begin
                count += 1
                yield event

        longest = heapq.nlargest(self._most, counted(), key=lambda event: event.end - event.begin)
        self.totals.append({"rank": recording.rank, "start": recording.start, "sums": sums})
        self.left_out += count - len(longest)
        self.spans += len(longest)
        for thread in sorted(recording.blocks):
            own = [event for event in longest if event.thread == thread]
            for lane, spans in enumerate(_lanes(own)):
                self._row(recording, thread, lane, spans)

    def _row(self, recording: Recording, thread: int, lane: int, spans: list[Event]) -> None:
        called = recording.threads.get(thread, f"thread {thread}")
        row: list[list[int]] = []
        for event in spans:
            begin, end = recording.corrected(event.begin), recording.corrected(event.end)
            text = title(event.kind, event.name, event.object, event.extra)
            name = self.names.setdefault(text, len(self.names))
            row.append([begin, end - begin, name, event.kind, event.size])
            if event.kind in (Kind.SEND, Kind.RECEIVE) and event.object in recording.groups:
                self._note_message(recording, event, begin if event.kind == Kind.SEND else end)
        start = f", start {recording.start + 1}" if recording.start else ""
        name = f"rank {recording.rank}{start}: {called}" + (f" ({lane + 1})" if lane else "")
        self.rows.append({"rank": recording.rank, "name": name, "spans": row})

    def _note_message(self, recording: Recording, event: Event, at: int) -> None:
        key, ranks = recording.groups[event.object]
        peer = ranks[event.peer]
        sends = event.kind == Kind.SEND
        pair = (recording.rank, peer) if sends else (peer, recording.rank)
        known = self._sent if sends else self._received
        known[(recording.start, key, *pair, event.extra)] = (len(self.rows), at)

    def data(self) -> dict[str, Any]:
        """All of it, with times in nanoseconds from the first."""
        spans = [span for row in self.rows for span in row["spans"]]
        first = min((span[0] for span in spans), default=0)
        for span in spans:
            span[0] -= first
        messages = [
            [self._sent[key][1] - first, self._sent[key][0], at - first, row]
            for key, (row, at) in self._received.items()
            if key in self._sent
        ]
        return {
            "rows": self.rows,
            "names": list(self.names),
            "categories": {int(kind): CATEGORIES[kind] for kind in Kind},
            "messages": messages,
            "totals": self.totals,
            "length": max((span[0] + span[1] for span in spans), default=1),
        }


def _lanes(events: list[Event]) -> list[list[Event]]:
    """Events in rows in which each is within another or beside it."""
    lanes: list[list[Event]] = []
    stacks: list[list[int]] = []
    for event in sorted(events, key=lambda each: (each.begin, -each.end)):
        for lane in range(_SHORTEST_LANES):
            if lane == len(lanes):
                lanes.append([])
                stacks.append([])
            stack = stacks[lane]
            while stack and stack[-1] <= event.begin:
                stack.pop()
            if not stack or event.end <= stack[-1] or lane + 1 == _SHORTEST_LANES:
                stack.append(event.end)
                lanes[lane].append(event)
                break
    return lanes


def write(path: Path, recordings: Iterator[Recording], ranks: int) -> str:
    """Write the page; a sentence about it. Raises TraceError, OSError; nothing is left then."""
    page = _Page(max(MOST_SPANS // ranks, 1000))
    for recording in recordings:
        page.add(recording)
    data = json.dumps(page.data(), separators=(",", ":")).replace("<", "\\u003c")
    shown = f"{page.spans} spans of {ranks} ranks"
    note = f" The {page.left_out} shortest spans are left out." if page.left_out else ""
    template = files("carme_runtime.traces").joinpath("timeline.html").read_text()
    text = template.replace("@NOTE@", html.escape(shown + "." + note)).replace("@DATA@", data)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(draft).chmod(0o666 & ~mask)
        Path(draft).replace(path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise
    return f"The timeline is in {path}: {shown}.{note} Any browser shows it."
