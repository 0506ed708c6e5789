"""The rounds of a comparison: who takes part takes turns, in an order that is drawn anew each time."""

import dataclasses
import datetime
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carme_runtime.compare import checks, machine, tasks
from carme_runtime.compare.clocks import megahertz, slowdowns, slowdowns_since
from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.door import Door
from carme_runtime.compare.energy import drawn, energy
from carme_runtime.compare.entries import LAUNCH, Entry, Progress, address_of, sample, stop_all
from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.figures import affordable, spread, values_needed
from carme_runtime.compare.hosts import threads_of
from carme_runtime.compare.networks import NETWORKS, Network
from carme_runtime.compare.predictions import note_predictions
from carme_runtime.compare.results import Result, Row, Turn
from carme_runtime.compare.stored import COLD, MEMORY, check_folder
from carme_runtime.compare.work_folder import work_folder

CHECKED_STEPS = 3
_LEAST_STEPS, _MOST_STEPS = 4, 200
_ROUNDS_PER_SENTENCE = 10


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Args:
        contestants: By name.
        networks: By name.
        ranks: Numbers of ranks.
        rounds: Turns of each.
        repeats: How often disturbed turns are made again.
        limit: How far the interval of a median may reach to either side, in percent of it. Rows beyond it get
            up to as many rounds again, then more for `more_s`, and are marked if that does not help. 0: any
            is good.
        more_s: For about how many seconds, with each network, rows get still more rounds that can make them
            certain.
        turn_s: About how long a turn is.
        scaling: `strong`: the batch is that of all ranks. `weak`: it is that of each.
        batch: Instead of the network's own.
        threads: Of each rank; None: a host's cores, divided by the ranks on it.
        seed: Of weights, batches and orders.
        slower: By contestant, by how many percent it is slowed.
        precision: `float32`, or `bf16`: each framework's mixed precision.
        pythons: By contestant, the Python that it runs with where that is not this one.
        data: The images, by name.
        size: Their side in pixels; None: what the images or the network have.
        width: By which the channels of the networks are multiplied; None: each network's own.
        input: Where steps take their batches from: `memory`, or a file that is `warm` or `cold`.
    """

    contestants: tuple[str, ...]
    networks: tuple[str, ...]
    ranks: tuple[int, ...]
    threads: int | None = None
    rounds: int = 10
    repeats: int = 2
    limit: float = 3.0
    more_s: float = 0.0
    turn_s: float = 0.5
    scaling: str = "strong"
    batch: int | None = None
    seed: int = 1
    slower: dict[str, float] = field(default_factory=dict)
    precision: str = "float32"
    pythons: dict[str, str] = field(default_factory=dict)
    data: str = "digits"
    size: int | None = None
    width: float | None = None
    input: str = MEMORY

    def network(self, name: str) -> Network:
        """As it takes the images. Raises CompareError where it cannot."""
        return tasks.network_for(name, self.data, self.size, self.width)

    def batch_of(self, network: str, ranks: int) -> int:
        """Samples of a step over all ranks."""
        own = self.batch or NETWORKS[network].batch
        return own * ranks if self.scaling == "weak" else own

    def python_of(self, contestant: str) -> str:
        """The executable that a contestant runs with."""
        return self.pythons.get(contestant, sys.executable)

    def check(self) -> None:
        """Raises CompareError for a batch that cannot be shared, a Python or a size that cannot be used."""
        for name in self.contestants:
            CONTESTANTS[name].missing(self.python_of(name))
        for network in self.networks:
            self.network(network)
            for ranks in self.ranks:
                if self.batch_of(network, ranks) % ranks:
                    raise CompareError(
                        f"A batch of {self.batch_of(network, ranks)} cannot be shared by {ranks} ranks.",
                        f"Use --batch with a multiple of {ranks}.",
                    )


def compare(plan: Plan, options: dict[str, Any], folder: Path, progress: Progress) -> Result:
    """Make the comparison.

    Args:
        plan: What is compared.
        options: As they were requested, for the result.
        folder: Which all nodes see; for what ranks read and write while it runs.
        progress: Gets a sentence for each thing done.

    Raises:
        CompareError: NumPy is missing, no rank can be started, or files in the folder cannot be read cold.
    """
    plan.check()
    try:
        import numpy  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise CompareError(
            "The comparison draws its weights with NumPy, which this Python does not have.",
            "Use an image with PyTorch or TensorFlow, or install it: pip install numpy",
        ) from None
    address = address_of(max(plan.ranks))
    threads = plan.threads or threads_of(LAUNCH, max(plan.ranks))
    plan = dataclasses.replace(plan, threads=threads)
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    result = Result(
        created, plan.seed, machine.environment() | {"threads": threads, "precision": plan.precision}, options
    )
    with work_folder(folder) as work, _door(address) as door:
        if plan.input == COLD:
            check_folder(work)
        probes: list[float] = []
        clocks: list[float] = []
        for network in plan.networks:
            _Contest(plan, network, result, work, door, progress).hold(probes, clocks)
    _note_noise(result, probes, clocks)
    return result


@contextmanager
def _door(host: str) -> Iterator[Door]:
    door = Door(host)
    try:
        yield door
    finally:
        door.close()


def _note_noise(result: Result, probes: list[float], clocks: list[float]) -> None:
    turns = [turn for row in result.rows for turn in row.turns]
    result.noise = {
        "turns": len(turns),
        "disturbed_turns": checks.marked(turns),
        "probes": len(probes),
        "probe_ms": statistics.median(probes) if probes else 0.0,
        "probe_spread": spread(probes) if probes else 0.0,
    }
    if clocks:
        result.noise |= {"least_mhz": min(clocks), "most_mhz": max(clocks)}


@dataclass(frozen=True)
class _Raw:
    """A turn before it is known what the probe takes usually."""

    round: int
    ms: float
    foreign: float | None
    probes: tuple[float, float]
    parts: dict[str, float]
    joules: dict[str, float]
    began: float
    lasted_s: float
    slowdowns: int


class _Contest:
    """All contestants with one network."""

    def __init__(
        self, plan: Plan, network: str, result: Result, folder: Path, door: Door, progress: Progress
    ) -> None:
        self.plan, self.network, self.folder, self.door = plan, network, folder, door
        self.progress = progress
        self.result = result
        self.random = random.Random(f"{plan.seed} {network}")
        self.entries: list[Entry] = []
        self.files: dict[int, Path] = {}  # of tasks, by batch
        self.first_loss: dict[int, float] = {}  # by ranks, as it must be
        self.first_gradients: dict[int, Path] = {}  # by ranks, as they must be
        self.turns: dict[int, list[_Raw]] = {}  # by the entry's place
        self.losses: dict[int, list[float]] = {}  # by the entry's place, of all its steps
        self.probes: list[float] = []
        self.clocks: list[float] = []  # in MHz, beside the probes

    @property
    def able(self) -> list[int]:
        """Places of the entries that are not void."""
        return [place for place, entry in enumerate(self.entries) if not entry.row.void]

    def hold(self, all_probes: list[float], all_clocks: list[float]) -> None:
        """From the start of all to their end; rows go into the result, probes and clocks into the lists."""
        try:
            self._prepare()
            self._check_work()
            if self.able:
                self._take_turns()
            for entry in self.entries:
                entry.end()
        finally:
            stop_all(self.entries)  # those that an error or a cancelled job has left
        all_probes += self.probes
        all_clocks += self.clocks

    def _prepare(self) -> None:
        """Start all, one after the other, in a drawn order."""
        tasks_by_ranks: dict[int, tasks.Task] = {}
        network, data, seed = self.plan.network(self.network), self.plan.data, self.plan.seed
        for ranks in self.plan.ranks:
            batch = self.plan.batch_of(self.network, ranks)
            if batch not in tasks_by_ranks:
                tasks_by_ranks[batch] = tasks.make(network, batch, seed, data)
                self.files[batch] = self.folder / f"{self.network}-{batch}.npz"
                tasks.write(tasks_by_ranks[batch], self.files[batch])
            self.first_loss[ranks] = tasks_by_ranks[batch].first_loss(ranks)
            self.first_gradients[ranks] = self.folder / f"{self.network}-{batch}-{ranks}-gradients.npz"
            tasks.write_gradients(*tasks_by_ranks[batch].first_gradients(ranks), self.first_gradients[ranks])
            self.result.data = tasks_by_ranks[batch].data
        for name in self.plan.contestants:
            self.entries += [self._entry(name, ranks) for ranks in self.plan.ranks]
        self.result.rows += [entry.row for entry in self.entries]
        order = self.able
        self.random.shuffle(order)
        for number, place in enumerate(order, 1):
            entry = self.entries[place]
            entry.start(self.door, self.files[entry.row.batch], self.folder)
            state = f"void: {entry.row.void}" if entry.row.void else f"ready in {entry.row.start_s:.1f} s"
            self.progress(f"{self.network}: {number} of {len(order)}: {entry.name}: {state}")

    def _entry(self, name: str, ranks: int) -> Entry:
        contestant = CONTESTANTS[name]
        row = Row(name, contestant.title, self.network, ranks, self.plan.batch_of(self.network, ranks))
        row.limit_percent = self.plan.limit
        row.user_lines = contestant.user_lines()
        python = self.plan.python_of(name)
        if lacking := contestant.missing(python):
            row.void = f"not installed: {', '.join(lacking)}"
        slower = self.plan.slower.get(name, 0.0)
        return Entry(row, self.plan.threads or 1, slower, self.plan.precision, python, self.plan.input)

    def _check_work(self) -> None:
        """The first steps, whose gradients and losses must be equal; they are not timed."""
        for place in self.able:
            entry = self.entries[place]
            if self._make(place, 1):
                entry.compare_gradients(self.first_gradients[entry.row.ranks])
            if not entry.row.void:
                self._make(place, CHECKED_STEPS - 1)
            entry.row.losses = list(self.losses[place])
        for ranks in self.plan.ranks:
            rows = [entry.row for entry in self.entries if entry.row.ranks == ranks]
            checks.void_unequal(rows, self.first_loss[ranks], self.plan.precision)
        for entry in self.entries:
            if entry.row.losses and entry.row.void:
                entry.end()
                self.progress(f"{self.network}: {entry.name}: void: {entry.row.void}")

    def _make(self, place: int, steps: int) -> list[dict[str, Any]]:
        """So many steps of an entry, whose losses go on those of its earlier ones."""
        answers = self.entries[place].make(steps)
        each = zip(*(answer["losses"] for answer in answers), strict=True)
        self.losses.setdefault(place, []).extend(statistics.mean(losses) for losses in each)
        return answers

    def _take_turns(self) -> None:
        own = {core for place in self.able for core in self.entries[place].cores}
        cores = sorted(own or os.sched_getaffinity(0))
        steps = {place: self._steps_of_a_turn(place) for place in self.able}
        self._probe(cores)
        for number in range(1, self.plan.rounds + 1):
            self._round(number, self.able, steps, cores)
            self.progress(f"{self.network}: round {number} of {self.plan.rounds}")
        self._repeat_disturbed(steps, cores)
        self._narrow(steps, cores)
        self._narrow_further(steps, cores)
        for place in self.able:
            self._conclude(place)
        if self.plan.input == MEMORY:  # a probe does not read the files
            able = [self.entries[place] for place in self.able]
            note_predictions(able, self.plan.scaling == "weak", self.progress)

    def _repeat_disturbed(self, steps: dict[int, int], cores: list[int]) -> None:
        """Make turns again in rounds that have disturbed ones alone."""
        for _ in range(self.plan.repeats):
            again = [(raw.round, place) for place in self.able for raw in self._disturbed(place)]
            if not again:
                break
            self.progress(f"{self.network}: {len(again)} disturbed turns are repeated")
            self.random.shuffle(again)
            for number, place in again:
                self._round(number, [place], steps, cores)

    def _narrow(self, steps: dict[int, int], cores: list[int]) -> None:
        """Further rounds for the rows whose medians are not known well enough yet."""
        rounds = self.plan.rounds
        for number in range(rounds + 1, 2 * rounds + 1):
            wide = [place for place in self.able if self._is_wide(place)]
            if not wide or rounds == 1:  # a single round was requested, although it gives no interval
                break
            wide_rows = f"{len(wide)} row{'s' * (len(wide) > 1)}"
            self.progress(
                f"{self.network}: further round {number - rounds} of at most {rounds}, as {wide_rows} cannot "
                f"be known to {self.plan.limit:g} % yet"
            )
            self._round(number, wide, steps, cores)

    def _narrow_further(self, steps: dict[int, int], cores: list[int]) -> None:
        """Still more rounds, for the rows that can be known well enough in the time that is given for it."""
        end, number = time.monotonic() + self.plan.more_s, 2 * self.plan.rounds
        while self.plan.rounds > 1 and (left := end - time.monotonic()) > 0:
            wide = {place: self._seconds_needed(place) for place in self.able if self._is_wide(place)}
            places = affordable(wide, left)
            if not places:
                break
            if (number - 2 * self.plan.rounds) % _ROUNDS_PER_SENTENCE == 0:
                self.progress(
                    f"{self.network}: more rounds for {len(places)} of {len(wide)} uncertain rows, for at "
                    f"most {left:.0f} s"
                )
            number += 1
            self._round(number, places, steps, cores)

    def _seconds_needed(self, place: int) -> float:
        """How long the further turns take, as a rule, that make a row certain."""
        row, turns = self._so_far(place), self.turns[place]
        count = len(row.used)
        more = values_needed(count, row.step.percent or 0.0, row.limit_percent) - count
        return more * statistics.median(raw.lasted_s + raw.probes[1] / 1000 for raw in turns)

    def _so_far(self, place: int) -> Row:
        turns = [Turn(raw.round, raw.ms, self._reasons(raw)) for raw in self.turns.get(place, [])]
        return dataclasses.replace(self.entries[place].row, turns=turns)

    def _is_wide(self, place: int) -> bool:
        row = self._so_far(place)
        return bool(row.turns) and row.is_wide

    def _probe(self, cores: list[int]) -> None:
        self.probes.append(machine.probe(cores))
        if (clock := megahertz(cores)) is not None:
            self.clocks.append(clock)

    def _steps_of_a_turn(self, place: int) -> int:
        """By a first turn, which also warms up what compiles or measures at first."""
        answers = self._make(place, _LEAST_STEPS)
        if not answers:
            return 0
        ms = max(sample(answers)[0], 1e-3)
        return min(max(int(1000 * self.plan.turn_s / ms), _LEAST_STEPS), _MOST_STEPS)

    def _round(self, number: int, places: Sequence[int], steps: dict[int, int], cores: list[int]) -> None:
        order = list(places)
        self.random.shuffle(order)
        for place in order:
            before, drew, slowed, began = self.probes[-1], energy(), slowdowns(cores), time.time()
            answers = self._make(place, steps[place])
            lasted = time.time() - began
            joules = drawn(drew, energy(), max(steps[place], 1))
            self._probe(cores)
            if answers:
                ms, foreign, parts = sample(answers)
                probes = (before, self.probes[-1])
                more = slowdowns_since(slowed, slowdowns(cores))
                raw = _Raw(number, ms, foreign, probes, parts, joules, began, lasted, more)
                self.turns.setdefault(place, []).append(raw)

    def _reasons(self, raw: _Raw) -> tuple[str, ...]:
        return checks.disturbances(raw.foreign, raw.probes, checks.usual_probe(self.probes), raw.slowdowns)

    def _disturbed(self, place: int) -> list[_Raw]:
        """The disturbed turns of rounds that have no undisturbed one."""
        turns = self.turns.get(place, [])
        quiet = {raw.round for raw in turns if not self._reasons(raw)}
        return list({raw.round: raw for raw in turns if raw.round not in quiet}.values())

    def _conclude(self, place: int) -> None:
        row, turns = self.entries[place].row, self.turns.get(place, [])
        row.half_loss_steps = checks.steps_to_half(self.losses[place])
        row.turns = [Turn(raw.round, raw.ms, self._reasons(raw), raw.began, raw.lasted_s) for raw in turns]
        names = dict.fromkeys(name for raw in turns for name in raw.parts)
        used = [raw for raw, turn in zip(turns, row.turns, strict=True) if turn in row.used]
        row.parts_ms = {name: statistics.median(raw.parts.get(name, 0.0) for raw in used) for name in names}
        drew = [raw.joules for raw in used]
        kinds = dict.fromkeys(name for joules in drew for name in joules)
        row.step_joules = {
            kind: statistics.median(joules[kind] for joules in drew if kind in joules) for kind in kinds
        }
