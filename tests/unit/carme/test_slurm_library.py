"""One contract for both ways to read Slurm: its commands, and pyslurm in a child.

Without pyslurm both answer what real ones answered at the same moment of a Slurm 24.11 with jobs of all kinds
(slurm_24_11.json). With the path of a wheel in CARME_PYSLURM_WHEEL the real library is tried as well, and
asks, like the commands, the Slurm of this host.
"""

import asyncio
import copy
import importlib.util
import json
import os
import pwd
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from carme.cli import main
from carme.config import Settings
from carme.errors import SlurmError
from carme.jobs import Job, JobState
from carme.slurm import SlurmCommands
from carme.slurm.library import SlurmLibrary, records, worker
from carme.slurm.library import child as child_module
from carme.slurm.selection import choose, opened

HERE = Path(__file__).parent
RECORDED = HERE / "slurm_24_11.json"
WHEEL = os.environ.get("CARME_PYSLURM_WHEEL", "")
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_MUNGE = (
    "squeue: error: If munged is up, restart with --num-threads=10\n"
    'squeue: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file\n'
    "slurm_load_jobs error: Protocol authentication error"
)


@dataclass
class Host:
    """A host with Slurm and pyslurm: the programs on PATH, and a Python that has the library."""

    folder: Path
    python: str

    def mode(self, text: str) -> None:
        """How the library is from now on."""
        (self.folder / "mode").write_text(text)

    def fail(self, text: str) -> None:
        """What the programs complain about from now on."""
        (self.folder / "fails").write_text(text)

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def settings(self, adapter: str) -> Settings:
        slurm = {"cluster": "try", "adapter": adapter}
        return Settings.model_validate({"site": {"url": "https://carme.example.org"}, "slurm": slurm})


def python_with(folder: Path, library: Path) -> str:
    """An interpreter that finds pyslurm in a folder although it is isolated, as the worker's is."""
    program = folder / "python"
    program.write_text(
        f"""#!/bin/sh
exec {sys.executable} -I -c 'import runpy, sys
sys.path.insert(0, "{library}")
sys.argv[:] = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""
    )
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The recorded one."""
    (tmp_path / "slurm_24_11.json").symlink_to(RECORDED)
    (tmp_path / "pyslurm.py").write_text((HERE / "recorded_pyslurm.py").read_text())
    for name in ("squeue", "scontrol", "sinfo"):
        (tmp_path / name).write_text(f"#!{sys.executable} -IS\n{(HERE / 'recorded_commands.py').read_text()}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    host = Host(tmp_path, python_with(tmp_path, tmp_path))
    host.mode("")
    return host


@pytest_asyncio.fixture
async def library(host: Host) -> AsyncIterator[SlurmLibrary]:
    slurm = SlurmLibrary(cluster="try", interpreter=host.python)
    yield slurm
    await slurm.close()


@pytest_asyncio.fixture(params=["commands", "pyslurm"])
async def slurm(host: Host, library: SlurmLibrary, request: pytest.FixtureRequest) -> SlurmCommands:
    """The recorded Slurm, by either adapter."""
    return library if request.param == "pyslurm" else SlurmCommands(cluster="try")


def by_id(jobs: list[Job]) -> dict[int, Job]:
    return {job.id: job for job in jobs}


# What both report


async def test_states_and_reasons_of_jobs_are_read(slurm: SlurmCommands) -> None:
    jobs = by_id(await slurm.queue())
    assert {job.state for job in jobs.values()} == {
        *(JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING, JobState.COMPLETED),
        *(JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT, JobState.NODE_FAIL, JobState.DEADLINE),
    }
    assert jobs[49].state is JobState.SUSPENDED and (jobs[49].seconds_left or 0) > 0
    assert jobs[1].reason == "NonZeroExitCode" and jobs[3].reason == "RaisedSignal:9(Killed)"
    assert any(job.reason == "ReqNodeNotAvail, May be reserved for other job" for job in jobs.values())
    assert (jobs[10].nodes, jobs[10].node_list, jobs[10].state) == (2, "n[1-2]", JobState.NODE_FAIL)
    assert (jobs[85].reservation, jobs[85].reason, jobs[85].minutes_limit) == ("night", "Reservation", 30)


async def test_gpus_are_counted_whatever_option_requested_them(slurm: SlurmCommands) -> None:
    jobs = by_id(await slurm.queue())
    assert {number: (jobs[number].gpus, jobs[number].gpu_type) for number in (9, 10, 11, 12, 36, 37)} == {
        9: (1, None),  # --gres=gpu:1
        10: (2, "a100"),  # --gres=gpu:a100:1 on two nodes
        11: (2, None),  # --gpus=2
        12: (2, None),  # --gpus-per-task=1 for two tasks
        36: (1, None),  # --gpus-per-socket=1
        37: (3, "a100"),  # --tres-per-task=gres/gpu:a100=1 for three tasks
    }
    assert jobs[14].gpus == 0  # a shard
    assert jobs[18].whole_nodes and not jobs[9].whole_nodes
    assert (jobs[10].cpus, jobs[10].memory_mb, jobs[13].memory_mb) == (4, 200, 100)


async def test_arrays_and_heterogeneous_jobs_are_read(slurm: SlurmCommands) -> None:
    jobs = by_id(await slurm.queue())
    assert (jobs[19].array_id, jobs[19].task, jobs[19].tasks) == (19, None, "2-3%1")
    assert (jobs[21].array_id, jobs[21].task) == (19, 1)
    assert (jobs[42].array_id, jobs[42].tasks) == (42, "0,3,6,9%2")
    assert {jobs[26].array_id, jobs[27].array_id} == {None}  # the parts of one job, each with its number
    assert (jobs[26].cpus, jobs[27].cpus) == (1, 2)


async def test_any_job_name_is_read(slurm: SlurmCommands) -> None:
    jobs = by_id(await slurm.queue())
    assert jobs[5].name == "evil\n9|5e|x"
    assert jobs[15].name == 'ünï "code" ; $(x) %j'
    assert jobs[16].name == "\N{REPLACEMENT CHARACTER}" * 2  # bytes that are not text
    assert jobs[18].user == "m_smith"
    assert (jobs[9].kind, jobs[9].image, jobs[9].name) == ("session", "torch", "session-s1")


async def test_nodes_and_partitions_are_read(slurm: SlurmCommands) -> None:
    cluster = await slurm.cluster()
    nodes = {node.name: node for node in cluster.nodes}
    assert (nodes["n4"].gpus, nodes["n4"].gpus_used) == ({"a100": 2, "v100": 2}, {"v100": 1})
    assert (nodes["n4"].state, nodes["n4"].available) == ("MIXED+DRAIN", False)
    assert (nodes["n4"].reason, nodes["n1"].reason) == ("disk (sda) fails = bad", "only a reason")
    assert (nodes["n2"].state, nodes["n2"].available) == ("DOWN", False)
    assert nodes["n1"].features == ["big", "a100"]
    partitions = {partition.name: partition for partition in cluster.partitions}
    assert partitions["gpu"].default and partitions["gpu"].node_names == ["n1", "n2", "n3", "n4"]
    assert (partitions["gpu"].max_minutes, partitions["long"].max_minutes) == (None, 2880)
    assert (partitions["low"].accounts, partitions["low"].suspends) == (["carme", "root"], True)
    assert (partitions["high"].groups, partitions["long"].refused_accounts) == (["root", "daemon"], ["poor"])
    assert (partitions["off"].state, partitions["hidden"].max_minutes) == ("DOWN", 30)


async def test_reservations_are_read(slurm: SlurmCommands) -> None:
    found = {reservation.name: reservation for reservation in await slurm.reservations()}
    assert (found["night"].users, found["night"].node_names, found["night"].gpus) == (
        ["ada", "bob"],
        ["n3"],
        2,
    )
    assert (found["lab"].accounts, found["lab"].cpus) == (["carme"], 16)
    assert found["maint"].maintenance and len(found["maint"].node_names) == 5
    assert found["night"].start > datetime(2026, 1, 1, tzinfo=UTC)


async def snapshot(slurm: SlurmCommands) -> dict[str, Any]:
    """Everything that an adapter reads, field by field."""
    cluster = await slurm.cluster()
    return {
        "jobs": [job.model_dump() for job in sorted(await slurm.queue(), key=lambda job: job.id)],
        "nodes": [dict(node) for node in cluster.nodes],
        "partitions": [partition.model_dump() for partition in cluster.partitions],
        "reservations": [reservation.model_dump() for reservation in await slurm.reservations()],
    }


async def test_both_adapters_read_the_same(host: Host, library: SlurmLibrary) -> None:
    commands = await snapshot(SlurmCommands(cluster="try"))
    requested = host.calls()
    assert await snapshot(library) == commands
    assert host.calls() == requested  # none of it from the programs


@pytest.fixture
def python_of_wheel(tmp_path: Path) -> str:
    """An interpreter that has the wheel."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path / "library"), WHEEL], check=True)
    return python_with(tmp_path, tmp_path / "library")


if WHEEL:

    async def test_the_real_library_reads_the_same_as_the_commands(
        tmp_path: Path, python_of_wheel: str
    ) -> None:
        python = python_of_wheel
        commands, library = SlurmCommands(cluster="try"), SlurmLibrary(cluster="try", interpreter=python)
        settings = Host(tmp_path, python).settings("pyslurm")
        choice = await choose(settings, python)
        assert choice.adapter == "pyslurm", choice.sentence
        until = time.monotonic() + 120
        while True:  # a busy Slurm changes between two polls
            first, answer, second = (
                await snapshot(commands),
                await snapshot(library),
                await snapshot(commands),
            )
            if first == second or time.monotonic() > until:
                break
        await library.close()
        assert answer == second


async def test_the_pulse_is_the_same_until_something_happens(host: Host, library: SlurmLibrary) -> None:
    first = await library.pulse()
    assert await library.pulse() == first
    text = RECORDED.read_text()
    changed = host.folder / "slurm_24_11.json"
    changed.unlink()
    changed.write_text(text.replace('"run_time": ', '"run_time": 1'))
    await library.close()  # which reads it anew
    assert await library.pulse() == first
    changed.write_text(text.replace('"job_state": "SUSPENDED"', '"job_state": "RUNNING"'))
    await library.close()
    assert await library.pulse() != first


class Recorded:
    """A pyslurm whose jobs a test changes."""

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.spec_from_file_location("recorded_pyslurm", folder / "pyslurm.py")
        assert spec and spec.loader
        library = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(library)
        self.jobs: dict[int, dict[str, Any]] = library.job().get()
        self.Jobs = library.Jobs
        self.RPCError = library.RPCError

    def job(self) -> Any:
        return SimpleNamespace(get=lambda: copy.deepcopy(self.jobs))


@pytest.mark.parametrize("seed", range(5))
async def test_what_changed_alone_gives_the_same_jobs_as_all(
    host: Host, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", pwd.getpwuid)  # which that stand-in replaces
    draw, pyslurm = random.Random(seed), Recorded(host.folder)
    slurm, everything, reads = SlurmLibrary(), dict(pyslurm.jobs), []

    async def ask(question: str, **about: str) -> Any:
        if draw.random() < 0.2:
            worker._sent.update(serial="", hashes={})  # another child
        answer = worker.answer(pyslurm, question, about)["answer"]
        reads.append(len(answer["changed"]))
        return json.loads(json.dumps(answer))

    slurm._library.ask = ask
    for _ in range(15):
        for number in draw.sample(sorted(everything), k=8):
            job = copy.deepcopy(everything[number])
            job |= {
                "job_state": draw.choice(("PENDING", "RUNNING", "SUSPENDED")),
                "run_time": draw.randrange(99),
            }
            job |= {"name": draw.choice(("a", "b\n9"))}
            pyslurm.jobs[number] = job
        for number in draw.sample(sorted(pyslurm.jobs), k=3):
            del pyslurm.jobs[number]
        assert await slurm.queue() == records.queue(json.loads(json.dumps(worker.jobs(pyslurm))))
    assert min(reads) <= 11 < max(reads)


# When something is wrong


@pytest.mark.parametrize(("mode", "message"), [("away", AWAY), ("unauthenticated", NO_MUNGE)])
async def test_slurm_away_is_reported_and_ends(
    host: Host, slurm: SlurmCommands, mode: str, message: str
) -> None:
    host.mode(mode)
    host.fail(message)
    for question in (slurm.pulse, slurm.queue, slurm.cluster, slurm.reservations):
        with pytest.raises(SlurmError, match=r"^Slurm does not answer: ") as caught:
            await question()
        assert caught.value.code == "slurm-away"
        assert caught.value.remedy.startswith("Running jobs go on")
    host.mode("")
    (host.folder / "fails").unlink()
    assert await slurm.queue()


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("dies", "pyslurm ended: python: fatal: Unable to process configuration file."),
        ("ends", "pyslurm ended: python: fatal: prolog of the end."),
        ("killed", "pyslurm ended: killed by signal 15."),
        ("warned", "pyslurm ended: python: error: a warning of before; killed by signal 15."),
        ("unreadable", "pyslurm cannot read Slurm's answer: UnicodeDecodeError: "),
    ],
)
async def test_a_library_that_fails_leaves_the_commands(
    host: Host,
    library: SlurmLibrary,
    mode: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = await snapshot(SlurmCommands(cluster="try"))
    host.mode(mode)
    assert await snapshot(library) == known
    (record,) = caplog.records  # one sentence, however often it is called
    assert record.getMessage().startswith(reason)
    assert record.getMessage().endswith(" Slurm's commands are used instead for 60 seconds.")
    # After a while it is tried again.
    host.mode("")
    monkeypatch.setattr(library, "_resting_until", 0.0)
    requested = host.calls()
    assert await snapshot(library) == known and host.calls() == requested


async def test_a_library_that_hangs_holds_nobody_up(
    host: Host, library: SlurmLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.mode("hangs")
    waiting = asyncio.create_task(library.queue())
    await asyncio.sleep(0)  # the loop goes on meanwhile
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    monkeypatch.setattr(child_module, "TIMEOUT", 0.5)
    with pytest.raises(SlurmError, match=r"pyslurm had no answer after") as caught:
        await library.queue()
    assert caught.value.code == "slurm-away"
    monkeypatch.undo()
    host.mode("")
    library_again = library  # with another child: the late answer to the first question is nobody's
    assert await library_again._ask("reservations", len) == 3


async def test_a_child_process_is_replaced_after_its_number_of_questions(
    host: Host, library: SlurmLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "QUESTIONS_PER_CHILD", 1)
    answers = await asyncio.gather(library.queue(), library.reservations(), library.pulse())
    assert (len(answers[1]), len(answers[2])) == (3, 64)
    assert library._library._process is None


# Which one it is


@pytest.mark.parametrize(
    ("wanted", "mode", "library", "sentence"),
    [
        ("auto", "", True, "Slurm is read through pyslurm, which matches this host's Slurm."),
        ("pyslurm", "", True, "Slurm is read through pyslurm, which matches this host's Slurm."),
        ("commands", "", False, "Slurm is read through its commands, as slurm.adapter says."),
        (
            *("auto", "version 25.11.2", False),
            "Slurm is read through its commands: pyslurm is for Slurm 25.11, but this host has Slurm 24.11.",
        ),
        (
            *("pyslurm", "dies", False),
            "Slurm is read through its commands: pyslurm cannot be loaded "
            "(python: fatal: Unable to process configuration file).",
        ),
    ],
)
async def test_the_adapter_follows_the_setting_and_the_library(
    host: Host,
    wanted: str,
    mode: str,
    library: bool,
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host.mode(mode)
    choice = await choose(host.settings(wanted), host.python)
    assert (choice.adapter == "pyslurm", choice.sentence) == (library, sentence)
    with caplog.at_level("INFO"):
        async with opened(host.settings(wanted), host.python) as slurm:
            assert isinstance(slurm, SlurmLibrary) == library
    (record,) = caplog.records
    assert record.getMessage() == sentence
    assert record.levelname == ("WARNING" if wanted == "pyslurm" and not library else "INFO")


@pytest.fixture
def without_pyslurm(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the tests' own Python may have it."""
    monkeypatch.setitem(sys.modules, "pyslurm", None)


async def test_without_pyslurm_the_commands_are_used(host: Host, without_pyslurm: None) -> None:
    choice = await choose(host.settings("auto"))
    assert choice == ("commands", "Slurm is read through its commands: pyslurm is not installed.", False)
    assert (await choose(host.settings("pyslurm"))).unwanted


def test_carme_config_names_the_adapter(
    host: Host, without_pyslurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = host.folder / "carme.toml"
    file.write_text(
        '[site]\nurl = "https://carme.example.org"\n[slurm]\ncluster = "c"\nadapter = "pyslurm"\n'
    )
    assert main(["config", "check", str(file)]) == 0
    assert "Slurm is read through its commands: pyslurm is not installed." in capsys.readouterr().out
