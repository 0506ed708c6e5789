"""Copies that are kept for the next job, and who tidies them."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import simulated_quota

from carme.errors import CarmeError
from carme.jobs import Stage
from carme.staging import janitor as tidying
from carme.staging.cache import Cache
from carme.staging.janitor import Janitor
from patience import HANG

from .trees import SOURCE, many, walk

root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
NOBODY = 65534


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory that other users can enter."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


def stage(source: Path, version: str = "") -> Stage:
    return Stage(source=str(source), version=version)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return Cache(str(folder))


def hold(cache: Cache, source: Path, version: str = "", job: str = "1") -> tuple[Path, int, bool]:
    path, held, was_there = cache.hold(stage(source, version).key, str(source), version, job=job)
    return Path(path), held, was_there


def test_a_second_job_finds_the_copy_until_the_source_changes(tmp_path: Path, cache: Cache) -> None:
    many(tmp_path / "data", 2, 3)
    path, held, was_there = hold(cache, tmp_path / "data")
    assert not was_there and walk(path) == walk(tmp_path / "data")
    os.close(held)
    again, held, was_there = hold(cache, tmp_path / "data")
    assert was_there and again == path
    os.close(held)
    # Only what has changed is copied, and what is gone goes.
    (tmp_path / "data/d0/f0").write_text("changed")
    (tmp_path / "data/d1/f1").unlink()
    path, held, was_there = hold(cache, tmp_path / "data")
    assert not was_there and walk(path) == walk(tmp_path / "data")
    os.close(held)


def test_a_single_file_is_cached_under_its_name(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "data.sqsh").write_bytes(b"image")
    path, held, _ = hold(cache, tmp_path / "data.sqsh")
    assert path.name == "data.sqsh" and path.read_bytes() == b"image"
    os.close(held)
    assert hold(cache, tmp_path / "data.sqsh")[2]


def test_a_known_version_is_not_compared_with_its_source_again(tmp_path: Path, cache: Cache) -> None:
    many(tmp_path / "data", 1, 2)
    _, held, _ = hold(cache, tmp_path / "data", "blake3:00")
    os.close(held)
    (tmp_path / "data/d0/f0").write_text("must not happen")
    path, held, was_there = hold(cache, tmp_path / "data", "blake3:00")
    assert was_there and (path / "d0/f0").read_text() != "must not happen"
    os.close(held)
    assert not hold(cache, tmp_path / "data", "blake3:01")[2]


def test_what_is_in_use_is_neither_changed_nor_removed(tmp_path: Path, cache: Cache) -> None:
    many(tmp_path / "data", 1, 2)
    path, held, _ = hold(cache, tmp_path / "data")
    before = walk(path)
    (tmp_path / "data/d0/f0").write_text("changed")
    newer, also_held, was_there = hold(cache, tmp_path / "data", job="2")
    assert newer != path and not was_there
    assert walk(path) == before and walk(newer) == walk(tmp_path / "data")
    key = stage(tmp_path / "data").key
    assert not cache.remove(key) and path.exists()
    os.close(held)
    assert cache.remove(key) and not path.exists()
    assert newer.exists()
    os.close(also_held)


def test_the_least_recently_used_makes_room(tmp_path: Path, cache: Cache) -> None:
    paths = []
    for number in range(3):
        source = tmp_path / f"data{number}"
        source.mkdir()
        (source / "file").write_bytes(os.urandom(1 << 20))
        path, held, _ = hold(cache, source)
        os.utime(held, (1000 + number, 1000 + number))
        os.close(held)
        paths.append(path)
    first, held, was_there = hold(cache, tmp_path / "data0")  # used now
    assert was_there
    limited = Cache(cache.folder, limit=int(3.5 * (1 << 20)))
    (tmp_path / "new").mkdir()
    (tmp_path / "new/file").write_bytes(os.urandom(1 << 20))
    os.close(hold(limited, tmp_path / "new")[1])
    assert [path.exists() for path in paths] == [True, False, True] and first.exists()
    small = Cache(cache.folder, limit=1 << 19)
    (tmp_path / "more").mkdir()
    (tmp_path / "more/file").write_bytes(os.urandom(1 << 20))
    with pytest.raises(CarmeError, match="more than copies may take here"):
        hold(small, tmp_path / "more")
    os.close(held)


def test_what_cannot_be_copied_is_not_taken_for_complete(memory: Path) -> None:
    memory.chmod(0o755)
    many(memory / "data", 1, 2)
    (memory / "data/d0/f0").chmod(0)
    (memory / "cache").mkdir(mode=0o700)
    # Root may read everything.
    unprivileged = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    if unprivileged:
        os.chown(memory / "cache", 65534, 65534)
    program = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from carme.staging.cache import Cache; "
        "cache = Cache(sys.argv[1]); print(cache.hold(sys.argv[2], sys.argv[3])[2], len(cache.known()))"
    )
    words = [memory / "cache", stage(memory / "data").key, memory / "data"]
    # The system's Python: the tests' own may be where only root can read.
    command = ["/usr/bin/python3", "-I", "-c", program, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, **unprivileged)
    assert ended.returncode and "d0/f0: you have no permission" in ended.stderr
    (memory / "data/d0/f0").chmod(0o644)
    # The cache had no copy: what the first attempt left does not count as one.
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True, **unprivileged).stdout
        == "False 1\n"
    )


def test_processes_that_request_the_same_data_at_once_copy_it_once(tmp_path: Path, cache: Cache) -> None:
    many(tmp_path / "data", 3, 30)
    program = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from carme.staging.cache import Cache; "
        "print(Cache(sys.argv[1]).hold(sys.argv[2], sys.argv[3])[2])"
    )
    key = stage(tmp_path / "data").key
    words = [sys.executable, "-c", program, cache.folder, key, str(tmp_path / "data")]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sorted(each.communicate(timeout=HANG)[0].strip() for each in running) == ["False", *["True"] * 3]
    assert walk(Path(cache.folder) / key / "data") == walk(tmp_path / "data")


def test_somebody_elses_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(CarmeError, match="not a private folder of yours"):
        Cache(str(tmp_path / "open"))
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    with pytest.raises(CarmeError, match="not a private folder of yours"):
        Cache(str(tmp_path / "link"))
    with pytest.raises(CarmeError, match="no place for copies"):
        Cache(str(tmp_path / "nowhere"))


# The janitor


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """A node's folders for user nobody, as the prolog makes them."""
    top = tmp_path / "node"
    for path in (top, top / "jobs", top / "users"):
        path.mkdir(mode=0o711)
    for path in (top / "jobs/7", top / "users" / str(NOBODY)):
        path.mkdir(mode=0o700)
        os.chown(path, NOBODY, pwd.getpwuid(NOBODY).pw_gid)
    yield top


def as_nobody(*words: str) -> None:
    subprocess.run(words, check=True, user=NOBODY, group=pwd.getpwuid(NOBODY).pw_gid, extra_groups=[])


def results(node: Path, to: Path, log: Path) -> None:
    """What a job with results leaves."""
    about = json.dumps({"to": str(to), "log": str(log)})
    write = f"mkdir results && echo 0.93 >results/accuracy && echo '{about}' >results.json"
    as_nobody("sh", "-c", f"cd {node}/jobs/7 && {write}")


@root
def test_results_are_taken_out_and_the_folder_goes(node: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, -1)
    as_nobody("touch", f"{home}/output.log")
    results(node, home / "deep/results", home / "output.log")
    assert Janitor(node, 0).after("7", here=True) == 0
    assert (home / "deep/results/accuracy").read_text() == "0.93\n"
    assert (home / "deep/results/accuracy").stat().st_uid == NOBODY
    assert "Results: 1 files" in (home / "output.log").read_text()
    assert not (node / "jobs/7").exists()
    assert Janitor(node, 0).after("7", here=True) == 0  # nothing is there any more


@root
def test_results_that_cannot_go_out_stay(node: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o755)
    results(node, tmp_path / "closed/results", tmp_path / "none")
    assert Janitor(node, 0).after("7", here=True) == 1
    assert (node / "jobs/7/results/accuracy").exists()
    os.chown(tmp_path / "closed", NOBODY, -1)
    assert Janitor(node, 0).after("7", here=True) == 0
    assert (tmp_path / "closed/results/accuracy").exists() and not (node / "jobs/7").exists()


@root
def test_what_a_deleted_account_left_goes_too(node: Path) -> None:
    gone = next(uid for uid in range(54_000, 65_000) if not _is_known(uid))
    job, copy = node / "jobs/9", node / f"users/{gone}"
    for folder in (job, copy):
        folder.mkdir(mode=0o700)
        (folder / "left").touch()
        os.chown(folder, gone, -1)
    janitor = Janitor(node, 0)
    assert janitor.after("9", here=True) == 0 and not job.exists()
    assert janitor.trim() == [] and not janitor.failed


def _is_known(uid: int) -> bool:
    try:
        return bool(pwd.getpwuid(uid))
    except KeyError:
        return False


@root
def test_planted_symlinks_lead_root_nowhere(node: Path, tmp_path: Path) -> None:
    """Whatever a job's owner puts there, root neither reads nor removes files of root."""
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "key").write_text("secret")
    taken = tmp_path / "taken"
    taken.mkdir()
    os.chown(taken, NOBODY, -1)
    job = node / "jobs/7"
    results(node, taken, secret / "key")
    as_nobody("ln", "-s", f"{secret}/key", f"{job}/results/stolen")
    as_nobody("ln", "-s", str(secret), f"{job}/results/folder")
    as_nobody("ln", "-s", str(secret), f"{job}/more")
    assert Janitor(node, 0).after("7", here=True) == 0
    assert sorted(os.listdir(secret)) == ["key"] and (secret / "key").read_text() == "secret"
    assert (taken / "stolen").is_symlink() and (taken / "folder").is_symlink()
    # The folder of results itself as a symlink to what is root's.
    job.mkdir(mode=0o700)
    os.chown(job, NOBODY, -1)
    results(node, taken / "again", taken / "log")
    as_nobody("sh", "-c", f"rm -r {job}/results; ln -s {secret} {job}/results")
    assert Janitor(node, 0).after("7", here=True) == 1
    assert not (taken / "again/key").exists() and (secret / "key").exists()


@root
def test_leftovers_of_jobs_that_are_over_go_and_running_ones_stay(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node / "jobs/8").mkdir(mode=0o700)
    os.chown(node / "jobs/8", NOBODY, -1)
    as_nobody("touch", str(node / "jobs/7/left"), str(node / "jobs/8/work"))
    reported: list[tuple[str, ...]] = []

    def ask(*words: str) -> str:
        reported.append(words)
        if words[0] == "squeue":
            return "8\n"
        return "NodeName=n1 AvailableFeatures=big,carme_1000_000000000000000000000000 ActiveFeatures=big\n"

    # At the outermost edge: Slurm's programs.
    monkeypatch.setattr(tidying, "ask", ask)
    assert Janitor(node, 0).tidy() == 0
    assert not (node / "jobs/7").exists() and (node / "jobs/8/work").exists()
    # The node's own features stay, that of a copy that is gone does not.
    assert reported[-1][-2:] == ("AvailableFeatures=big", "ActiveFeatures=big")

    def begins(*words: str) -> str:
        # A job that begins while Slurm is queried.
        if words[0] == "squeue":
            (node / "jobs/9").mkdir(mode=0o700)
            os.chown(node / "jobs/9", NOBODY, -1)
        return "8\n" if words[0] == "squeue" else ""

    monkeypatch.setattr(tidying, "ask", begins)
    assert Janitor(node, 0).tidy() == 0
    assert (node / "jobs/9").exists()

    def away(*words: str) -> str:
        raise CarmeError("squeue cannot be queried: it is away.")

    monkeypatch.setattr(tidying, "ask", away)
    with pytest.raises(CarmeError):
        Janitor(node, 0).tidy()
    assert (node / "jobs/8/work").exists()


@root
def test_the_limit_of_a_node_is_over_all_users(node: Path, tmp_path: Path) -> None:
    user_folder = node / "users/1"
    user_folder.mkdir(mode=0o700)
    os.chown(user_folder, 1, 1)
    keys = {}
    for user, used in ((NOBODY, 1000), (1, 2000)):
        source = tmp_path / f"of{user}"
        source.mkdir()
        (source / "file").write_bytes(os.urandom(1 << 20))
        os.chmod(source, 0o755)
        keys[user] = key = stage(source).key
        program = (
            f"import os, sys; sys.path.insert(0, {str(SOURCE)!r}); from carme.staging.cache import Cache; "
            f"held = Cache({str(node / 'users' / str(user))!r}).hold({key!r}, {str(source)!r})[1]; "
            f"os.utime(held, ({used}, {used}))"
        )
        subprocess.run(
            ["/usr/bin/python3", "-c", program],
            check=True,
            user=user,
            group=pwd.getpwuid(user).pw_gid,
            extra_groups=[],
        )
    janitor = Janitor(node, 3 << 19)
    assert janitor.features() == sorted(f"carme_{user}_{key}" for user, key in keys.items())
    assert janitor.trim() == [f"{NOBODY}/{keys[NOBODY]}"]
    assert janitor.features() == [f"carme_1_{keys[1]}"]
    assert janitor.trim() == []


@root
def test_one_users_folder_does_not_keep_others_from_being_tidied(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At the outermost edge: Slurm's programs.
    monkeypatch.setattr(tidying, "ask", lambda *words: "")
    for number in (6, 8):
        (node / f"jobs/{number}").mkdir(mode=0o700)
        os.chown(node / f"jobs/{number}", NOBODY, -1)
    os.chown(node / "jobs/6", 54321, -1)  # no such user any more
    as_nobody("chmod", "0755", f"{node}/users/{NOBODY}")
    user_folder = node / "users/1"
    user_folder.mkdir(mode=0o700)
    os.chown(user_folder, 1, 1)
    key = "0" * 24
    copy = user_folder / key
    forge = f"mkdir -p {copy}/data; echo x >{copy}/data/x; touch {copy}/lock"
    forge += f"; echo '{{\"bytes\": 99999999999999}}' >{copy}/about.json"
    subprocess.run(["sh", "-c", forge], check=True, user=1, group=1, extra_groups=[])
    janitor = Janitor(node, 1 << 20)
    assert janitor.tidy() == 1  # a failure to report
    assert not os.listdir(node / "jobs")
    # A forged record about a copy removes nothing: the copy takes 4 KiB.
    assert (copy / "data/x").exists()


def test_a_quota_leaves_less_than_the_disk(tmp_path: Path) -> None:
    """The kernel's answer is simulated (tests/simulated_quota.c): 1000 KiB at most, 900 of them used."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/data").write_bytes(os.urandom(200 << 10))
    (tmp_path / "cache").mkdir(0o700)
    program = """
import sys
from carme.errors import CarmeError
from carme.staging.cache import Cache
try:
    Cache(sys.argv[1]).hold("0" * 24, sys.argv[2])
except CarmeError as error:
    print(error)
"""
    arguments = [sys.executable, "-c", program, str(tmp_path / "cache"), str(tmp_path / "source")]
    environment = {
        "LD_PRELOAD": str(simulated_quota.build(tmp_path)),
        "SIMULATED_QUOTA": f"{os.getuid()} 1000 0 {900 << 10} 0 0 7",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        arguments, env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (
        "There is not enough space for 200.0 KiB in" in done.stdout
        and "you have 100.0 KiB free" in done.stdout
    )
    # Nothing was copied until it was too late.
    assert not list((tmp_path / "cache").glob("*/data"))
