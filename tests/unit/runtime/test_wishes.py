"""What one can ask of carme-run beyond how many ranks and where, and Tarantella's command line."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from carme_runtime import CarmeRuntimeError
from carme_runtime.fabric.members import Member, Members
from carme_runtime.launcher import hostfile, place
from carme_runtime.ranks.cores import in_order

from .conftest import Job, Process

Script = Callable[[str], str]
Launch = Callable[..., Process]
CORES = in_order(os.sched_getaffinity(0))


def test_variables_and_the_limit_for_hangs_reach_all_ranks(local: Launch, script: Script) -> None:
    names = ["A", "B", "MINE", "CARME_HANG_SECONDS"]
    path = script(f"import os; print(*map(os.environ.get, {names}), sep='|')")
    options = ["-n", "2", "-x", "A=1", "-x", "B=a=b c", "-x", "MINE", "--hang-seconds", "2.5"]
    code, out, errors = local(*options, path, MINE="here").wait()
    assert (code, errors) == (0, "")
    assert sorted(out.splitlines()) == [f"[rank {rank}] 1|a=b c|here|2.5" for rank in range(2)]


def test_logs_are_whole_whatever_is_shown(local: Launch, script: Script, tmp_path: Path) -> None:
    path = script("import os, sys; r = os.environ['RANK']; print('out', r); print('err', r, file=sys.stderr)")
    options = ["-n", "3", "--output", "master", "--log-folder", str(tmp_path / "a" / "logs")]
    assert local(*options, path).wait() == (0, "[rank 0] out 0\n", "[rank 0] err 0\n")
    logs = {file.name: sorted(file.read_text().split("\n")) for file in (tmp_path / "a" / "logs").iterdir()}
    assert logs == {f"rank-{rank}.log": ["", f"err {rank}", f"out {rank}"] for rank in range(3)}


def test_a_rank_that_is_not_shown_fails_aloud(local: Launch, script: Script) -> None:
    path = script("import os; assert os.environ['RANK'] != '1', 'wrong here'")
    code, _, errors = local("-n", "2", "--output", "master", path).wait()
    assert code == 1
    assert "Rank 1 on" in errors and "AssertionError: wrong here" in errors


def test_ranks_have_cores_and_gpus_for_themselves(local: Launch, script: Script) -> None:
    path = script(
        "import os; print(*sorted(os.sched_getaffinity(0)), os.environ['CUDA_VISIBLE_DEVICES'], sep='|')"
    )
    options = ["-n", "2", "--devices-per-rank", "2", "--pin-cpus", path]
    code, out, errors = local(*options, CUDA_VISIBLE_DEVICES="4,GPU-5, 6,7,8").wait()
    assert (code, errors) == (0, "")
    half = len(CORES) // 2
    halves = (sorted(CORES[:half]), sorted(CORES[half:])) if half else (CORES, CORES)
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] {'|'.join(map(str, cores))}|{devices}"
        for rank, (cores, devices) in enumerate(zip(halves, ("4,GPU-5", "6,7"), strict=True))
    ]


def test_a_dry_run_starts_nothing(local: Launch, script: Script, tmp_path: Path) -> None:
    path = script(f"open({str(tmp_path / 'started')!r}, 'w')")
    options = ["--dry-run", "--devices-per-rank", "2", path, "a b"]
    code, out, errors = local(*options, CUDA_VISIBLE_DEVICES="0,1,2,3").wait()
    assert (code, errors) == (0, "")
    assert out.splitlines()[0].startswith("2 ranks of: ") and "script.py 'a b'" in out
    assert out.splitlines()[2].startswith("rank 1 on ") and out.splitlines()[2].endswith(", GPUs 2 to 3")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("content", "options", "hosts"),
    [
        ("n2\n", [], ["n2"]),
        ("# all\nn2 slots=2\n\nn1:1  # one\n", [], ["n2", "n2", "n1"]),
        ("n1\nn1\nn2.site.example\nn2\n", [], ["n1", "n1", "n2", "n2"]),
        ("n1\nn2\n", ["-n", "4", "--n-per-node", "2"], ["n1", "n1", "n2", "n2"]),
        ("n2\nn1\n", ["-n", "3"], ["n2", "n2", "n1"]),
    ],
)
def test_a_hostfile_says_where(
    job: Job, script: Script, tmp_path: Path, content: str, options: list[str], hosts: list[str]
) -> None:
    file = tmp_path / "hosts"
    file.write_text(content)
    path = script("import os; print(os.environ['SLURMD_NODENAME'])")
    code, out, errors = job.launch(*options, "--hostfile", str(file), "--", path).wait()
    assert (code, errors) == (0, "")
    assert [line.split()[-1] for line in sorted(out.splitlines())] == hosts


def test_the_older_command_line_of_tarantella(job: Job, script: Script, tmp_path: Path) -> None:
    (tmp_path / "machines").write_text("n2\nn1\n")
    path = script("import os, sys; print(os.environ['SLURMD_NODENAME'], *sys.argv[1:])")
    options = ["-ngpuspernode", "2", "-m", str(tmp_path / "machines"), "-n", "3", "--", path, "-n", "9"]
    code, out, errors = job.launch(*options).wait()
    assert (code, errors) == (0, "")
    assert sorted(out.splitlines()) == ["[rank 0] n2 -n 9", "[rank 1] n2 -n 9", "[rank 2] n1 -n 9"]


def test_todays_command_line_of_tarantella(local: Launch, script: Script) -> None:
    names = ["A", "B", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE"]
    path = script(f"import os, sys; print(*map(os.environ.get, {names}), *sys.argv[1:], sep='|')")
    options = ["--no-gpu", "-n", "3", "--pin-to-socket", "--output-on-all-devices", "-x", "A=1", "B=2=3"]
    code, out, errors = local(*options, "--", path, "-x", "C=1", "D=2", CUDA_VISIBLE_DEVICES="0,1").wait()
    assert (code, errors) == (0, "")
    assert sorted(out.splitlines()) == [f"[rank {rank}] 1|2=3||3|-x|C=1|D=2" for rank in range(3)]


def test_without_gpus_a_dry_run_says_so(local: Launch) -> None:
    code, out, errors = local("--no-gpus", "--dry-run", "--", "true", CUDA_VISIBLE_DEVICES="0,1").wait()
    assert (code, errors) == (0, "")
    assert out.startswith("1 ranks of: ") and out.endswith(", number 0 there, no GPU\n")


def test_a_program_whose_name_looks_like_a_variable(local: Launch, tmp_path: Path) -> None:
    (tmp_path / "a=b.py").write_text("import os, sys; print(os.environ['A'], *sys.argv[1:])")
    assert local("-x", "A=1", "a=b.py", "c=d").wait() == (0, "[rank 0] 1 c=d\n", "")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("", "names no host"),
        ("n1 slots=two\n", r"Line 1 of the hostfile .* is 'n1 slots=two'\. Write"),
        ("n1\nn1 n2\n", "Line 2"),
        ("n1\nn9\n", "names n9, but the nodes of this job are: n1, n2"),
    ],
)
def test_a_wrong_hostfile_is_explained(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "hosts"
    if content is not None:
        file.write_text(content)
    nodes = [Member(number, f"n{number + 1}", "192.0.2.1", 0, 4) for number in range(2)]
    with pytest.raises(CarmeRuntimeError, match=words):
        hostfile.choose(Members.of(nodes, [], 2), hostfile.read(file))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-x", "NOWHERE_SET", "x.py"], "'NOWHERE_SET' is not NAME=VALUE"),
        (["-x", "=1", "x.py"], "'=1' is not NAME=VALUE"),
        (["--hang-seconds", "soon", "x.py"], "'soon' is no number of seconds"),
        (["--output", "none", "x.py"], "invalid choice: 'none'"),
        (["--no-gpu", "--devices-per-rank", "1", "x.py"], "--no-gpu and --devices-per-rank exclude"),
        (["--no-gpu", "--backend", "mpi", "x.py"], "--no-gpu does not go with --backend mpi"),
        (["--devices-per-rank", "2", "--", "true"], "--devices-per-rank 2 was asked for"),
        (["--log-folder", "/proc/none", "--", "true"], "The folder /proc/none for logs cannot be used"),
    ],
)
def test_wishes_that_cannot_be_granted(local: Launch, options: list[str], words: str) -> None:
    code, out, errors = local(*options).wait()
    assert (code, out) == (2, "")
    assert words in errors and "Traceback" not in errors


def test_devices_per_rank_limit_the_ranks() -> None:
    members = Members.of([Member(n, f"n{n + 1}", "192.0.2.1", 4, 4) for n in range(2)], [], 2)
    assert [each.member.host for each in place(members, devices_per_rank=2)] == ["n1", "n1", "n2", "n2"]
    with pytest.raises(CarmeRuntimeError, match=r"has room for 4, \(n1: 2, n2: 2\)"):
        place(members, ranks=5, devices_per_rank=2)
    with pytest.raises(CarmeRuntimeError, match=r"these GPUs: n1: 4, n2: 4"):
        place(members, per_node=3, devices_per_rank=2)


def test_neighbouring_cores_share_a_numa_node_and_threads_a_core(tmp_path: Path) -> None:
    # Two sockets numbered in turns, two cores each, whose second threads come last.
    for core in range(8):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (tmp_path / f"cpu{core}" / f"node{core % 2}").mkdir()
        (topology / "physical_package_id").write_text(f"{core % 2}\n")
        (topology / "core_id").write_text(f"{core % 4 // 2}\n")
    assert in_order(range(8), tmp_path) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert in_order({9, 3, 8}, tmp_path) == [8, 9, 3]  # nothing is known of 8 and 9
