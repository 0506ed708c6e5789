"""A copy by several workers that know of each other only by files."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.staging import Options, spread
from carme.staging.spread import Spread, work
from carme.staging.tree import PARTIAL, STATE
from patience import HANG

from .trees import carme_data, command, from_and_to, many, walk


def tree(source: Path) -> None:
    """Many small files, large ones, a flat folder, and what must not be taken apart."""
    many(source / "small", 20, 30)
    many(source / "flat", 1, 3000, size=16)
    for number in range(2):
        (source / f"large{number}").write_bytes(random.Random(number).randbytes(1 << 20) * 65)
    os.link(source / "large0", source / "small" / "d3" / "again")
    os.link(source / "small" / "d1" / "f1", source / "flat" / "d0" / "again")
    (source / "small" / "d2" / "link").symlink_to("../d1")
    (source / "flat" / os.fsdecode(b"\xff\n")).write_bytes(b"odd")
    (source / "small" / "d5").chmod(0o511)


def worker(plan: Spread, name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("work", str(plan.folder)),
        stdout=subprocess.DEVNULL,
        env={**os.environ, "SLURM_ARRAY_TASK_ID": name},
    )


def tidy(target: Path) -> bool:
    return not any(
        name.startswith((PARTIAL, STATE)) for _, folders, files in os.walk(target) for name in folders + files
    )


def test_several_workers_make_one_copy(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = from_and_to(memory)
    tree(source)
    monkeypatch.setattr(spread, "NAMES", 700)
    plan = Spread(str(source), str(target), Options(workers=1))
    assert plan.plan(3) > 10
    workers = [worker(plan, str(number)) for number in range(3)]
    assert [each.wait(HANG) for each in workers] == [0, 0, 0]
    counts, hosts = plan.progress()
    assert counts.copied >= 20 * 30 + 3000 + 2 and len(hosts) == 1
    result = plan.finish()
    assert result.ok and result.hosts == hosts
    assert walk(target) == walk(source) and tidy(target)


def test_killed_workers_leave_nothing_undone(memory: Path) -> None:
    source, target = from_and_to(memory)
    tree(source)
    chance = random.Random(3)
    for _ in range(4):
        plan = Spread(str(source), str(target), Options(workers=1))
        plan.plan(2)
        workers = [worker(plan, str(number)) for number in range(2)]
        time.sleep(chance.uniform(0.1, 0.6))
        for each in workers:
            each.kill()
            each.wait()
    result = Spread(str(source), str(target), Options(workers=1)).finish()
    assert result.ok and walk(target) == walk(source) and tidy(target)


def test_what_the_workers_cannot_copy_is_reported_at_the_end(memory: Path) -> None:
    source, target = from_and_to(memory)
    many(source, 5, 3)
    plan = Spread(str(source), str(target), Options())
    plan.plan(2)
    # Somebody has put something into the way, and a symlink that leads elsewhere.
    (target / "d1").write_text("in the way")
    elsewhere = memory / "elsewhere"
    elsewhere.mkdir()
    (target / "d2").symlink_to(elsewhere)
    assert work(str(plan.folder)).ok
    assert not os.listdir(elsewhere)
    result = plan.finish()
    assert {problem.path for problem in result.problems} == {"d1", "d2"} and not os.listdir(elsewhere)
    # The plan stays as long as not all is done.
    (target / "d1").unlink()
    (target / "d2").unlink()
    assert Spread(str(source), str(target), Options()).finish().ok
    assert walk(target) == walk(source) and tidy(target)


@pytest.mark.parametrize("fault", ["", "spoils", "fails"])
def test_what_dsync_copies_is_verified_and_repaired(
    memory: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Commands stand in for srun and dsync, which needs MPI; what dsync damages is found and repaired."""
    source, target, programs = memory / "source", memory / "target", memory / "bin"
    many(source, 3, 5)
    programs.mkdir()
    (programs / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    copies = 'cp -a -T "$1" "$2"'
    spoils = 'stamp=$(stat -c %y "$2/d1/f1"); printf X | dd of="$2/d1/f1" conv=notrunc status=none; '
    spoils += 'touch -d "$stamp" "$2/d1/f1"'
    ending = {"": "", "spoils": spoils, "fails": "exit 3"}[fault]
    (programs / "dsync").write_text(f"#!/bin/sh\n{copies}\n{ending}\n")
    for name in ("srun", "dsync"):
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    plan = Spread(str(source), str(target), Options())
    plan.plan(2, dsync=True)
    ended = carme_data("work", str(plan.folder))
    assert ended.returncode == (1 if fault == "fails" else 0), ended.stderr
    assert fault != "fails" or "exit code 3" in ended.stderr
    result = Spread(str(source), str(target), Options()).finish()
    assert result.ok and result.engine == "dsync" and result.counts.copied == (fault == "spoils")
    assert walk(target) == walk(source) and tidy(target)


def test_limits_are_shared(memory: Path) -> None:
    many(memory / "source", 1, 1)
    plan = Spread(str(memory / "source"), str(memory / "target"), Options(bandwidth=1000, operations=10))
    plan.plan(4)
    written = (plan.folder / "plan.json").read_text()
    assert '"bandwidth": 250' in written and '"operations": 2' in written


def test_a_copy_that_cannot_be_spread_is_refused(memory: Path) -> None:
    many(memory / "source", 1, 1)
    (memory / "file").write_text("one")
    with pytest.raises(InvalidRequest, match="one host"):
        Spread(str(memory / "file"), str(memory / "target"), Options())
    with pytest.raises(NotFound, match="no plan"):
        work(str(memory / "source"))
    (memory / "target").mkdir()
    (memory / "target" / spread.FOLDER).symlink_to(memory / "source")
    with pytest.raises(CarmeError, match="not a folder of yours"):
        Spread(str(memory / "source"), str(memory / "target"), Options())
    ended = carme_data("copy", str(memory / "source"), str(memory / "target"), "--time", "1h")
    assert ended.returncode == 1 and "--nodes" in ended.stderr
