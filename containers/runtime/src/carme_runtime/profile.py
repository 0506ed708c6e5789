"""Where a rank's time goes: `carme-run --profile`, and `carme_runtime.progress`.

Each rank writes a file for chrome://tracing or ui.perfetto.dev into the folder that CARME_PROFILE names, with
sums that `table` shows side by side. These are seen: collectives of `carme_runtime` from their begin until
somebody saw that they were over, the main thread's waiting for them and for messages of pipelines, its
waiting for torch's DataLoader, and the passes of pipelines. What is left of the main thread's time is called
computing. Where other threads wait for collectives, the main thread is taken to wait as long as it does not
run.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROFILE = "CARME_PROFILE"
MOST_EVENTS = 200_000  # of one rank; what comes later is summed up only
WAITING, LOADING, COLLECTIVE, PIPELINE = "waiting", "loader", "collective", "pipeline"


class Recorder:
    """Of one rank. Costs about a microsecond for each call that is seen.

    Args:
        folder: Where its file is to be written at the end; None: nowhere, only sums are kept.
        rank: Its number.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._main = threading.main_thread().ident
        self._begin = time.perf_counter()
        self._events: list[tuple[str, str, float, float, int, int]] = []
        self._sums = {WAITING: 0.0, LOADING: 0.0, COLLECTIVE: 0.0, PIPELINE: 0.0}
        self._stage: dict[str, float] = {}  # of the pipeline, and how its steps went
        self._calls = self._bytes = 0
        self._clock = time.pthread_getcpuclockid(self._main or threading.get_ident())
        self._waited_until = 0.0
        self._lock = threading.Lock()
        if folder:
            atexit.register(self.write)

    def add(self, kind: str, name: str, begin: float, size: int = 0) -> None:
        """Something that began at `begin` (time.perf_counter) is over. `size`: bytes of its buffer."""
        end = time.perf_counter()
        thread = threading.get_ident()
        if kind == COLLECTIVE or thread == self._main:
            self._sums[kind] += end - begin
        if kind == COLLECTIVE:
            self._calls += 1
            self._bytes += size
        if self._folder and len(self._events) < MOST_EVENTS:
            self._events.append((kind, name, begin, end, thread, size))

    def add_step(self, stage: int, seconds: float, waited: float, idle: float) -> None:
        """A step of a pipeline is over on this rank.

        Args:
            stage: This rank's.
            seconds: How long it took.
            waited: For other stages meanwhile.
            idle: The part of the time that even stages would wait with this schedule.
        """
        own = self._stage
        own["stage"], own["idle"] = stage, idle
        own["steps"] = own.get("steps", 0) + seconds
        own["waited"] = own.get("waited", 0) + waited

    def mark(self) -> tuple[float, float]:
        """Now, and how long the main thread has computed so far."""
        return time.perf_counter(), time.clock_gettime(self._clock)

    def waited_beside(self, since: tuple[float, float]) -> None:
        """Another thread has waited since a mark for what the main thread needs, as with torch's DDP.

        As far as the main thread did not run meanwhile, it is taken for waiting, too.
        """
        if threading.get_ident() == self._main:
            return
        now, computed = self.mark()
        with self._lock:
            begin = max(since[0], self._waited_until)
            if now > begin:
                self._sums[WAITING] += max(0.0, now - begin - (computed - since[1]))
                self._waited_until = now

    def waits(self) -> tuple[float, float]:
        """For how many seconds the main thread has waited so far: for other ranks, and for its loader."""
        return self._sums[WAITING], self._sums[LOADING]

    def write(self) -> None:
        """Write the rank's file."""
        if self._folder is None:
            return
        seconds = time.perf_counter() - self._begin
        sums = {
            "seconds": seconds,
            "waiting": self._sums[WAITING],
            "loader": self._sums[LOADING],
            "compute": max(seconds - self._sums[WAITING] - self._sums[LOADING], 0.0),
            "collective": self._sums[COLLECTIVE],
            "calls": self._calls,
            "bytes": self._bytes,
            "pipeline": self._stage,
        }
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
        ]
        for number, (kind, name, begin, end, thread, size) in enumerate(self._events):
            event = {"name": name, "cat": kind, "pid": self._rank, "tid": thread, "args": {"bytes": size}}
            first, last = (int((at - self._begin) * 1e6) for at in (begin, end))
            if kind == COLLECTIVE:  # several may run at a time: a track of their own, where they may overlap
                both = event | {"id": number}
                events += [both | {"ph": "b", "ts": first}, both | {"ph": "e", "ts": last}]
            else:
                events.append(event | {"ph": "X", "ts": first, "dur": last - first})
        draft = self._folder / f".rank-{self._rank}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"traceEvents": events, "carme": sums}))
            draft.replace(file_of(self._folder, self._rank))
        except OSError as error:
            message = f"The profile of rank {self._rank} cannot be written: {error.strerror}."
            print(f"carme: {message}", file=sys.stderr, flush=True)


recorder: Recorder | None = None


@contextmanager
def pipeline_step(stage: int, idle: float) -> Iterator[None]:
    """See how long a step of a pipeline takes, and waits; see `Recorder.add_step`."""
    if recorder is None:
        yield
        return
    began, waited = time.perf_counter(), recorder.waits()[0]
    yield
    recorder.add_step(stage, time.perf_counter() - began, recorder.waits()[0] - waited, idle)


def begin() -> None:
    """Record from now on, where CARME_PROFILE or CARME_METRICS says so."""
    global recorder
    folder, rank = os.environ.get(PROFILE), os.environ.get("RANK", "0")
    if recorder is None and (folder or os.environ.get("CARME_METRICS")) and rank.isdecimal():
        recorder = Recorder(Path(folder) if folder else None, int(rank))


def watch_loaders(arrived: Callable[[Any], None] = lambda batch: None) -> None:
    """See how long torch's DataLoader is waited for. torch must have been imported.

    Args:
        arrived: Is called with each batch.
    """
    if recorder is None:
        return
    from torch.utils.data import dataloader  # pyright: ignore[reportMissingImports]

    base = dataloader._BaseDataLoaderIter
    fetch = base.__next__
    if getattr(fetch, "carme", False):
        return

    def timed(iterator: Any) -> Any:
        began = time.perf_counter()
        try:
            batch = fetch(iterator)
        finally:
            if recorder:
                recorder.add(LOADING, "DataLoader", began)
        arrived(batch)
        return batch

    timed.carme = True  # pyright: ignore[reportFunctionMemberAccess]
    base.__next__ = timed  # pyright: ignore[reportAttributeAccessIssue]


def file_of(folder: Path, rank: int) -> Path:
    """A rank's file."""
    return folder / f"rank-{rank}.json"


def forget(folder: Path, ranks: int) -> None:
    """Remove what an earlier run left there."""
    for rank in range(ranks):
        file_of(folder, rank).unlink(missing_ok=True)


def table(folder: Path, ranks: int) -> str:
    """The sums of all ranks, for people."""
    lines = [
        f"Where the ranks' time went (traces for ui.perfetto.dev or chrome://tracing in {folder}):",
        f"{'rank':>5} {'seconds':>9} {'compute':>8} {'waiting':>8} {'loader':>8} {'collectives':>12}"
        f" {'MB':>10}",
    ]
    for rank in range(ranks):
        try:
            sums = json.loads(file_of(folder, rank).read_text())["carme"]
        except (OSError, ValueError, KeyError):
            lines.append(f"{rank:>5}   left no profile: it was killed, or does not use carme_runtime")
            continue
        parts = " ".join(
            f"{100 * sums[name] / max(sums['seconds'], 1e-9):>6.1f} %"
            for name in ("compute", WAITING, LOADING)
        )
        megabytes = sums["bytes"] / 1e6
        lines.append(f"{rank:>5} {sums['seconds']:>9.2f} {parts} {sums['calls']:>12} {megabytes:>10.1f}")
    return "\n".join([*lines, *_stages(folder, ranks)])


def _stages(folder: Path, ranks: int) -> list[str]:
    """How long the stages of pipelines waited for each other."""
    lines = []
    for rank in range(ranks):
        try:
            own = json.loads(file_of(folder, rank).read_text())["carme"]["pipeline"]
        except (OSError, ValueError, KeyError):
            continue
        if own:
            measured = 100 * own["waited"] / max(own["steps"], 1e-9)
            lines.append(
                f"Rank {rank}, stage {own['stage']}: idle for {measured:.1f} % of its steps "
                f"(even stages: {100 * own['idle']:.1f} %)."
            )
    return lines


begin()
