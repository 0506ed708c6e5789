"""What a comparison records of the machine's topology."""

from pathlib import Path

import pytest

from carme_runtime.compare import machine


@pytest.mark.parametrize(
    ("siblings", "threads"), [("0", 1), ("0,64", 2), ("0-3", 4), ("0-1,8-9", 4), ("", 1)]
)
def test_threads_of_a_core_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: str, threads: int
) -> None:
    (tmp_path / "siblings").write_text(f"{siblings}\n")
    monkeypatch.setattr(machine, "_SIBLINGS", tmp_path / "siblings")
    assert machine.environment()["threads_of_a_core"] == threads


def test_numa_nodes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_NODES", tmp_path)
    assert machine.environment()["numa_nodes"] == 1, "where the kernel knows none"
    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    assert machine.environment()["numa_nodes"] == 2


@pytest.mark.parametrize(
    ("job", "given", "own", "threads", "expected"),
    [
        ("7", "16", 16, 1, "alone on its nodes"),
        ("7", "16(x2)", 16, 2, "alone on its nodes"),
        ("7", "16(x2),4", 16, 1, "shares its nodes: 4 of 16 cores"),
        ("7", "4", 4, 1, "shares its nodes: 4 of 16 cores"),
        ("7", "4", 16, 1, "shares its nodes: 4 of 16 cores"),  # a cluster that binds no job to its cores
        ("7", "16", 8, 1, "alone on its nodes"),  # a step with a part of the job's cores
        ("7", "8", 8, 2, "not known"),  # Slurm may count cores where the kernel counts threads
        ("7", "", 16, 1, "not known"),
        ("", "16", 16, 1, "not known"),
        ("", "", 4, 1, "shares its nodes: 4 of 16 cores"),
    ],
)
def test_whether_others_may_use_the_nodes_is_known_from_slurms_cores(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    job: str,
    given: str,
    own: int,
    threads: int,
    expected: str,
) -> None:
    (tmp_path / "siblings").write_text(f"0-{threads - 1}\n")
    monkeypatch.setattr(machine, "_SIBLINGS", tmp_path / "siblings")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(own)))
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", given)
    assert machine.environment()["allocation"] == expected
