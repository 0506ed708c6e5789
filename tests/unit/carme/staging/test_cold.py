"""Files that are not in memory: small ones are requested before they are wanted, large ones read past it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import Literal

import pytest

from carme.staging import Options, copy, native
from carme.staging.attributes import AttributeCopier
from carme.staging.native import Native

from . import trees

FILES = 1000


def forget(folder: Path) -> bool:
    """Have the files' contents no longer in memory; whether the file system lets that be."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    until = time.monotonic() + 5
    while files and time.monotonic() < until:
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        left = [path for path in files if in_memory(path)]
        if len(left) < len(files):
            until = time.monotonic() + 5  # a file system that lets it be is only slow
        files = left
    return not files


def in_memory(path: Path, place: int = 0) -> bool:
    """Whether a file is at a place that is a multiple of a page, without having it read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE, offset=place) as mapped:
        found = ctypes.create_string_buffer(1)
        first = ctypes.c_char.from_buffer(mapped)
        try:
            refused = ctypes.CDLL(None).mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(1), found
            )
        finally:
            del first
        assert not refused
        return bool(found.raw[0] & 1)


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A folder of small files, none of them in memory."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(FILES):
        (source / f"{number * 7919 % FILES:04d}").write_bytes(
            bytes([number % 251]) * (1 + number * 37 % 20_000)
        )
    if not forget(source):
        pytest.skip("the contents of files cannot be taken out of memory here")
    return source


def library_for(options: Options) -> Native:
    """The compiled part."""
    loaded = native.library()
    assert loaded
    return Native.make(loaded, options, AttributeCopier(attributes=True), 1)


@pytest.mark.usefixtures("compiled")
def test_files_are_requested_before_they_are_wanted(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_TIME_LIMIT", 0)
    target = tmp_path / "target"
    target.mkdir()
    original, copied = os.open(cold, os.O_RDONLY), os.open(target, os.O_RDONLY)
    there: list[tuple[int, bool]] = []
    try:
        compiled = library_for(Options())
        with compiled.entries(original) as read:
            entries = read(FILES + 1)
        names = [name for _, name in entries]

        def report(files: int, size: int) -> None:
            done = len(os.listdir(target))
            if done + 60 < FILES and size:
                until = time.monotonic() + 10
                while not (found := in_memory(cold / names[done + 50])) and time.monotonic() < until:
                    time.sleep(0.01)
                there.append((done, found))

        assert not len(compiled.copy(original, copied, entries, None, True, report))
    finally:
        os.close(original)
        os.close(copied)
    assert len(there) > 10  # the busier the machine, the more files are reported at once
    # The kernel may forget what nobody has used yet; and nobody else has it read.
    assert sum(found for _, found in there) > len(there) * 3 // 4, there
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in cold.iterdir()
    }


@pytest.mark.usefixtures("compiled")
def test_entries_come_in_the_order_of_their_inodes(cold: Path) -> None:
    folder = os.open(cold, os.O_RDONLY)
    try:
        with library_for(Options()).entries(folder) as read:
            first, second, end = read(FILES // 2), read(FILES), read(FILES)
    finally:
        os.close(folder)
    for part in (first, second):
        inodes = [(cold / name).stat().st_ino for _, name in part]
        assert len(inodes) == FILES // 2
        assert inodes == sorted(inodes)
    assert {name for _, name in [*first, *second]} == set(os.listdir(cold))
    assert not len(end)


@trees.both_engines
def test_cold_files_of_every_kind_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in ("one", "two/three"):
        (source / folder).mkdir(parents=True)
        for number in range(150):
            (source / folder / f"f{number}").write_bytes(os.urandom(number * 61))
        (source / folder / "large").write_bytes(os.urandom(3 << 20))
        (source / folder / "whole").write_bytes(os.urandom(1 << 20))
        (source / folder / "empty").touch()
        (source / folder / "link").symlink_to("f7")
        os.link(source / folder / "f8", source / folder / "again")
        os.mkfifo(source / folder / "fifo")
    forget(source)
    result = copy(str(source), str(target), Options())
    assert not result.problems
    assert trees.walk(target) == trees.walk(source)
    forget(source)
    (source / "one/f9").write_bytes(b"changed")
    forget(target)
    assert copy(str(source), str(target), Options()).counts.copied == 1
    assert trees.walk(target) == trees.walk(source)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("verify", ["read", "none"])
def test_a_large_cold_source_is_read_past_memory(tmp_path: Path, verify: Literal["read", "none"]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    block = os.urandom(1 << 20)
    large = source / "large"
    with large.open("wb") as file:
        for number in range(150):
            file.write(bytes([number]) + block)
        file.write(b"and a bit")
    if not forget(source) or in_memory(large, 80 << 20):
        pytest.skip("the contents of files cannot be taken out of memory here")
    descriptor = os.open(large, os.O_RDONLY)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        os.preadv(descriptor, [mmap.mmap(-1, 4096)], 0)
    except OSError:
        pytest.skip("files cannot be read past memory here")
    finally:
        os.close(descriptor)
    assert copy(str(source), str(target), Options(verify=verify)).ok
    assert not any(in_memory(large, place << 20) for place in (10, 50, 80, 100, 145))
    assert trees.walk(target) == trees.walk(source)


@pytest.mark.usefixtures("compiled")
def test_pages_that_are_not_written_back_yet_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    large = source / "large"
    large.write_bytes(os.urandom(140 << 20))
    forget(source)
    with large.open("r+b") as file:
        # These pages are newer than what the device has.
        for place in (3 << 20, 64 << 20, (70 << 20) + 5, (140 << 20) - 7):
            file.seek(place)
            file.write(b"newer!!")
    assert copy(str(source), str(target)).ok
    assert trees.walk(target) == trees.walk(source)
