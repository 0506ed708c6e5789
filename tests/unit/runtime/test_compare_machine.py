"""What a comparison records of the machine's topology."""

from pathlib import Path

import pytest

from carme_runtime.compare import machine


@pytest.mark.parametrize(
    ("siblings", "threads"), [("0", 1), ("0,64", 2), ("0-3", 4), ("0-1,8-9", 4), ("", 1)]
)
def test_threads_of_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: str, threads: int
) -> None:
    (tmp_path / "siblings").write_text(f"{siblings}\n")
    monkeypatch.setattr(machine, "_SIBLINGS", tmp_path / "siblings")
    assert machine.environment()["threads_of_a_core"] == threads


def test_numa_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_NODES", tmp_path)
    assert machine.environment()["numa_nodes"] == 1, "where the kernel knows none"
    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    assert machine.environment()["numa_nodes"] == 2
