"""What has changed since the last copy is found, and nothing else is done."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from carme.staging import Options, copy, engine, native, sync, worker_pool
from carme.staging.tree import PARTIAL

from .trees import both_engines, from_and_to, many, walk


@both_engines
def test_only_what_changed_is_copied(place: Path) -> None:
    source, target = from_and_to(place)
    many(source, 4, 10)
    copy(str(source), str(target))
    (source / "d0/f0").write_text("longer than it was before")
    (source / "d1/new").write_text("new")
    (source / "d2/f1").chmod(0o600)
    (source / "d3/sub").mkdir()
    (source / "d3/sub/f").write_text("z")
    os.setxattr(source / "d0/f5", "user.note", b"late")
    (target / "d1/f3").write_text("changed at the destination")
    (target / "d1/extra").write_text("stays")
    result = copy(str(source), str(target))
    assert (result.counts.copied, result.counts.updated) == (4, 2)
    assert (target / "d1/extra").read_text() == "stays"
    (target / "d1/extra").unlink()
    os.utime(target / "d1", ns=(0, (source / "d1").stat().st_mtime_ns))
    assert walk(target) == walk(source)


def wide(memory: Path) -> tuple[Path, Path]:
    """Where a tree of some hundred files is, and where its copy comes."""
    source, target = from_and_to(memory)
    many(source, 30, 20)
    many(source / "d7" / "below", 3, 50)
    (source / "d8" / "link").symlink_to("f1")
    return source, target


def lower(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    """Have less do for a limit to be reached; empty: none."""
    if limit:
        monkeypatch.setattr(native if limit.startswith("_") else engine, limit, value)


@pytest.mark.parametrize("limit", ["", "ENOUGH", "_MAX_ENTRIES", "BATCH"])
def test_what_has_changed_is_found_everywhere(
    memory: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Also where there are so many changes that the workers compare both trees."""
    source, target = wide(memory)
    os.link(source / "d9" / "f1", source / "d10" / "same")
    (source / "d11" / os.fsdecode(b"\xff\n")).write_bytes(b"odd")
    assert copy(str(source), str(target)).ok
    lower(monkeypatch, limit, 7)
    total = sum(len(files) for _, _, files in os.walk(source))

    again = copy(str(source), str(target))
    assert again.ok and (again.counts.copied, again.counts.unchanged) == (0, total)
    assert again.counts.folders == sum(1 for _ in os.walk(source))

    for number in (0, 7, 29):
        (source / f"d{number}" / "f3").write_bytes(b"changed")
        (source / f"d{number}" / "new").write_bytes(b"new")
    (source / "d7" / "below" / "d1" / "f30").write_bytes(b"changed")
    (source / "d12").chmod(0o711)
    (source / "d13" / "f1").chmod(0o711)
    (source / "d14" / "f1").unlink()
    (source / "d14" / "f1").mkdir()
    (target / "d14" / "f1").unlink()
    (target / "d15" / "f2").write_bytes(b"spoilt")
    shutil.rmtree(target / "d16")
    (target / "d17" / "f3").unlink()
    changed = copy(str(source), str(target))
    assert changed.ok and changed.counts.copied == 8 + 20 + 1
    assert walk(target) == walk(source)


@both_engines
@pytest.mark.parametrize("limit", ["", "ENOUGH", "_MAX_ENTRIES", "_ITEMS_SIZE"])
def test_a_second_sync_finds_what_is_gone_wherever_it_is(
    memory: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    source, target = wide(memory)
    assert copy(str(source), str(target)).ok
    lower(monkeypatch, limit, 4096 if limit == "_ITEMS_SIZE" else 7)
    (source / "d0" / "f3").unlink()
    shutil.rmtree(source / "d7" / "below" / "d1")
    (source / "d8" / "link").unlink()
    (source / "d9" / "f3").rename(source / "d9" / "other name")
    (source / "d10" / "f3").write_bytes(b"changed")
    (source / "d10" / "f4").unlink()
    (target / "d11" / f"{PARTIAL}of-nothing").write_bytes(b"left")
    (target / "at the top").mkdir()
    before = walk(target)

    reported: list[object] = []
    dry = sync(str(source), str(target), dry_run=True, notify=reported.append)
    gone = {path for what, path in (pair for pair in reported if isinstance(pair, tuple)) if what == "remove"}
    assert gone == {"d0/f3", "d7/below/d1", "d8/link", "d9/f3", "d10/f4", "at the top"}
    assert dry.ok and dry.counts.removed == 6 and walk(target) == before

    result = sync(str(source), str(target))
    assert result.ok and result.counts.removed == 1 + 51 + 1 + 1 + 1 + 1 and result.counts.copied == 2
    assert walk(target) == walk(source)


@pytest.mark.usefixtures("compiled")
def test_a_sync_with_nothing_to_do_starts_no_worker(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = from_and_to(memory)
    many(source, 5, 20)
    many(source / "d2", 2, 3)
    (source / "d4" / "empty").mkdir()
    assert copy(str(source), str(target)).ok
    before = walk(target)
    monkeypatch.setattr(worker_pool, "WorkerPool", None)
    result = sync(str(source), str(target))
    assert result.ok and (result.counts.unchanged, result.counts.folders) == (106, 9)
    assert walk(target) == before
    (target / "d2" / "d1" / "one too many").touch()
    with pytest.raises(TypeError):
        sync(str(source), str(target))


@pytest.mark.usefixtures("compiled")
def test_a_few_changed_files_need_no_worker(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = from_and_to(memory)
    many(source, 20, 20)
    (source / "link").symlink_to("d0")
    assert copy(str(source), str(target)).ok
    for number in range(0, 20, 2):
        (source / f"d{number}/f3").write_bytes(b"changed")
        (source / f"d{number}/new").write_bytes(b"new")
    monkeypatch.setattr(worker_pool, "WorkerPool", None)
    result = copy(str(source), str(target))
    assert result.ok and not result.resumed
    assert (result.counts.copied, result.counts.unchanged) == (20, 391)
    assert walk(target) == walk(source)
    # A link with another target is a change that needs a worker.
    (source / "link").unlink()
    (source / "link").symlink_to("d1")
    with pytest.raises(TypeError):
        copy(str(source), str(target))
    monkeypatch.undo()
    assert copy(str(source), str(target)).ok
    assert walk(target) == walk(source)


@both_engines
def test_nodes_begin_at_different_places(memory: Path) -> None:
    source = memory / "source"
    many(source, 1, 40)
    with (source / "large").open("wb") as file:
        file.write(os.urandom(1 << 20) * 130)
    begun: set[str] = set()
    for turn in (0.0, 0.3, 0.6, 0.99):
        target = memory / f"target{turn}"
        assert copy(str(source), str(target), Options(workers=1, turn=turn)).ok
        assert walk(target) == walk(source)
        # Files were made in the order in which they were read.
        begun.add(min((target / "d0").iterdir(), key=lambda path: path.stat().st_ino).name)
        shutil.rmtree(target)
    assert len(begun) == 4


def test_contents_are_compared_on_request(tmp_path: Path) -> None:
    source, target = from_and_to(tmp_path)
    many(source, 1, 3)
    copy(str(source), str(target))
    status = (target / "d0/f1").stat()
    with open(target / "d0/f1", "r+b") as file:
        file.write(b"!")
    os.utime(target / "d0/f1", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert copy(str(source), str(target)).counts.copied == 0
    assert copy(str(source), str(target), Options(contents=True)).counts.copied == 1
    assert walk(target) == walk(source)
