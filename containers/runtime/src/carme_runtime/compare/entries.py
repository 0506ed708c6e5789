"""A contestant on some ranks while it takes part: its processes and the lines to them."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carme_runtime.compare.checks import or_infinite
from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.door import Door, Line, Lost
from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.machine import ENTRY
from carme_runtime.compare.pythons import environment_of
from carme_runtime.compare.results import Row
from carme_runtime.compare.stored import COLD, MEMORY
from carme_runtime.compare.worker import INPUT, PRECISION, SLOWER, THREADS

_START = ["-c", "from carme_runtime.commands import run; run()"]
LAUNCH = [sys.executable, *_START]
START_SECONDS, TURN_SECONDS, END_SECONDS = 300.0, 300.0, 20.0
STOP_SECONDS = 2.0  # the processes of a cancelled job are killed 5 s after SIGTERM
_LOG_LINES = 400  # characters of a log's end in a sentence


@dataclass
class Entry:
    """Args:
    row: What becomes of it.
    threads: Of each rank.
    slower: By how many percent it is slowed.
    precision: Of its computing.
    python: That it runs with.
    input: Where its steps take their batches from.
    """

    row: Row
    threads: int
    slower: float = 0.0
    precision: str = "float32"
    python: str = sys.executable
    input: str = MEMORY
    cores: list[int] = field(default_factory=list)
    _process: "subprocess.Popen[bytes] | None" = None
    _lines: list[Line] = field(default_factory=list)
    _log: Path | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.row.contestant} on {self.row.ranks} rank{'s' * (self.row.ranks > 1)}"

    def start(self, door: Door, task: Path, folder: Path) -> None:
        """Start its ranks, wait for them, and note how long that took. Makes the row void if it fails."""
        self._log = folder / f"{self.row.network}-{self.row.contestant}-{self.row.ranks}.log"
        began = time.monotonic()
        own = environment(self.row.contestant, self.threads, self.slower, self.precision)
        own |= {ENTRY: f"{self.row.contestant}-{self.row.ranks}", INPUT: self.input}
        if self.python != sys.executable:
            own = environment_of(self.python, own)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command(self.row.contestant, self.row.ranks, task, self.python),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=own | door.environment,
            )  # fmt: skip
        try:
            self._lines = door.admit(self.row.contestant, self.row.ranks, START_SECONDS, self._is_alive)
            greetings = [line.receive(TURN_SECONDS) for line in self._lines]
        except Lost as error:
            self.fail(f"it did not start: {error}")
            return
        self.row.start_s = time.monotonic() - began
        self.row.versions = greetings[0]["versions"]
        own_host = os.uname().nodename
        self.cores = sorted(
            {core for each in greetings if each["host"] == own_host for core in each["cores"]}
        )

    def make(self, steps: int) -> list[dict[str, Any]]:
        """So many steps of all ranks, and what each says of them; none if it fails, and the row is void."""
        try:
            for line in self._lines:
                line.send(steps=steps, meets=self.input == COLD)
            for _ in range(steps if self.input == COLD else 0):
                self._let_ranks_meet()
            return [line.receive(TURN_SECONDS) for line in self._lines]
        except Lost as error:
            self.fail(f"it did not go on: {error}")
            return []

    def compare_gradients(self, reference: Path) -> None:
        """Note how far those of its first step are from what they must be, which a file has.

        Of each weight the rank with the largest distance counts: ranks that do not reduce gradients have
        different ones.
        """
        try:
            answers = [answer["gradients"] for answer in self._ask(gradients=str(reference))]
        except Lost as error:
            self.fail(f"its gradients could not be compared: {error}")
            return
        self.row.gradients = {
            name: max((each[name] for each in answers), key=lambda answer: or_infinite(answer["distance"]))
            for name in answers[0]
        }

    def probe(self, seconds: float) -> dict[str, Any]:
        """What is needed to predict its steps, as rank 0 measures it; `why` if that fails.

        What was measured before stays: if ranks are lost, the entry is over, but not void.
        """
        try:
            peaks = [answer["peak_bytes"] for answer in self._ask(probe=seconds)]
            self.row.peak_bytes = max(peaks, default=0)
            answers = [line.receive(TURN_SECONDS) for line in self._lines]
        except Lost as error:
            return {"why": self._give_up(f"the probe did not go on: {error}")}
        return next((answer for answer in answers if "why" in answer), answers[0])

    def _let_ranks_meet(self) -> None:
        """Let all begin a step when all are ready for it: else who waits for others would count it."""
        for line in self._lines:
            line.receive(TURN_SECONDS)
        for line in self._lines:
            line.send(begin=True)

    def _ask(self, **order: float | str) -> list[dict[str, Any]]:
        """The answers of all ranks. Raises Lost."""
        for line in self._lines:
            line.send(**order)
        return [line.receive(TURN_SECONDS) for line in self._lines]

    def fail(self, reason: str) -> None:
        """It is void, and over."""
        self.row.void = self._give_up(reason)

    def _give_up(self, reason: str) -> str:
        """It is over; why, with its own last words."""
        self._close(0.5)
        text = self._last_words()
        return f"{reason}. Its last line: {text}" if text else reason

    def end(self) -> None:
        """It has done all, or is void; its ranks say how much memory they had, if they are still there."""
        if self._lines and not self.row.void:
            with contextlib.suppress(Lost):
                for line in self._lines:
                    line.send(end=True)
                peaks = [line.receive(END_SECONDS)["peak_bytes"] for line in self._lines]
                self.row.peak_bytes = max(peaks, default=0)
        self._close(END_SECONDS)

    def _close(self, seconds: float) -> None:
        for line in self._lines:
            line.close()
        self._lines = []
        if self._process is None:
            return
        for sent, patience in ((None, seconds), (signal.SIGTERM, END_SECONDS), (signal.SIGKILL, None)):
            if sent:
                self._process.send_signal(sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                return

    def stop(self) -> "subprocess.Popen[bytes] | None":
        """Ask its ranks to end, and do not wait for them; what is still to end, if anything is."""
        for line in self._lines:
            line.close()
        self._lines = []
        if self._process is None or self._process.poll() is not None:
            return None
        self._process.terminate()
        return self._process

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _last_words(self) -> str:
        if self._log is None or not self._log.exists():
            return ""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if "Error" in line or line.startswith("carme-run: ")]
        text = (errors or [line for line in lines if line] or [""])[-1]
        return text[:_LOG_LINES]


def stop_all(entries: Iterable[Entry]) -> None:
    """End all at the same time, and kill those that need longer."""
    ending = [process for entry in entries if (process := entry.stop())]
    end = time.monotonic() + STOP_SECONDS
    for process in ending:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0))
    for process in ending:
        process.kill()
    for process in ending:
        process.wait()


def command(contestant: str, ranks: int, task: Path, python: str = sys.executable) -> list[str]:
    """What starts the ranks of a contestant."""
    backend = CONTESTANTS[contestant].backend
    worker = ["-m", "carme_runtime.compare.worker", contestant, str(task)]
    return [python, *_START, "--no-gpu", "--backend", backend, "-n", str(ranks), *worker]


def environment(contestant: str, threads: int, slower: float, precision: str = "float32") -> dict[str, str]:
    """Of the ranks: libraries get as many threads as the rank has cores, and do not spin while they wait."""
    own = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", THREADS),
        str(threads),
    )
    own |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}
    own |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", SLOWER: str(slower), PRECISION: precision}
    return os.environ | own | dict(CONTESTANTS[contestant].environment)


def address_of(ranks: int) -> str:
    """Of this host, for ranks of this job, as carme-run chooses it. Raises CompareError where it cannot."""
    line = [*LAUNCH, "--dry-run", "--json", "--no-gpu", "-n", str(ranks), "-m", "json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)["ranks"][0]["environment"]["MASTER_ADDR"]
    except (ValueError, KeyError, IndexError):
        reason = done.stderr.strip().removeprefix("carme-run: ")
        raise CompareError(f"{ranks} ranks cannot be started: {reason}") from None


def sample(answers: list[dict[str, Any]]) -> tuple[float, float | None, dict[str, float]]:
    """Of the answers of all ranks: milliseconds of a step, the share of other processes, and its parts.

    The first step of a turn is not timed: ranks begin it one after the other, with caches of others.
    """
    times = max(statistics.median(each["ms"][1:] or each["ms"]) for each in answers)
    foreign = [each["foreign"] for each in answers if each["foreign"] is not None]
    return times, max(foreign, default=None), answers[0]["parts"]


Progress = Callable[[str], None]
