"""A small tree with the test command, and tests of its own."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from patience import HANG
from suites import debian
from suites.environments import tests_environment

ROOT = Path(__file__).resolve().parents[3]
#: What the command reads of the tree before it runs a test.
COPIED = (
    "test",
    "pyproject.toml",
    "tests/run_suites.py",
    "tests/results.py",
    "tests/check_names.py",
    "tests/c_functions.py",
    "tests/requirements.txt",
    "tests/constraints.txt",
    "containers/runtime/pyproject.toml",
)

#: Seconds for all of a command, in which pytest starts up to eight times: below what a test has.
LIMIT = 2.5 * HANG

#: Runs `./test` with these words.
Command = Callable[..., subprocess.CompletedProcess[str]]


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds, at most HANG seconds."""
    until = time.monotonic() + HANG
    while not holds():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    """Whether this process has ended; so has one that its parent has not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the command and without tests."""
    top = tmp_path / "tree"
    for name in (*COPIED, *(file.relative_to(ROOT) for file in ROOT.glob("*/pyproject.toml"))):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, top / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests/suites", top / "tests/suites", ignore=ignored)
    (top / "tests/unit").mkdir()
    return top


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment of the command: a cache with links to this one's entries, so nothing is installed."""
    cache = tmp_path / "cache/carme"
    environment = cache / tests_environment().name
    environment.mkdir(parents=True)
    for entry in Path(sys.prefix).iterdir():
        (environment / entry.name).symlink_to(entry)
    if not (environment / "complete").exists():
        (environment / "complete").touch()
    if debian.CACHE.is_dir():
        for entry in debian.CACHE.iterdir():
            if not (cache / entry.name).exists():
                (cache / entry.name).symlink_to(entry)
    outer = {"CARME_BESIDE", "CARME_RESULTS"}
    inherited = {name: value for name, value in os.environ.items() if name not in outer}
    # What an earlier preparation could not install is left out, and not tried again by each command.
    without_apt = tmp_path / "without-apt"
    without_apt.mkdir()
    (without_apt / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    (without_apt / "apt-get").chmod(0o755)
    # Most of the time that pytest takes here is that of plugins that these tests do not use.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin -p pytest_timeout"}
    # Further processes would take half of the rest; only the test of a signal uses them.
    own = {"CARME_PROCESSES": "0", "XDG_CACHE_HOME": str(cache.parent)}
    return inherited | plugins | own | {"PATH": f"{without_apt}:{inherited['PATH']}"}


@pytest.fixture
def command(tree: Path, variables: dict[str, str]) -> Command:
    """`./test` of the tree."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tree / "test", *words],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    return run
