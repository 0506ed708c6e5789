"""Where a rank's time goes: `carme-run --profile`, and `carme_runtime.progress`.

Each rank writes a file for chrome://tracing or ui.perfetto.dev into the folder that CARME_PROFILE names, with
sums that `table` shows side by side. These are seen: collectives of `carme_runtime` while they run, the main
thread's waiting for them and for messages of pipelines, its waiting for torch's DataLoader, and the passes of
pipelines. What is left of the main thread's time is called computing. Where other threads wait for
collectives, the main thread is taken to wait as long as it does not run.

Sums are kept here. Events are kept by the core's recorder, in a file: from it a rank makes its profile at its
end, and `carme-run --trace` its traces when the run is over (`carme_runtime.traces`). The core records by
itself what it does: its collectives, messages and one-sided operations.
"""

import atexit
import contextlib
import importlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from carme_runtime.traces import perfetto
from carme_runtime.traces.kinds import KINDS
from carme_runtime.traces.recordings import RECORD_BYTES, SUFFIX, Plain, read

PROFILE = "CARME_PROFILE"
TRACE, LIMIT = "CARME_TRACE", "CARME_TRACE_LIMIT"  # a folder of recordings, and bytes of each of them
RESTARTS = "CARME_RESTARTS"
SCHEDULE = "schedule.svg"  # in the folder of profiles
MOST_EVENTS = 200_000  # of one rank in its profile; what comes later is summed up only
WAITING, LOADING, COLLECTIVE, PIPELINE = "waiting", "loader", "collective", "pipeline"
PHASE, FIRING, TRANSFER = "phase", "firing", "transfer"


class _Step:
    """A step of a pipeline that runs now.

    Args:
        thread: That runs it.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.passes: list[tuple[str, int, float, float]] = []  # and waits: name, micro-batch, begin, end


class Recorder:
    """Of one rank. Costs about a microsecond for each call that is seen.

    Args:
        folder: Where its profile is to be written at the end; None: nowhere.
        rank: Its number.
        trace: A folder for its recording, which stays; None: none is requested. Without both only sums are
            kept.
        limit: Bytes of the recording at most, with those that this rank's other processes have left.
    """

    def __init__(
        self,
        folder: Path | None,
        rank: int,
        trace: Path | None = None,
        limit: int = MOST_EVENTS * RECORD_BYTES,
    ) -> None:
        self._folder, self._rank, self._keeps = folder, rank, trace is not None
        self._main = threading.main_thread().ident
        self._process = os.getpid()
        self._begin = time.perf_counter()
        self._sums: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._stage: dict[str, Any] = {}  # of the pipeline, and how its steps went
        self._step: _Step | None = None  # that runs now
        self._calls = self._bytes = 0
        self._clock = time.pthread_getcpuclockid(self._main or threading.get_ident())
        self._waited_until = 0.0
        self._lock = threading.Lock()
        self._core = _core()
        self._names: dict[str, int] = {}
        self._error: OSError | None = None
        self._over = False
        self.written = 0  # events, once the recording has ended
        self._file: Path | None = None
        if trace or folder:
            self._start(trace or folder, limit)  # pyright: ignore[reportArgumentType]
            atexit.register(self.write)

    def _start(self, folder: Path, limit: int) -> None:
        """Begin the recording; where that fails, `write` says so."""
        start = os.environ.get(RESTARTS, "0")
        host = socket.gethostname()
        header = {"rank": self._rank, "size": int(os.environ.get("WORLD_SIZE", "1")), "host": host}
        header |= {"start": int(start), "pid": self._process, "boot": _boot()}
        # Clocks of nodes count from their boots. The system keeps both of a node at one rate.
        header["unix"] = time.time_ns() - time.perf_counter_ns()
        file = folder / f".{self._rank}-{self._process}-{secrets.token_hex(4)}{SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._keeps:  # the limit is that of all starts and processes of this rank
                earlier = folder.glob(f".{self._rank}-*{SUFFIX}")
                limit = max(limit - sum(each.stat().st_size for each in earlier), 0)
            error = self._core.recorder_start(str(file), json.dumps(header), limit)
            if error:
                raise OSError(error, os.strerror(error))
        except OSError as error:
            self._error = error
            return
        self._file = file

    def add(
        self,
        kind: str,
        name: str,
        begin: float,
        size: int = 0,
        *,
        extra: int = 0,
        of: int = 0,
        end: float | None = None,
        row: str = "",
        recorded: bool = False,
    ) -> None:
        """Something that began at `begin` (time.perf_counter) is over.

        Args:
            kind: WAITING, LOADING, COLLECTIVE, PIPELINE, PHASE, FIRING or TRANSFER.
            name: What it was. The recording keeps each name once.
            begin: In seconds.
            size: Bytes of its buffer.
            extra, of: Of PIPELINE: the micro-batch and the stage. Of FIRING, `extra` is 1 + the micro-batch.
            end: In seconds; None: now.
            row: Of FIRING: who did it; traces show it as a thread of its own.
            recorded: The core has it in the recording already.
        """
        end = time.perf_counter() if end is None else end
        thread = threading.get_ident()
        if self._step and thread == self._step.thread and kind in (PIPELINE, WAITING):
            self._step.passes.append((name if kind == PIPELINE else kind, extra, begin, end))
        if kind == COLLECTIVE or thread == self._main:
            self._sums[kind] += end - begin
        if kind == COLLECTIVE:
            self._calls += 1
            self._bytes += size
        if self._file is None or recorded or os.getpid() != self._process:
            return  # in a process that was forked off nobody gives back the recorder's locks
        number = self._number(name)
        of = self._number(row) if row else of
        self._core.recorder_add(KINDS[kind], number, int(begin * 1e9), int(end * 1e9), size, extra, of)

    def _number(self, name: str) -> int:
        """Of a name in the recording."""
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = self._core.recorder_name(name)
        return number

    @contextmanager
    def step(self, stage: int, schedule: Any) -> Iterator[None]:
        """See how a step of a pipeline goes on this rank.

        Args:
            stage: This rank's.
            schedule: With its `name`, numbers of `ranks` and `micro_batches`, and its `bubble`: the part of
                the time that even stages would wait.
        """
        began, waited = time.perf_counter(), self.waits()[0]
        step = self._step = _Step(threading.get_ident())
        try:
            yield
        finally:
            self._step = None
        own = self._stage
        own["stage"], own["idle"] = stage, schedule.bubble
        own["steps"] = own.get("steps", 0) + time.perf_counter() - began
        own["waited"] = own.get("waited", 0) + self.waits()[0] - waited
        # A smaller last batch takes fewer micro-batches.
        if self._folder and schedule.micro_batches >= own.get("last", {}).get("micro_batches", 0):
            own["last"] = {
                "schedule": schedule.name,
                "stages": schedule.ranks,
                "micro_batches": schedule.micro_batches,
                "clock": time.time() - time.perf_counter(),  # ranks have no other clock in common
                "passes": step.passes,
            }

    @property
    def records(self) -> bool:
        """Whether events are kept, and not only sums."""
        return self._file is not None

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
        """End the recording, and write the rank's profile."""
        file, self._file = self._file, None
        if self._over or os.getpid() != self._process:
            return
        self._over = True
        if file:
            for thread in threading.enumerate():
                if thread.native_id and thread is not threading.main_thread():
                    self._core.recorder_name_thread(thread.native_id, thread.name)
            self.written, _, error = self._core.recorder_stop()
            if error:
                self._error = OSError(error, os.strerror(error))
        if self._keeps and self._error:
            self._log(f"The trace of rank {self._rank} is not complete: {self._error.strerror}.")
        if self._folder:
            self._write_profile(self._folder, file)

    def _write_profile(self, folder: Path, recording: Path | None) -> None:
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
        draft = folder / f".rank-{self._rank}.json"
        try:
            if recording is None:
                raise self._error or OSError(0, "nothing was recorded")
            folder.mkdir(parents=True, exist_ok=True)
            events = perfetto.events(read(recording, MOST_EVENTS), int(self._begin * 1e9), MOST_EVENTS)
            with draft.open("w") as file:
                file.write('{"traceEvents": [')
                for number, event in enumerate(events):
                    file.write((", " if number else "") + json.dumps(event))
                file.write(f'], "carme": {json.dumps(sums)}}}')
            draft.replace(file_of(folder, self._rank))
        except OSError as error:
            self._log(f"The profile of rank {self._rank} cannot be written: {error.strerror}.")
        if recording and not self._keeps:
            with contextlib.suppress(OSError):
                recording.unlink()

    def _log(self, message: str) -> None:
        print(f"carme: {message}", file=sys.stderr, flush=True)


def _boot() -> str:
    """Distinguishes machines, and their starts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _core() -> Any:
    """The core's recorder, or one that is slower."""
    try:
        return importlib.import_module("carme_runtime._core")
    except ImportError:
        return Plain()


recorder: Recorder | None = None


def record(kind: str, name: str, begin: float, size: int = 0) -> None:
    """Something that began at `begin` is over, where this process records; see `Recorder.add`."""
    if recorder:
        recorder.add(kind, name, begin, size)


def pipeline_step(stage: int, schedule: Any) -> AbstractContextManager[None]:
    """See how a step of a pipeline goes, where this process records; see `Recorder.step`."""
    return recorder.step(stage, schedule) if recorder else contextlib.nullcontext()


def begin() -> None:
    """Record from now on, where CARME_PROFILE, CARME_TRACE or CARME_METRICS says so."""
    global recorder
    folder, trace = (Path(name) if (name := os.environ.get(of)) else None for of in (PROFILE, TRACE))
    rank = os.environ.get("RANK", "0")
    if recorder is not None or not rank.isdecimal() or _is_helper():
        return
    if trace:
        recorder = Recorder(folder, int(rank), trace, int(os.environ.get(LIMIT, 1 << 30)))
    elif folder or os.environ.get("CARME_METRICS"):
        recorder = Recorder(folder, int(rank))


def _is_helper() -> bool:
    """Whether this is a process that a rank has started with multiprocessing, such as a loader's."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


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
    for file in (*(file_of(folder, rank) for rank in range(ranks)), folder / SCHEDULE):
        file.unlink(missing_ok=True)


def table(folder: Path, ranks: int) -> str:
    """The sums of all ranks, for people."""
    lines = [
        f"Where the ranks' time went (traces for ui.perfetto.dev or chrome://tracing in {folder}):",
        f"{'rank':>5} {'seconds':>9} {'compute':>8} {'waiting':>8} {'loader':>8} {'collectives':>12}"
        f" {'MiB':>10}",
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
        mebibytes = sums["bytes"] / 2**20
        lines.append(f"{rank:>5} {sums['seconds']:>9.2f} {parts} {sums['calls']:>12} {mebibytes:>10.1f}")
    return "\n".join([*lines, *_stages(folder, ranks)])


def _stages(folder: Path, ranks: int) -> list[str]:
    """How long the stages of pipelines waited for each other, and where their last step is drawn."""
    found = {rank: own for rank in range(ranks) if (own := _pipeline_of(folder, rank))}
    lines = []
    for rank, own in found.items():
        measured = 100 * own["waited"] / max(own["steps"], 1e-9)
        lines.append(
            f"Rank {rank}, stage {own['stage']}: idle for {measured:.1f} % of its steps "
            f"(even stages: {100 * own['idle']:.1f} %)."
        )
    return [*lines, *_drawn(folder, {rank: own["last"] for rank, own in found.items() if "last" in own})]


def _pipeline_of(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank's profile says of its stage; empty: nothing."""
    try:
        return json.loads(file_of(folder, rank).read_text())["carme"]["pipeline"]
    except (OSError, ValueError, KeyError):
        return {}


def _drawn(folder: Path, steps: dict[int, dict[str, Any]]) -> list[str]:
    """Draw the last step of the first pipeline; a sentence about it."""
    if not steps:
        return []
    from carme_runtime.pipeline import timeline  # which scripts without pipelines do not need

    picture = timeline.drawing(steps)
    if not picture:
        return []
    try:
        (folder / SCHEDULE).write_text(picture)
    except OSError as error:
        return [f"The schedule cannot be drawn into {folder / SCHEDULE}: {error.strerror}."]
    return [f"The last step of each stage is drawn beside its schedule in {folder / SCHEDULE}."]


begin()
