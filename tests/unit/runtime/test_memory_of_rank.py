"""What each rank of a job may take, and what is free of it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carme_runtime.out_of_core import pages
from carme_runtime.pipeline.memory import free_memory_of_rank, memory_of_rank
from memory_cgroups import MemoryCgroup
from patience import HANG

from .conftest import clean_environment

MIB, GIB = 1 << 20, 1 << 30
# Has so many bytes of memory until its input ends.
SERVER = """
import sys
memory = bytearray(b"x") * int(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""
READ = """
from carme_runtime.pipeline.memory import free_memory_of_rank
print(free_memory_of_rank(), flush=True)
"""
# Takes all that it may.
TAKE = """
from carme_runtime.pipeline.memory import free_memory_of_rank
memory = bytearray(b"x") * free_memory_of_rank()
print(len(memory), flush=True)
"""


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


def free(tmp_path: Path, own: str, held: int = 0, **variables: str) -> int | None:
    (tmp_path / "own").write_text(own)
    host = tmp_path / "meminfo"
    host.write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
    return free_memory_of_rank(held, variables, tmp_path / "cgroup", tmp_path / "own", host)


def less_margin(size: int) -> int:
    """A twentieth, and at least 32 MiB, stay free."""
    return size - max(size // 20, 32 * MIB)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_what_a_group_takes_is_not_free_but_for_files_that_nobody_maps(tmp_path: Path):
    stat = f"anon {GIB}\nfile {2 * GIB}\nactive_file {GIB}\ninactive_file {GIB}\n"
    stat += f"file_mapped {512 * MIB}\nshmem {256 * MIB}\n"
    files = {"memory__max": str(8 * GIB), "memory__current": str(4 * GIB), "memory__stat": stat}
    group(tmp_path / "cgroup/job", **files)
    # Of 4 GiB are 2 GiB files; of those at most 512 MiB are mapped, if none of it is shared memory.
    expected = 8 * GIB - (4 * GIB - 2 * GIB + 512 * MIB)
    assert free(tmp_path, "0::/job\n") == less_margin(expected)
    assert free(tmp_path, "0::/job\n", LOCAL_WORLD_SIZE="4") == less_margin(expected // 4)
    assert free(tmp_path, "0::/job\n", held=GIB) == less_margin(expected + GIB)


def test_version_1_counts_the_groups_within_a_group(tmp_path: Path):
    stat = f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file 0\ntotal_mapped_file 0\n"
    files = {"memory__limit_in_bytes": str(4 * GIB), "memory__usage_in_bytes": str(3 * GIB)}
    group(tmp_path / "cgroup/memory/job", memory__stat=stat, **files)
    assert free(tmp_path, "7:memory:/job\n") == less_margin(2 * GIB)


def test_a_group_below_the_mount_of_a_container_is_found(tmp_path: Path):
    """The kernel names it by the host's path, and the mount begins with its third part."""
    files = {"memory__max": str(GIB), "memory__current": "0", "memory__stat": ""}
    group(tmp_path / "cgroup/inner", **files)
    assert free(tmp_path, "0::/machine/container/inner\n") == less_margin(GIB)


def test_where_only_slurm_names_a_limit_the_process_itself_is_counted(tmp_path: Path):
    found = free(tmp_path, "", SLURM_MEM_PER_NODE="4096")
    assert found is not None
    assert abs(found - less_margin(4 * GIB - pages.resident())) < 64 * MIB
    assert free(tmp_path, "", SLURM_MEM_PER_NODE="1") == 1
    assert free(tmp_path, "") == less_margin(32 * GIB)


@pytest.fixture
def server(cgroup: MemoryCgroup) -> Iterator[subprocess.Popen[str]]:
    """A session's server, with 200 MiB of a job's 512."""
    cgroup.limit(512 * MIB)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(200 * MIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=cgroup.enter,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    with process:
        yield process


def within(cgroup: MemoryCgroup, program: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
        preexec_fn=cgroup.enter,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return int(done.stdout)


def test_what_a_server_in_the_same_cgroup_takes_is_not_free(
    cgroup: MemoryCgroup, server: subprocess.Popen[str]
):
    beside = within(cgroup, READ)
    assert within(cgroup, TAKE) > 0  # all that is free can be taken: nobody is killed
    assert server.poll() is None
    assert server.stdin
    server.stdin.close()
    assert server.wait(HANG) == 0
    alone = within(cgroup, READ)
    assert 195 * MIB < alone - beside < 230 * MIB
    assert beside < (512 - 200 - 32) * MIB
