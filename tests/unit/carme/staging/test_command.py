"""The command `carme` as it is installed: it starts Python, unless a copy is as it was."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .trees import SOURCE, carme_data, from_and_to, many, walk


class Installed:
    """The command with a Python beside it that leaves a mark when it is started."""

    def __init__(self, folder: Path) -> None:
        self.program, self.mark = folder / "carme", folder / "started"
        python = folder / "python"
        # Carme is not installed for this Python. The program calls it isolated, with a line of Python.
        there = f"import sys; sys.path.insert(0, '{SOURCE}'); "
        python.write_text(
            f'#!/bin/sh\n: > {self.mark}\n[ "$1 $2" = "-I -c" ] || exit 99\nline=$3; shift 3\n'
            f'exec {sys.executable} -I -c "{there}$line" "$@"\n'
        )
        python.chmod(0o755)

    def __call__(self, *words: object, **more: object) -> tuple[int, str, str, bool]:
        """Exit code, output, errors, and whether Python was started."""
        self.mark.unlink(missing_ok=True)
        done = subprocess.run(
            [self.program, *map(str, words)],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 100, **more},
        )
        return done.returncode, done.stdout, done.stderr, self.mark.exists()


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory, compiled: None) -> Path:
    """The command, compiled."""
    native = runpy.run_path(str(SOURCE.parent / "native/compile.py"))
    output = tmp_path_factory.mktemp("program") / "carme"
    # Not static: some distributions have that form of the C library in a package of its own.
    options = [option for option in native["BUILD_OPTIONS"][native["PROGRAM"]] if option != "-static"]
    command = ["cc", *native["FLAGS"], "-Werror", *options, "-o", str(output)]
    subprocess.run(command, check=True, cwd=SOURCE.parent / "native")
    return output


@pytest.fixture
def carme(program: Path, tmp_path: Path) -> Installed:
    """It is installed: a file of its own, as it looks beside itself for Python."""
    shutil.copy(program, tmp_path / "carme")
    return Installed(tmp_path)


@pytest.fixture
def copied(memory: Path) -> tuple[Path, Path]:
    """A tree and its copy."""
    source, target = from_and_to(memory)
    many(source, 3, 5)
    (source / "way").symlink_to("d0/f0")
    assert carme_data("copy", str(source), str(target)).returncode == 0
    return source, target


def test_what_is_set_for_python_is_for_other_programs(carme: Installed, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    for name, value in (("PYTHONHOME", "/nonexistent"), ("PYTHONPATH", str(tmp_path))):
        code, output, errors, _ = carme("jobs", "--help", env=os.environ | {name: value}, cwd=tmp_path)
        assert (code, errors) == (0, "") and "usage: carme jobs" in output
    # Where there is no compiler.
    (tmp_path / "bin").mkdir()
    script = shutil.copy(SOURCE.parent / "native/carme.py", tmp_path / "bin/carme")
    path = os.pathsep.join([str(tmp_path), str(SOURCE)])
    done = subprocess.run(
        [sys.executable, script, "jobs", "--help"], env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and "usage: carme jobs" in done.stdout


@pytest.mark.parametrize("words", [["copy"], ["sync"], ["copy", "--quiet"]])
def test_what_has_not_changed_needs_no_python(
    words: list[str], carme: Installed, copied: tuple[Path, Path]
) -> None:
    code, output, errors, started = carme("data", *words, *copied)
    assert (code, errors, started) == (0, "", False)
    message = carme_data(*words, *map(str, copied)).stdout
    assert re.sub(r"[\d.]+ s", "", output) == re.sub(r"[\d.]+ s", "", message)
    assert "Copied 0 files (0 B), 16 unchanged" in output


def renewed(source: Path, _target: Path) -> None:
    (source / "d1/f1").write_bytes((source / "d1/f1").read_bytes()[::-1])


def longer(source: Path, _target: Path) -> None:
    (source / "d1/f1").write_text("more")


def added(source: Path, _target: Path) -> None:
    (source / "d1/new").write_text("new")


def folder_added(source: Path, _target: Path) -> None:
    (source / "d1/below/deeper").mkdir(parents=True)


def mode(source: Path, _target: Path) -> None:
    (source / "d2/f0").chmod(0o600)


def mode_of_a_folder(source: Path, _target: Path) -> None:
    (source / "d2").chmod(0o700)


def block_target(source: Path, _target: Path) -> None:
    (source / "way").unlink()
    (source / "way").symlink_to("d0/f1")


def lost(_source: Path, target: Path) -> None:
    (target / "d0/f0").unlink()


def copy_spoilt(_source: Path, target: Path) -> None:
    (target / "d0/f0").write_text("spoilt")


def unfinished(_source: Path, target: Path) -> None:
    (target / ".carme-staging").mkdir(0o700)


@pytest.mark.parametrize(
    "change",
    [
        *(renewed, longer, added, folder_added, mode, mode_of_a_folder, block_target, lost, copy_spoilt),
        unfinished,
    ],
)
def test_any_change_is_for_python(
    change: Callable[[Path, Path], None], carme: Installed, copied: tuple[Path, Path]
) -> None:
    change(*copied)
    code, _output, errors, started = carme("data", "copy", *copied)
    assert (code, errors, started) == (0, "", True)
    source, target = copied
    assert walk(source) == walk(target)
    assert not carme("data", "copy", *copied)[3]


def test_what_only_the_copy_has_is_for_python_when_it_is_to_go(
    carme: Installed, copied: tuple[Path, Path]
) -> None:
    source, target = copied
    (target / "d0/old").write_text("old")
    os.utime(target / "d0", ns=(0, (source / "d0").stat().st_mtime_ns))
    assert not carme("data", "copy", *copied)[3]
    assert carme("data", "sync", *copied)[3]
    assert not (target / "d0/old").exists()


def test_mistakes_are_reported_by_python(carme: Installed, copied: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = copied
    for words in (
        ["copy", source, source],
        ["copy", source, source / "d0"],
        ["copy", source / "d0", source],
        ["copy", source / "nowhere", target],
        ["copy", source],
        ["copy", "--workers", "none", source, target],
    ):
        code, _output, errors, started = carme("data", *words)
        expected = carme_data(*map(str, words))
        assert started
        assert (code, errors) == (expected.returncode, expected.stderr) and code
    assert "carme 0" in carme("--version")[1]


def test_a_copy_of_one_file_is_made_by_python(carme: Installed, copied: tuple[Path, Path]) -> None:
    source, target = copied
    assert carme("data", "copy", source / "d0/f0", target / "one")[::3] == (0, True)
    assert (target / "one").read_bytes() == (source / "d0/f0").read_bytes()


def test_an_output_that_is_full_is_reported(carme: Installed, copied: tuple[Path, Path]) -> None:
    with Path("/dev/full").open("w") as full:
        code, _none, errors, started = carme("data", "copy", *copied, stdout=full)
    assert (code, started) == (1, False)
    assert errors == "carme: The output cannot be written: No space left on device.\n"


def test_without_python_it_says_what_is_missing(carme: Installed) -> None:
    (carme.program.parent / "python").unlink()
    code, _output, errors, _started = carme("--version")
    assert code == 1
    assert f"{carme.program.parent}/python cannot be started: No such file or directory." in errors
