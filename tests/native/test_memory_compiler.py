"""PyTorch's compiler takes no memory under a limit before a program uses it."""

from pathlib import Path
from typing import Any

import pytest

from memory_cgroups import MemoryCgroup
from patience import HANG

from .memory_limits import MIB
from .test_memory import LIBRARIES, finish, start

pytestmark = pytest.mark.timeout(8 * HANG)
PROGRAM = Path(__file__).parent / "programs" / "late_compiler.py"
COMPILER = 80  # MiB, about


def run(mode: str, limit: int, folder: Path, cgroup: MemoryCgroup | None = None) -> dict[str, Any]:
    return finish(start(mode, limit, folder, program=PROGRAM, cgroup=cgroup))[0]


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training without a limit."""
    return run("nothing", 0, tmp_path_factory.mktemp("spill"))


@pytest.mark.parametrize("mode", ["nothing", "checkpoint", "child"])
def test_training_does_not_load_it(tmp_path: Path, mode: str, free: dict[str, Any]) -> None:
    size = (LIBRARIES + 40) * MIB
    limited = run(mode, size, tmp_path)
    assert limited["losses"] == free["losses"]
    assert not limited["after"] and limited["peak"] <= size < free["peak"]


@pytest.mark.parametrize("mode", ["module", "name", "option", "compile"])
def test_a_program_that_uses_it_has_all_of_it_within_the_limit(
    cgroup: MemoryCgroup, tmp_path: Path, mode: str, free: dict[str, Any]
) -> None:
    size = (LIBRARIES + COMPILER + 40) * MIB
    cgroup.limit(size)
    limited = run(mode, size, tmp_path, cgroup)
    assert (limited["before"], limited["after"], limited["whole"]) == (False, True, True)
    assert limited["losses"] == free["losses"]
    assert limited["peak"] <= size
