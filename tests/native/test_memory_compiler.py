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


def run(way: str, limit: int, folder: Path, cgroup: MemoryCgroup | None = None) -> dict[str, Any]:
    return finish(start(way, limit, folder, program=PROGRAM, cgroup=cgroup))[0]


def test_training_does_not_load_it(tmp_path: Path) -> None:
    size = (LIBRARIES + 40) * MIB
    limited, free = run("nothing", size, tmp_path), run("nothing", 0, tmp_path)
    assert limited["losses"] == free["losses"]
    assert not limited["after"] and limited["peak"] <= size < free["peak"]


@pytest.mark.parametrize("way", ["module", "name", "option", "compile"])
def test_a_program_that_uses_it_has_all_of_it_within_the_limit(
    cgroup: MemoryCgroup, tmp_path: Path, way: str
) -> None:
    size = (LIBRARIES + COMPILER + 40) * MIB
    cgroup.limit(size)
    limited = run(way, size, tmp_path, cgroup)
    assert (limited["before"], limited["after"], limited["whole"]) == (False, True, True)
    assert limited["losses"] == run(way, 0, tmp_path)["losses"]
    assert limited["peak"] <= size
