"""Copies that are interrupted, starved or disturbed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carme.errors import CarmeError
from carme.staging import Options, Problem, copy, sync
from carme.staging.journal import Journal
from carme.staging.state import State
from carme.staging.tree import PARTIAL, STATE, partial_name
from patience import HANG

from .trees import SOURCE, both_engines, carme_data, command, from_and_to, many, walk

#: How many copies are killed; for more: CARME_KILLS=200 ./test unit -- -k killed_at
KILLS = int(os.environ.get("CARME_KILLS", "15"))

root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, or becomes another user")


def visible(target: Path) -> list[Path]:
    """The files that have their final names, outside of what is still being built."""
    return [
        Path(folder) / name
        for folder, folders, files in os.walk(target)
        for name in files
        if not (Path(folder) / name).is_symlink()
        and not any(part.startswith((PARTIAL, STATE)) for part in (Path(folder) / name).parts)
    ]


def kill_at(source: Path, target: Path, delay: float, *more: str) -> bool:
    """Start a copy and kill it; whether it was still at work."""
    process = subprocess.Popen(
        command("copy", str(source), str(target), *more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.kill()
    return process.wait() == -signal.SIGKILL


def killed_in_a_file(source: Path, target: Path, *more: str) -> None:
    """Start a copy and kill it as soon as it is at a file."""
    process = subprocess.Popen(
        command("copy", str(source), str(target), *more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not list(target.glob(f"{PARTIAL}*")):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.timeout(0 if KILLS > 50 else 600)
def test_a_copy_that_is_killed_at_any_moment_resumes(memory: Path) -> None:
    source = memory / "source"
    many(source / "small", 30, 40)
    many(source / "huge", 1, 3000, size=16)
    for number in range(2):
        (source / f"large{number}").write_bytes(random.Random(number).randbytes(1 << 20) * 70)
    os.link(source / "large0", source / "small" / "again")
    (source / "link").symlink_to("large0")
    target = memory / "target"
    begun = time.monotonic()
    assert carme_data("copy", str(source), str(target)).returncode == 0
    longest = time.monotonic() - begun
    shutil.rmtree(target)
    outside = walk(source)
    beside = sorted(os.listdir(memory))
    killed = 0
    chance = random.Random(7)
    while killed < KILLS:
        for turn in range(min(5, KILLS - killed)):
            # Each copy resumes where the one before was killed.
            engine = chance.choice(("auto", "python"))
            delay, begun = chance.uniform(0.05, longest), time.monotonic()
            if not kill_at(source, target, delay, "--engine", engine):
                if turn == 0:  # a whole copy; where the first one met a busy moment, few would be killed
                    longest = min(longest, time.monotonic() - begun)
                break
            killed += 1
            # Whatever has its name is whole.
            for file in visible(target):
                original = source / file.relative_to(target)
                assert file.stat().st_size == original.stat().st_size
                assert file.read_bytes() == original.read_bytes()
        ended = carme_data("copy", str(source), str(target))
        assert ended.returncode == 0, ended.stderr
        assert walk(target) == outside
        # A run that finds no more than a few changes copies them in another way.
        for number in range(30):
            (source / f"small/d{number}/f{number}").write_bytes(chance.randbytes(300))
        outside = walk(source)
        killed += kill_at(source, target, chance.uniform(0.02, longest / 2))
        ended = carme_data("copy", str(source), str(target))
        assert ended.returncode == 0, ended.stderr
        assert walk(target) == outside
        shutil.rmtree(target)
        assert sorted(os.listdir(memory)) == beside
    assert walk(source) == outside
    print(f"{killed} copies were killed; each ended as the source, byte for byte")


def test_a_sync_of_a_few_files_that_is_killed_resumes(memory: Path) -> None:
    source, target = from_and_to(memory)
    many(source, 3, 20)
    assert copy(str(source), str(target)).ok
    # What such a run leaves: its state, and an incomplete file whose original is gone now.
    left = State(str(target / STATE))
    os.close(left.lock)
    (target / "d1" / partial_name("f3")).write_text("half of it")
    (source / "d1/f3").unlink()
    (source / "d2/f4").write_bytes(b"changed")
    result = sync(str(source), str(target))
    assert result.ok and result.resumed and (result.counts.copied, result.counts.removed) == (1, 1)
    assert walk(target) == walk(source)


@pytest.mark.parametrize("instead", ["nothing", "file", "symlink"])
def test_a_resumed_copy_drops_a_folder_that_the_source_no_longer_has(memory: Path, instead: str) -> None:
    source, target = from_and_to(memory)
    many(source, 3, 5)
    assert copy(str(source), str(target)).ok
    # What a run leaves that is killed before it sets the folders' times.
    journal = Journal(str(target / STATE), "an earlier run", "xxh3")
    journal.folder_waits("d1")
    journal.close(finished=False)
    shutil.rmtree(source / "d1")
    if instead == "file":
        (source / "d1").write_text("now")
    elif instead == "symlink":
        (source / "d1").symlink_to("d2")
    result = sync(str(source), str(target))
    assert result.resumed and result.problems == []
    assert walk(target) == walk(source)


@both_engines
def test_partial_files_in_a_folder_of_many_files_are_replaced(memory: Path) -> None:
    source, target = from_and_to(memory)
    many(source / "huge", 1, 5000, size=16)
    (target / "huge/d0").mkdir(parents=True)
    for name in ("f7", "gone"):
        (target / "huge/d0" / partial_name(name)).write_text("half of it")
    result = sync(str(source), str(target))
    # Each file once, and by one worker.
    assert result.ok and result.counts.copied == result.counts.files == 5000
    assert walk(target) == walk(source)


def test_what_is_verified_is_not_copied_again(memory: Path) -> None:
    source, target = from_and_to(memory)
    source.mkdir()
    (source / "large").write_bytes(os.urandom(1 << 20) * 384)
    # Six parts; a limit makes it last twelve seconds, and two of them are enough here.
    slow = subprocess.Popen(
        command("copy", str(source), str(target), "--bandwidth", "32M", "--workers", "1"),
        stdout=subprocess.DEVNULL,
    )
    journal = target / STATE / "journal.sqlite"
    deadline = time.monotonic() + HANG
    known = 0
    while known < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        # In a copy of it: the run has the file to itself.
        if journal.exists():
            shutil.copy(journal, memory / "look")
            with (
                contextlib.suppress(sqlite3.Error),
                contextlib.closing(sqlite3.connect(memory / "look")) as base,
            ):
                known = base.execute("SELECT count(*) FROM part").fetchone()[0]
    slow.kill()
    assert slow.wait() == -signal.SIGKILL and known >= 2
    result = copy(str(source), str(target))
    assert result.resumed and result.counts.bytes_copied <= (384 << 20) - known * (64 << 20)
    assert walk(target) == walk(source)


def test_a_changed_source_is_not_taken_for_what_was_begun(memory: Path) -> None:
    source, target = from_and_to(memory)
    source.mkdir()
    (source / "large").write_bytes(b"old" * (50 << 20))
    (source / "gone").write_bytes(b"gone" * (30 << 20))
    killed_in_a_file(source, target, "--bandwidth", "5M")
    (source / "large").write_bytes(b"new" * (50 << 20))
    (source / "gone").unlink()
    assert copy(str(source), str(target)).ok
    assert walk(target) == walk(source)


def test_contents_are_compared_after_a_restart_of_the_host(memory: Path) -> None:
    source, target = from_and_to(memory)
    many(source, 2, 5)
    (source / "large").write_bytes(b"x" * (100 << 20))
    killed_in_a_file(source, target, "--bandwidth", "5M", "--workers", "1")
    shutil.copytree(source / "d0", target / "d0", dirs_exist_ok=True)
    status = (source / "d0/f0").stat()
    (target / "d0/f0").write_bytes(bytes(status.st_size))
    os.utime(target / "d0/f0", ns=(status.st_atime_ns, status.st_mtime_ns))
    (target / STATE / "boot").write_text("an earlier one")
    assert copy(str(source), str(target)).ok
    assert walk(target) == walk(source)


def test_only_one_copies_to_a_place(memory: Path) -> None:
    source, target = from_and_to(memory)
    source.mkdir()
    (source / "large").write_bytes(bytes(100 << 20))
    first = subprocess.Popen(command("copy", str(source), str(target), "--bandwidth", "5M"))
    try:
        while not (target / STATE / "lock").exists():
            time.sleep(0.05)
        second = carme_data("copy", str(source), str(target))
        assert second.returncode == 1 and "is under way. Wait for it" in second.stderr
    finally:
        first.kill()
        first.wait()


def test_ctrl_c_ends_it_and_it_goes_on(memory: Path) -> None:
    source, target = from_and_to(memory)
    source.mkdir()
    (source / "large").write_bytes(b"1" * (100 << 20))
    # Whatever the tests were started by: what runs in the background of a shell ignores the signal.
    copying = command("copy", str(source), str(target), "--bandwidth", "5M")
    first = subprocess.Popen(["env", "--default-signal=INT", *copying], start_new_session=True)
    while not list(target.glob(f"{PARTIAL}*")):
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGINT)
    assert first.wait(HANG) == 130
    assert not (target / "large").exists()
    result = copy(str(source), str(target))
    assert result.ok and result.resumed and walk(target) == walk(source)


@both_engines
def test_a_file_that_changes_during_the_copy_is_reported(memory: Path) -> None:
    source, target = from_and_to(memory)
    many(source, 1, 3)
    (source / "busy").write_bytes(bytes(40 << 20))
    (source / "busy large").write_bytes(bytes(100 << 20))
    stop = threading.Event()

    def scribble() -> None:
        with open(source / "busy", "r+b") as small, open(source / "busy large", "r+b") as large:
            while not stop.is_set():
                for file in (small, large):
                    file.seek(0)
                    file.write(os.urandom(64))
                    file.flush()
                time.sleep(0.001)

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        result = copy(str(source), str(target))
    finally:
        stop.set()
        writer.join()
    assert {problem.path for problem in result.problems} == {"busy", "busy large"}
    assert all(problem.reason == "it changed while it was read" for problem in result.problems)
    assert sorted(os.listdir(target))[-1] == "d0" and not (target / "busy").exists()
    assert copy(str(source), str(target)).ok
    assert walk(target) == walk(source)


@contextlib.contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@root
@both_engines
@pytest.mark.parametrize("large", [False, True])
def test_a_full_destination_is_reported_and_the_copy_resumes_with_more_space(
    tmp_path: Path, large: bool
) -> None:
    source = tmp_path / "source"
    many(source, 5, 100, size=8000)
    if large:
        (source / "large").write_bytes(os.urandom(1 << 20) * 100)
    with mounted(tmp_path / "target", "2m") as target:
        with pytest.raises(CarmeError, match="there is no space left"):
            copy(str(source), str(target))
        for file in visible(target):
            assert file.read_bytes() == (source / file.relative_to(target)).read_bytes()
        ended = carme_data("copy", str(source), str(target))
        assert ended.returncode == 1 and "Traceback" not in ended.stderr
        subprocess.run(["mount", "-o", "remount,size=400m", str(target)], check=True)
        assert copy(str(source), str(target)).ok
        assert walk(target) == walk(source)


@root
def test_a_read_only_destination_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    many(source, 1, 2)
    with mounted(tmp_path / "target", "2m") as target:
        subprocess.run(["mount", "-o", "remount,ro", str(target)], check=True)
        with pytest.raises(CarmeError, match="can only be read"):
            copy(str(source), str(target))


def test_files_that_vanish_during_the_copy_are_reported(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = from_and_to(memory)
    many(source, 2, 6)
    (source / "d1/f3").unlink()
    (source / "d1/f3").write_bytes(bytes(3 << 20))
    opening = os.open

    def just_too_late(path: Any, *how: Any, **where: Any) -> int:
        if path == "f3" and not how[0] & os.O_CREAT:
            for file in source.glob("d?/f3"):
                file.unlink()
        return opening(path, *how, **where)

    # In the workers, too: they are forked. The compiled part would open them elsewhere.
    monkeypatch.setattr(os, "open", just_too_late)
    result = copy(str(source), str(target), Options(engine="python", workers=1))
    monkeypatch.undo()
    assert not result.ok and result.counts.problems == len(result.problems) >= 1
    assert {problem.path for problem in result.problems} <= {"d0/f3", "d1/f3"}
    assert {problem.reason for problem in result.problems} == {
        "it vanished, or a folder on the way to it did"
    }
    assert walk(target, times=False) == walk(source, times=False)


@root
def test_what_may_not_be_read_is_reported(memory: Path) -> None:
    memory.chmod(0o755)
    source, target = from_and_to(memory)
    many(source, 3, 3)
    (source / "d0/f1").chmod(0)
    (source / "d1").chmod(0)
    (source / "d2/f2").chmod(0o6755)
    os.chown(source / "d2/f2", 1234, 1234)
    os.mknod(source / "device", 0o600 | 0o020000, os.makedev(1, 3))
    target.mkdir()
    os.chown(target, 65534, 65534)
    program = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from carme.cli import program; program()"
    # The system's Python: the tests' own may be where only root can read.
    ended = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", program, "data", "copy", str(source), str(target)],
        capture_output=True,
        text=True,
        user=65534,
        group=65534,
        extra_groups=[],
    )
    assert ended.returncode == 1
    assert sorted(ended.stderr.splitlines()) == [
        "carme: 3 entries were not copied; the reasons are above.",
        "carme: d0/f1: you have no permission",
        "carme: d1: you have no permission",
        "carme: device: the system does not permit it",
    ]
    status = (target / "d2/f2").stat()
    # Not another one's to be run as.
    assert (status.st_uid, status.st_mode & 0o7777) == (65534, 0o755)
    assert (target / "d0/f0").exists() and not (target / "d0/f1").exists()


def test_a_symlink_on_the_way_is_not_followed(memory: Path) -> None:
    source, target, outside = memory / "source", memory / "target", memory / "outside"
    many(source / "a/b", 1, 3)
    outside.mkdir()
    target.mkdir()
    (target / "a").mkdir()
    (target / "a/b").symlink_to(outside)
    assert [problem.path for problem in copy(str(source), str(target)).problems] == ["a/b"]
    assert not list(outside.iterdir())
    # Something planted under the name that a file has while it is incomplete is not written through either.
    (source / "one").write_text("secret")
    (target / partial_name("one")).symlink_to(outside / "stolen")
    copy(str(source), str(target))
    assert (target / "one").read_text() == "secret" and not list(outside.iterdir())
    assert sync(str(source), str(target)).ok
    assert walk(target) == walk(source)


def test_a_vanished_worker_is_reported(memory: Path) -> None:
    source, target = from_and_to(memory)
    source.mkdir()
    (source / "large").write_bytes(b"1" * (100 << 20))
    reported: list[object] = []

    process = subprocess.Popen(
        command("copy", str(source), str(target), "--bandwidth", "5M", "--workers", "2"),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(target.glob(f"{PARTIAL}*")):
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[0]), signal.SIGKILL)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 1 and "A worker ended unexpectedly" in errors and not reported
    result = copy(str(source), str(target), notify=reported.append)
    assert result.ok and walk(target) == walk(source)
    assert not [each for each in reported if isinstance(each, Problem)]
