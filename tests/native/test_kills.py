"""Ranks that are killed or stopped inside every collective: see kill_ranks.py.

Once for each kind of collective and signal; as often as one likes with

    ./test native -- -k kills --kills 500
"""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from .kill_ranks import is_used

KILLER = Path(__file__).parent / "kill_ranks.py"


@pytest.mark.timeout(0)  # each attempt has a limit of its own
def test_kills_and_stops_end_in_errors_and_survivors_go_on(request):
    times = request.config.getoption("--kills")
    command = [sys.executable, str(KILLER), *(["--times", str(times)] if times else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_shared_memory_that_a_process_maps_is_used_and_what_begins_its_name_is_not(tmp_path: Path) -> None:
    (mapped := tmp_path / "carme of 11").write_bytes(bytes(mmap.PAGESIZE))
    with mapped.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert is_used(mapped)
        assert not is_used(tmp_path / "carme of 1")
        mapped.unlink()
        assert is_used(mapped)
    assert not is_used(mapped)
