"""What each rank of a job may take."""

from pathlib import Path

import pytest

from carme_runtime.pipeline.memory import memory_of_rank

GIB = 1 << 30


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(f"MemTotal:       {64 << 20} kB\nMemFree: 1 kB\n")
    return tmp_path / "meminfo"


def limit(tmp_path: Path, host: Path, own: str, **variables: str) -> int | None:
    (tmp_path / "own").write_text(own)
    return memory_of_rank(variables, tmp_path / "cgroup", tmp_path / "own", host)


def test_the_smallest_limit_of_the_groups_around_the_process_counts(tmp_path: Path, host: Path):
    for path, content in (("job/memory.max", str(8 * GIB)), ("job/step/memory.max", "max")):
        file = tmp_path / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert limit(tmp_path, host, "0::/job/step/task\n") == 8 * GIB
    assert limit(tmp_path, host, "0::/job/step\n", LOCAL_WORLD_SIZE="4") == 2 * GIB


def test_version_1_of_control_groups_is_read(tmp_path: Path, host: Path):
    folder = tmp_path / "cgroup/memory/slurm/job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(3 * GIB))
    (folder.parent.parent / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert limit(tmp_path, host, "4:cpu,cpuacct:/x\n7:memory:/slurm/job\n0::/\n") == 3 * GIB


def test_slurm_and_the_host_say_it_too(tmp_path: Path, host: Path):
    assert limit(tmp_path, host, "") == 64 * GIB
    assert limit(tmp_path, host, "", SLURM_MEM_PER_NODE="0") == 64 * GIB
    assert limit(tmp_path, host, "", SLURM_MEM_PER_NODE="2048") == 2 * GIB
    assert limit(tmp_path, host, "", SLURM_MEM_PER_CPU="1024", SLURM_CPUS_ON_NODE="3") == 3 * GIB
    assert limit(tmp_path, host.parent / "none", "") is None
