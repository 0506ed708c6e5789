"""The clock that jumps finds the tests, and the code, that are right by luck."""

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from jumping_clock import next_moment

from patience import HANG

TESTS = Path(__file__).parents[1]
#: What once failed by luck: 721 minutes from the begin of this minute are above 720 minutes from now.
MARGIN = """
from datetime import UTC, datetime, timedelta

def test_it_is_far_away():
    start = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes={minutes})
    assert isinstance(start, datetime)
    assert start - datetime.now(UTC) > timedelta(minutes=720)
"""
SECONDS = """
import time

def test_it_is_the_same_minute():
    assert time.time() // 60 == time.time() // 60
"""


def run(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    """Run a test under the clock."""
    # The clock is that of what lies beside it.
    (folder / "tests").mkdir()
    shutil.copy(TESTS / "jumping_clock.py", folder / "tests")
    (folder / "tests/test_margin.py").write_text(text)
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(folder / "tests")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "jumping_clock"]
    own = ("CARME_CLOCK", "CARME_CLOCK_STEP", "PYTEST_ADDOPTS")  # of a run of this under the clock
    without = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(
        [*command, "--rootdir", folder, "-c", os.devnull, folder / "tests/test_margin.py"],
        env=without | plugins,
        timeout=HANG,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("text", [MARGIN.format(minutes=721), SECONDS])
def test_a_margin_of_less_than_a_minute_fails(tmp_path: Path, text: str) -> None:
    done = run(tmp_path, text)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr


def test_a_margin_of_minutes_holds(tmp_path: Path) -> None:
    done = run(tmp_path, MARGIN.format(minutes=725))
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("59", "2026-11-28 10:21:59"),
        ("30", "2026-11-28 10:22:30"),
        ("20:00", "2026-11-28 11:20:00"),
        ("23:59:58", "2026-11-28 23:59:58"),
        ("0:0:0", "2026-11-29 00:00:00"),
    ],
)
def test_the_next_moment_with_these_digits_is_found(named: str, expected: str) -> None:
    now = datetime(2026, 11, 28, 10, 21, 40, tzinfo=UTC).timestamp()
    assert f"{datetime.fromtimestamp(next_moment(now, named), UTC):%Y-%m-%d %H:%M:%S}" == expected


def test_a_wrong_moment_is_refused() -> None:
    with pytest.raises(ValueError, match="it must be SS, MM:SS or HH:MM:SS"):
        next_moment(0.0, "1:2:3:4")
