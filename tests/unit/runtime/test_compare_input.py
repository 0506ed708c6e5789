"""Batches that steps of a comparison read from files, in the kernel's memory or not."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carme_runtime.compare import command, report, stored, worker
from carme_runtime.compare.differences import difference
from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.programs import Work
from carme_runtime.compare.results import Result, Row, Turn
from carme_runtime.compare.stored import COLD, INPUTS, MEMORY, WARM, Stored

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


def test_reading_is_part_of_a_step_and_making_it_cold_is_not(disk: Path) -> None:
    """By a file that takes long to be read, and longer to leave the memory."""
    rank = work(COLD, disk)
    batches = rank.batches(ARRAYS[0])
    (file,) = rank.stored
    calls: list[str] = []

    def slow(name: str, call: Callable[[], None], seconds: float) -> Callable[[], None]:
        def called() -> None:
            calls.append(name)
            time.sleep(seconds)
            call()

        return called

    file.before_turn = slow("turn", file.before_turn, 0.1)  # type: ignore[method-assign]
    file.before_step = slow("step", file.before_step, 0.1)  # type: ignore[method-assign]

    def step(number: int, mark: Callable[[str], None]) -> float:
        assert not file.is_in_memory
        batch = batches[number]
        mark("input")
        return float(batch.sum())

    report = worker.Steps(step, 0.0, set(), stored=rank.stored).make(3)
    assert calls == ["turn", "step", "step", "step"]
    assert all(ms < 100 for ms in report["ms"]) and report["parts"]["input"] > 0
    assert report["losses"] == [pytest.approx(float(ARRAYS[0][number].sum())) for number in range(3)]


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
