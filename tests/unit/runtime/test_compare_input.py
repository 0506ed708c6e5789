"""Batches that steps of a comparison read from files, in the kernel's memory or not."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from carme_runtime.compare import command, report, stored, worker
from carme_runtime.compare.differences import difference
from carme_runtime.compare.door import Line
from carme_runtime.compare.entries import Entry
from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.programs import Work
from carme_runtime.compare.results import Result, Row, Turn
from carme_runtime.compare.stored import COLD, INPUTS, MEMORY, WARM, Stored
from patience import HANG

RANDOM = np.random.default_rng(1)
SHARED_MEMORY = Path("/dev/shm")
#: Of an image network, and the classes of its samples.
ARRAYS = (
    RANDOM.standard_normal((8, 6, 5, 7, 3)).astype(np.float32),
    RANDOM.integers(10, size=(8, 6)),
    # As a program has it after it has swapped axes.
    RANDOM.standard_normal((3, 40, 30, 2)).astype(np.float32).transpose(0, 3, 1, 2),
)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder whose files leave the memory."""
    try:
        stored.check_folder(tmp_path)
    except CompareError as error:
        pytest.skip(str(error))
    return tmp_path


@pytest.fixture
def in_memory() -> None:
    """Where shared memory is a file system."""
    kinds = Path("/proc/mounts").read_text().splitlines()
    if not any(line.split()[1:3] == [str(SHARED_MEMORY), "tmpfs"] for line in kinds):
        pytest.skip(f"{SHARED_MEMORY} is no file system in memory here")


def work(source: str, folder: Path) -> Work:
    task: Any = None
    return Work(task, 0, 1, 1, input=source, folder=folder)


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("values", ARRAYS, ids=("images", "classes", "swapped"))
def test_a_step_gets_the_same_batch_from_memory_and_from_files(
    disk: Path, source: str, values: np.ndarray
) -> None:
    rank = work(source, disk)
    batches = rank.batches(values)
    for number in (0, len(values) - 1, 1):
        for file in rank.stored:
            file.before_turn()
            file.before_step()
        batch = batches[number]
        assert batch.dtype == values.dtype and np.array_equal(batch, values[number])
    assert len(rank.stored) == (source != MEMORY)
    assert not list(disk.iterdir()), "nobody has to remove the files"


def test_a_batch_is_the_steps_own(disk: Path) -> None:
    """A framework that uses the memory of what it is given may write there."""
    batches = work(WARM, disk).batches(ARRAYS[0])
    batches[2][:] = 0
    assert np.array_equal(batches[2], ARRAYS[0][2])


def test_a_warm_file_is_in_memory_before_a_turn_and_a_cold_one_is_not_before_a_step(disk: Path) -> None:
    values = np.zeros((4, 1 << 20), np.uint8)
    warm, cold = Stored(values, disk, is_cold=False), Stored(values, disk, is_cold=True)
    warm.before_turn()
    warm.before_step()
    assert warm.is_in_memory
    cold.before_turn()
    assert not cold.is_in_memory
    assert cold[0].nbytes == 1 << 20 and cold.is_in_memory
    cold.before_step()
    assert not cold.is_in_memory


@pytest.mark.usefixtures("in_memory")
def test_a_file_system_in_memory_is_refused_for_cold_files() -> None:
    with pytest.raises(CompareError, match="keeps files in memory") as error:
        stored.check_folder(SHARED_MEMORY)
    assert "--output" in str(error.value) and "--input warm" in str(error.value)


def test_reading_is_part_of_a_step_and_making_it_cold_is_not(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that moves by these alone: 2 s to read a batch, 100 s to let the file leave the memory."""
    rank = work(COLD, disk)
    batches = rank.batches(ARRAYS[0])
    (file,) = rank.stored
    calls: list[str] = []
    now = 0.0

    def passes(name: str, call: Callable[[], None]) -> Callable[[], None]:
        def called() -> None:
            nonlocal now
            calls.append(name)
            now += 100
            call()

        return called

    file.before_turn = passes("turn", file.before_turn)  # type: ignore[method-assign]
    file.before_step = passes("cold", file.before_step)  # type: ignore[method-assign]

    def step(number: int, mark: Callable[[str], None]) -> float:
        nonlocal now
        calls.append("step")
        assert not file.is_in_memory
        batch = batches[number]
        now += 2
        mark("input")
        return float(batch.sum())

    steps = worker.Steps(step, 0.0, set(), stored=rank.stored)
    clock = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: 0.0)
    monkeypatch.setattr(worker, "time", clock)
    report = steps.make(3)
    assert calls == ["turn", *["cold", "step"] * 3]
    assert report["ms"] == [2000.0] * 3 and report["parts"]["input"] == pytest.approx(2000)
    assert report["losses"] == [pytest.approx(float(ARRAYS[0][number].sum())) for number in range(3)]


@pytest.fixture
def lines() -> Iterator[tuple[Line, Line]]:
    """Both ends of a rank's line."""
    ends = tuple(map(Line, socket.socketpair()))
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_a_rank_whose_file_has_left_the_memory_waits_for_the_others(lines: tuple[Line, Line]) -> None:
    """Before its step, which would wait for them in a collective."""
    here, there = lines
    calls: list[str] = []
    file: Any = SimpleNamespace(before_turn=lambda: None, before_step=lambda: calls.append("cold"))

    def step(number: int, mark: Callable[[str], None]) -> float:
        calls.append("step")
        return 1.0

    steps = worker.Steps(step, 0.0, set(), stored=[file])
    with ThreadPoolExecutor() as beside:
        serving = beside.submit(worker.serve, there, steps, lambda seconds: {}, lambda reference: {})
        here.send(steps=2, meets=True)
        for before in (["cold"], ["cold", "step", "cold"]):
            assert here.receive(HANG) == {"ready": True} and calls == before
            here.send(begin=True)
        assert here.receive(HANG)["losses"] == [1.0, 1.0]
        here.send(steps=1)
        assert here.receive(HANG)["losses"] == [1.0]
        here.send(end=True)
        serving.result(HANG)


@pytest.mark.parametrize("source", INPUTS)
def test_ranks_meet_before_each_step_where_files_leave_the_memory(
    source: str, lines: tuple[Line, Line]
) -> None:
    here, there = lines
    tried = Entry(Row("jax", "JAX", "tiny", 1), 1, input=source, _lines=[here])
    with ThreadPoolExecutor() as beside:
        making = beside.submit(tried.make, 2)
        assert there.receive(HANG) == {"steps": 2, "meets": source == COLD}
        for _ in range(2 * (source == COLD)):
            there.send(ready=True)
            assert there.receive(HANG) == {"begin": True}
        there.send(losses=[1.0, 2.0])
        assert making.result(HANG) == [{"losses": [1.0, 2.0]}]


def result(**options: str) -> Result:
    turns = [Turn(number, 10.0 + number / 100) for number in range(5)]
    rows = [Row("torch-gloo", "PyTorch DDP (Gloo)", "tiny", 1, batch=64, turns=turns)]
    return Result("2026-01-02T03:04:05+00:00", 1, {}, dict(options), rows=rows)


def test_the_report_says_where_batches_came_from() -> None:
    assert "Batches are in memory before the first turn" in report.page(result())
    for source, words in ((WARM, "in memory (warm)"), (COLD, "nothing of it in memory (cold)")):
        page = report.page(result(input=source))
        assert words in page and "Batches are in memory" not in page
        assert f"<td class=text>{source}</td>" in page
    assert "input" not in difference(result(), result())
    assert "input: memory -> cold" in difference(result(), result(input=COLD))


def test_the_option_has_the_three_choices() -> None:
    for source in INPUTS:
        assert command.plan_of(command.parser().parse_args(["--input", source])).input == source
    assert command.plan_of(command.parser().parse_args([])).input == MEMORY


@pytest.mark.usefixtures("in_memory")
def test_a_comparison_whose_files_stay_in_memory_ends_before_any_contestant_starts() -> None:
    """With one clear sentence, and nothing left behind."""
    folder = SHARED_MEMORY / f"carme-test-{os.getpid()}"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    start = [sys.executable, "-c", "from carme_runtime.commands import run; run()", "compare"]
    start += ["torch-gloo", "--input", "cold", "--ranks", "1", "--networks", "tiny", "--output", str(folder)]
    try:
        done = subprocess.run(start, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 1 and "keeps files in memory, so none can be read cold." in done.stderr
        assert "Traceback" not in done.stderr and not list(folder.iterdir())
    finally:
        if folder.is_dir():
            folder.rmdir()
