"""Copying is tested with its compiled part; where that could make a difference, also without it."""

from __future__ import annotations

import os
import runpy
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from carme.staging import native, walker

from . import trees

PART = trees.SOURCE.parent


@pytest.fixture(scope="session", autouse=True)
def library() -> Path | None:
    """The compiled part as its source is now; None where there is no compiler."""
    program = runpy.run_path(str(PART / "native/compile.py"))
    output = PART / program["LIBRARY"]
    sources = max(source.stat().st_mtime for source in (PART / "native").glob("*.[ch]"))
    newer = output.exists() and output.stat().st_mtime > sources
    # In somebody else's checkout there is what there is.
    if newer or not os.access(output.parent, os.W_OK):
        return output if native.library() else None
    return output if program["build"](program["LIBRARY"], output, "-Werror") else None


@pytest.fixture(scope="session")
def compiled(library: Path | None) -> None:
    """The test needs the compiled part, or a compiler."""
    if not library:
        pytest.skip("there is neither the compiled part of copying nor a C compiler")


@pytest.fixture(params=["native", "python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of both copies; in this process only, and in those that it forks."""
    if request.param == "native":
        request.getfixturevalue("compiled")
    if request.param == "python":
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(walker, "library", lambda: None)
    return request.param


@pytest.fixture(autouse=True)
def only_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide threads that tests of other parts have left: with them each copy would run in another process."""
    earlier = set(threading.enumerate()) - {threading.current_thread()}
    monkeypatch.setattr(threading, "active_count", lambda: len(set(threading.enumerate()) - earlier))


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on tmpfs, where much can be copied quickly."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on the disk, and one on tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
