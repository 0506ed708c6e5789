"""Copies equal their source, on real file systems."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.staging import Options, Problem, copy, parse_size, queue, sync
from carme.staging.digests import ALGORITHMS
from carme.staging.tree import PARTIAL, STATE

from .trees import SOURCE, both_engines, carme_data, command, from_and_to, many, walk


def left_behind(top: Path) -> list[str]:
    """What a finished run must not leave."""
    return [
        name
        for folder, folders, files in os.walk(top)
        for name in folders + files
        if name.startswith((PARTIAL, STATE))
    ]


def every_kind(top: Path) -> None:
    """A tree with one of everything."""
    many(top, 3, 5)
    (top / "empty").mkdir()
    (top / "nothing").touch()
    (top / "deep/er/and/deeper").mkdir(parents=True)
    (top / "deep/er/file").write_text("x")
    os.link(top / "deep/er/file", top / "second name")
    os.link(top / "deep/er/file", top / "deep/third")
    (top / "link").symlink_to("deep/er/file")
    (top / "dangling").symlink_to("/nowhere/at all")
    (top / "round").symlink_to(".")
    os.mkfifo(top / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(top):
        listener.bind("socket")
    (top / "locked").mkdir(mode=0o700)
    (top / "locked/file").write_text("y")
    (top / "locked/file").chmod(0o4711)
    (top / "shared").mkdir()
    (top / "shared").chmod(0o2775)
    os.utime(top / "link", ns=(5, 1_234_567_891), follow_symlinks=False)
    for folder, folders, files in os.walk(top):
        for number, name in enumerate(folders + files):
            if not os.path.islink(path := os.path.join(folder, name)):
                os.utime(path, ns=(7, 1_500_000_000_123_456_000 + number))
    (top / "locked").chmod(0o500)


@both_engines
def test_everything_is_preserved(place: Path) -> None:
    source, target = from_and_to(place)
    source.mkdir()
    every_kind(source)
    os.setxattr(source / "d0/f1", "user.origin", b"\0\xff")
    os.setxattr(source / "d1", "user.colour", b"red")
    if os.geteuid() == 0:
        os.chown(source / "d0/f0", 1234, 2345)
        os.chown(source / "d2", 1234, 2345)
        os.lchown(source / "link", 1234, 2345)
    os.utime(source, ns=(1, 1_400_000_000_000_000_000))
    result = copy(str(source), str(target))
    assert result.ok and not result.problems and not result.warnings
    assert walk(target) == walk(source)
    assert not left_behind(target)
    again = copy(str(source), str(target))
    assert again.counts.copied == 0 and again.counts.updated == 0 and again.ok
    assert again.counts.unchanged == result.counts.copied
    assert walk(target) == walk(source)


def acl(*entries: tuple[int, int, int]) -> bytes:
    """An ACL as the kernel has it: tag, permissions, id."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NOBODY = 0xFFFFFFFF
ACL = acl((1, 6, NOBODY), (2, 4, 1234), (4, 0, NOBODY), (0x10, 4, NOBODY), (0x20, 0, NOBODY))


@both_engines
def test_acls_are_preserved(place: Path) -> None:
    source, target = from_and_to(place)
    many(source, 2, 2)
    os.setxattr(source / "d0/f0", "system.posix_acl_access", ACL)
    os.setxattr(source / "d1", "system.posix_acl_default", ACL)
    assert copy(str(source), str(target)).ok
    assert walk(target) == walk(source)
    # A default ACL of the destination must not give anybody more than the source did.
    with_default = place / "other"
    with_default.mkdir()
    os.setxattr(with_default, "system.posix_acl_default", ACL)
    assert copy(str(source), str(with_default)).ok
    assert walk(with_default) == walk(source)


def test_an_acl_that_is_lost_widens_nothing() -> None:
    from carme.staging.attributes import without_acl

    wide = acl((1, 7, NOBODY), (2, 7, 1234), (4, 1, NOBODY), (0x10, 7, NOBODY), (0x20, 0, NOBODY))
    assert without_acl(0o770, wide) == 0o710


@both_engines
def test_sparse_files_stay_sparse(place: Path) -> None:
    source, target = from_and_to(place)
    source.mkdir()
    for name, size in (("middling", 8 << 20), ("large", 200 << 20)):
        with open(source / name, "wb") as file:
            file.truncate(size)
            file.seek(size // 2)
            file.write(b"data" * 1024)
    assert copy(str(source), str(target)).ok
    assert walk(target) == walk(source)
    for name in ("middling", "large"):
        assert (target / name).stat().st_blocks <= (source / name).stat().st_blocks + 16


@pytest.mark.parametrize(
    ("verify", "hash"),
    [("none", "blake2b"), *((read_from, each) for read_from in ("read", "device") for each in ALGORITHMS)],
)
def test_large_files_are_copied_in_parts_and_verified(tmp_path: Path, verify: str, hash: str) -> None:
    if hash != "blake2b":
        pytest.importorskip({"xxh3": "xxhash"}.get(hash, hash))
    source, target = from_and_to(tmp_path)
    source.mkdir()
    block = os.urandom(1 << 20)
    with open(source / "large", "wb") as file:
        for _ in range(131):
            file.write(block)
        file.write(b"and a bit")
    assert copy(str(source), str(target), Options(verify=verify, hash=hash, workers=3)).ok  # type: ignore[arg-type]
    assert walk(target) == walk(source)


def test_sync_removes_what_is_gone(place: Path) -> None:
    source, target = from_and_to(place)
    many(source, 3, 4)
    copy(str(source), str(target))
    shutil.rmtree(source / "d0")
    (source / "d1/f0").unlink()
    (source / "d2/f0").unlink()
    (source / "d2/f0").mkdir()
    (source / "d2/f0/inside").write_text("a folder now")
    (target / "outside").symlink_to("/etc")
    before = walk(target)
    reported: list[object] = []
    dry = sync(str(source), str(target), dry_run=True, notify=reported.append)
    assert walk(target) == before
    assert {pair for pair in reported if isinstance(pair, tuple)} == {
        ("remove", "d0"),
        ("remove", "d1/f0"),
        ("remove", "d2/f0"),
        ("remove", "outside"),
        ("copy", "d2/f0/inside"),
    }
    assert dry.counts.removed == 4
    # The four files below d0 count as well.
    assert sync(str(source), str(target)).counts.removed == 8
    assert walk(target) == walk(source)
    assert Path("/etc/passwd").exists()


def test_copy_leaves_another_kind_in_the_way(tmp_path: Path) -> None:
    source, target = from_and_to(tmp_path)
    many(source, 2, 2)
    target.mkdir()
    (target / "d0").write_text("a file")
    (target / "d1/f1").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (source / "d2").mkdir()
    (source / "d2/f").write_text("x")
    (target / "d2").symlink_to(outside)
    result = copy(str(source), str(target))
    assert {(problem.path, problem.reason.split(" of ")[0]) for problem in result.problems} == {
        ("d0", "something that is not a folder"),
        ("d1/f1", "a folder"),
        ("d2", "something that is not a folder"),
    }
    assert not list(outside.iterdir()) and not result.ok
    assert (target / "d1/f0").read_bytes() == (source / "d1/f0").read_bytes()


@both_engines
def test_a_folder_of_very_many_files_is_copied_and_synced(memory: Path) -> None:
    source, target = from_and_to(memory)
    many(source, 1, 7000, size=8)
    many(source / "d0" / "below", 1, 3)
    result = copy(str(source), str(target), Options(workers=3))
    assert result.ok and result.counts.copied == 7003
    assert walk(target) == walk(source)
    for number in range(0, 7000, 2):
        (source / "d0" / f"f{number}").unlink()
    assert sync(str(source), str(target)).counts.removed == 3500
    assert walk(target) == walk(source)


@both_engines
def test_folders_that_wait_go_to_a_file(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tree of any size takes the same memory."""
    monkeypatch.setattr(queue, "HELD", 3)
    source, target = from_and_to(memory)
    many(source, 60, 2)
    for folder in range(0, 60, 3):
        many(source / f"d{folder}", 4, 1)
    waiting = []
    taken = queue.Queue.take

    def take(self: queue.Queue, workers: int) -> list[Any]:
        waiting.append((len(self._folders), len(self._blocks)))
        return taken(self, workers)

    monkeypatch.setattr(queue.Queue, "take", take)
    result = copy(str(source), str(target), Options(workers=2))
    assert result.ok and result.counts.copied == 200
    assert walk(target) == walk(source)
    assert max(folders for folders, _blocks in waiting) <= 6
    assert max(blocks for _folders, blocks in waiting) > 10


def test_paths_longer_than_the_systems_limit_are_copied_and_removed(tmp_path: Path) -> None:
    source, target = from_and_to(tmp_path)
    source.mkdir()
    # Deeper than a path may be long.
    here = os.open(source, os.O_RDONLY)
    for _ in range(40):
        os.mkdir("x" * 255, dir_fd=here)
        deeper = os.open("x" * 255, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(os.open("y" * 255, os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    result = copy(str(source), str(target))
    assert result.ok and result.counts.folders == 41 and result.counts.copied == 1
    assert copy(str(source), str(target)).counts.unchanged == 1
    (source / "empty").mkdir()
    assert sync(str(source / "empty"), str(target)).counts.removed == 41
    assert not list(target.iterdir())
    subprocess.run(["rm", "-rf", str(source)], check=True)


def test_a_single_file_is_copied_to_a_path_or_into_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("contents")
    assert copy(str(tmp_path / "a"), str(tmp_path / "b")).ok
    assert (tmp_path / "b").read_text() == "contents"
    (tmp_path / "folder").mkdir()
    assert copy(str(tmp_path / "a"), str(tmp_path / "folder")).ok
    assert (tmp_path / "folder/a").read_text() == "contents"
    with open(tmp_path / "big", "wb") as file:
        for _ in range(70):
            file.write(os.urandom(1 << 20))
    assert copy(str(tmp_path / "big"), str(tmp_path / "other")).ok
    assert (tmp_path / "big").read_bytes() == (tmp_path / "other").read_bytes()
    assert not left_behind(tmp_path)


def test_a_copy_with_wrong_paths_or_limits_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    many(source, 1, 1)
    (tmp_path / "file").touch()
    inside = source / "d0" / "copy"
    (tmp_path / "alias").symlink_to(source)
    for wrong, error in (
        ((tmp_path / "nowhere", tmp_path / "x"), NotFound),
        ((source, tmp_path / "no/where"), NotFound),
        ((source, inside), InvalidRequest),
        ((source, tmp_path / "alias/d0/copy"), InvalidRequest),
        ((source, source), InvalidRequest),
        ((source / "d0", source), InvalidRequest),
        ((source, tmp_path / "file"), InvalidRequest),
        ((Path("/dev/null"), tmp_path / "x"), InvalidRequest),
        ((tmp_path / "file", tmp_path / "file"), CarmeError),
    ):
        with pytest.raises(error):
            copy(str(wrong[0]), str(wrong[1]))
    assert not inside.exists()
    for text in ("", "0", "-1", "5X", "many", "1e999"):
        with pytest.raises(InvalidRequest):
            parse_size(text)
    assert parse_size("1.5k") == 1536 and parse_size("2 GiB") == 2 << 30


def test_carme_data_prints_results_events_and_errors(tmp_path: Path) -> None:
    source, target = from_and_to(tmp_path)
    many(source, 2, 3)
    ended = carme_data("copy", str(source), str(target))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Copied 6 files (") and not ended.stderr
    assert walk(target) == walk(source)
    ended = carme_data("copy", str(source), str(target), "--json")
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert events[-1]["event"] == "end" and events[-1]["ok"] and events[-1]["unchanged"] == 6
    assert any(event["event"] == "progress" for event in events)
    (source / "d0/f0").unlink()
    ended = carme_data("sync", "--dry-run", str(source), str(target))
    assert ended.stdout.splitlines()[0] == "would remove d0/f0" and (target / "d0/f0").exists()
    ended = carme_data("copy", str(source), str(source / "d0"))
    assert ended.returncode == 1 and "is inside the source. Name one outside of it." in ended.stderr
    ended = carme_data("copy", str(source), str(target), "--bandwidth", "fast")
    assert ended.returncode == 1 and "'fast' is not a size." in ended.stderr
    assert carme_data("copy", str(source)).returncode == 2
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command("copy", str(source), str(target)),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1 and "cannot be written: No space left on device." in ended.stderr


def test_the_engine_is_reported(tmp_path: Path, library: Path | None) -> None:
    many(tmp_path / "source", 1, 2)
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    assert copy(source, target).engine == ("native" if library else "python")
    assert copy(source, target, Options(engine="python")).engine == "python"
    ended = carme_data("copy", source, target, "--json", "--engine", "python")
    assert json.loads(ended.stdout.splitlines()[-1])["engine"] == "python"
    # A library that cannot be used, of another release perhaps, is as good as none; seen by a process that
    # has loaded none before.
    (tmp_path / "broken.so").write_bytes(b"\x7fELF")
    program = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from carme.errors import InvalidRequest\n"
        "from carme.staging import Options, copy, native\n"
        "native.FILE_NAME = sys.argv[2]\n"
        "print(copy(*sys.argv[3:]).engine)\n"
        "try: copy(*sys.argv[3:], Options(engine='native'))\n"
        "except InvalidRequest as error: print(error)\n"
    )
    arguments = [str(SOURCE), str(tmp_path / "broken.so"), source, target]
    reported = subprocess.run(
        [sys.executable, "-I", "-c", program, *arguments], capture_output=True, text=True, check=True
    ).stdout
    assert reported.startswith("python\n") and "was not built for this host" in reported


def test_names_that_are_no_text_are_reported_safely(tmp_path: Path) -> None:
    source, target = from_and_to(tmp_path)
    source.mkdir()
    name = b"a\xff\n\x1b[31m"
    os.mkdir(os.path.join(os.fsencode(source), name))
    target.mkdir()
    with open(os.path.join(os.fsencode(target), name), "w"):
        pass
    ended = carme_data("copy", str(source), str(target))
    assert ended.returncode == 1
    assert "\x1b" not in ended.stderr and len(ended.stderr.splitlines()) == 2
    ended = carme_data("copy", str(source), str(target), "--json")
    (problem,) = (json.loads(line) for line in ended.stdout.splitlines() if '"problem"' in line)
    assert os.fsencode(problem["path"]) == name


def test_folders_whose_names_are_no_text_are_copied(tmp_path: Path) -> None:
    source, target = (tmp_path / os.fsdecode(name) for name in (b"caf\xe9", b"\xff"))
    source.mkdir()
    (source / "file").write_text("content")
    for words in (["copy"], ["copy", "--json"], ["sync"], ["verify"]):
        ended = carme_data(*words, str(source), str(target))
        assert (ended.returncode, ended.stderr) == (0, ""), words
    assert (target / "file").read_text() == "content"
    ended = carme_data("copy", str(source / "file"), str(target / "other"))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_limits_of_operations_and_bandwidth_hold(tmp_path: Path) -> None:
    source = tmp_path / "source"
    many(source, 2, 50, size=8)
    (source / "file").write_bytes(bytes(3 << 20))
    # A limit makes it slower; how slow it is without one does not matter.
    assert copy(str(source), str(tmp_path / "one"), Options(operations=100)).seconds > 0.9
    assert copy(str(source), str(tmp_path / "two"), Options(bandwidth=2 << 20)).seconds > 0.9


def test_a_program_with_threads_can_copy_and_gets_the_problems(tmp_path: Path) -> None:
    source, target = from_and_to(tmp_path)
    many(source, 1, 3)
    (target / "d0/f1").mkdir(parents=True)
    reported: list[object] = []
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        result = copy(str(source), str(target), notify=reported.append)
        with pytest.raises(NotFound):
            copy(str(tmp_path / "nowhere"), str(target))
    finally:
        ended.set()
        thread.join()
    assert result.counts.copied == 2
    assert [problem.path for problem in reported if isinstance(problem, Problem)] == ["d0/f1"]


NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
FILES = st.tuples(st.just("file"), st.binary(max_size=200), st.integers(0, 0o777), st.integers(0, 2**40))
LINKS = st.tuples(st.just("link"), NAMES)
TREES = st.recursive(
    st.dictionaries(NAMES, st.one_of(FILES, LINKS), max_size=5),
    lambda below: st.dictionaries(NAMES, st.one_of(FILES, LINKS, below), max_size=5),
    max_leaves=20,
)


def build(top: bytes, tree: dict[bytes, object]) -> None:
    """Make a tree."""
    os.makedirs(top, exist_ok=True)
    for name, what in tree.items():
        path = os.path.join(top, name)
        if isinstance(what, dict):
            build(path, what)
        elif isinstance(what, tuple) and what[0] == "file":
            with open(path, "wb") as file:
                file.write(what[1])
            os.chmod(path, what[2] | stat.S_IRUSR)
            os.utime(path, ns=(what[3], what[3]))
        elif isinstance(what, tuple):
            os.symlink(what[1], path)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(first=TREES, second=TREES)
def test_a_sync_turns_any_tree_into_any_other(
    first: dict[bytes, object], second: dict[bytes, object]
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        original, replaced, target = (Path(folder) / name for name in ("one", "two", "target"))
        build(os.fsencode(original), first)
        build(os.fsencode(replaced), second)
        assert copy(str(original), str(target)).ok
        assert walk(target) == walk(original)
        assert sync(str(replaced), str(target)).ok
        assert walk(target) == walk(replaced)
