"""What one can ask of carme-run beyond how many ranks and where, and Tarantella's command line."""

import ctypes
import itertools
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from carme_runtime import CarmeRuntimeError
from carme_runtime.fabric.members import Member, Members
from carme_runtime.launcher import arguments, hostfile, place
from carme_runtime.ranks import memory
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
def test_a_hostfile_places_the_ranks(
    job: Job, script: Script, tmp_path: Path, content: str, options: list[str], hosts: list[str]
) -> None:
    file = tmp_path / "hosts"
    file.write_text(content)
    path = script("import os; print(os.environ['SLURMD_NODENAME'])")
    code, out, errors = job.launch(*options, "--hostfile", str(file), "--", path).wait()
    assert (code, errors) == (0, "")
    assert [line.split()[-1] for line in sorted(out.splitlines())] == hosts


@pytest.mark.parametrize("first", ["-ngpuspernode", "-m", "-n"])
def test_options_of_earlier_tarantella_versions_are_accepted(
    job: Job, script: Script, tmp_path: Path, first: str
) -> None:
    (tmp_path / "machines").write_text("n2\nn1\n")
    path = script("import os, sys; print(os.environ['SLURMD_NODENAME'], *sys.argv[1:])")
    options = {"-ngpuspernode": "2", "-m": str(tmp_path / "machines"), "-n": "3"}
    line = [first, options.pop(first), *itertools.chain(*options.items())]
    code, out, errors = job.launch(*line, "--", path, "-n", "9").wait()
    assert (code, errors) == (0, "")
    assert sorted(out.splitlines()) == ["[rank 0] n2 -n 9", "[rank 1] n2 -n 9", "[rank 2] n1 -n 9"]


def test_a_module_may_have_the_options_of_the_older_command_line(local: Launch, tmp_path: Path) -> None:
    (tmp_path / "trained.py").write_text("import sys; print(*sys.argv[1:])")
    done = local("-m", "trained", "-ngpuspernode", "2", "a").wait()
    assert done == (0, "[rank 0] -ngpuspernode 2 a\n", "")


def test_options_of_tarantella_are_accepted(local: Launch, script: Script) -> None:
    names = ["A", "B", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "TNT_OUTPUT_ON_ALL_DEVICES"]
    path = script(f"import os, sys; print(*map(os.environ.get, {names}), *sys.argv[1:], sep='|')")
    options = ["--no-gpu", "-n", "3", "--pin-to-socket", "--output-on-all-devices", "-x", "A=1", "B=2=3"]
    code, out, errors = local(*options, "--", path, "-x", "C=1", "D=2", CUDA_VISIBLE_DEVICES="0,1").wait()
    assert (code, errors) == (0, "")
    assert sorted(out.splitlines()) == [f"[rank {rank}] 1|2=3||3|true|-x|C=1|D=2" for rank in range(3)]


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        ([], ["warning", "error"]),
        (["--log-level", "DEBUG"], ["debug", "info", "warning", "error"]),
        (["--log-level=INFO", "--log-on-all-devices"], ["info", "warning", "error"]),
        (["--log-level", "WARNING"], ["warning", "error"]),
        (["--log-level", "ERROR"], ["error"]),
    ],
)
def test_the_log_has_the_level_that_was_requested(
    local: Launch, script: Script, options: list[str], levels: list[str]
) -> None:
    path = script(
        "from carme_runtime.logs import log\n"
        "for level in ('debug', 'info', 'warning', 'error'): getattr(log, level)('said ' + level)"
    )
    code, out, errors = local("-n", "2", *options, "--", path).wait()
    assert (code, out) == (0, "")
    for rank in range(2):
        own_lines = [line for line in errors.splitlines() if line.startswith(f"[rank {rank}]")]
        assert [line.rpartition("said ")[2] for line in own_lines] == levels
    assert ("carme-run: 2 ranks of: " in errors) == ("info" in levels)


def test_the_programs_own_log_is_not_doubled(local: Launch, script: Script) -> None:
    path = script(
        "import logging; logging.basicConfig(); from carme_runtime.logs import log; log.warning('said once')"
    )
    for options in ([], ["--log-level", "WARNING"]):
        assert local(*options, path).wait()[2].count("said once") == 1


def test_an_invalid_level_is_reported(local: Launch, script: Script) -> None:
    path = script("import carme_runtime.logs")
    _, _, errors = local("-x", "CARME_LOG_LEVEL=loud", path).wait()
    assert "CARME_LOG_LEVEL=loud is not a level. Choose from DEBUG, INFO, WARNING, ERROR." in errors


@pytest.mark.parametrize("options", [["-x", "A=1"], ["--fusion-threshold", "0"], ["--fusion-threshold=64"]])
def test_the_threshold_of_fusion_reaches_all_ranks(local: Launch, script: Script, options: list[str]) -> None:
    path = script("from carme_runtime import fusion; print(fusion.threshold(5))")
    code, out, errors = local("-n", "2", *options, "--", path).wait()
    assert (code, errors) == (0, "")
    kib = options[-1].rpartition("=")[2]
    expected = 5 if options[0] == "-x" else int(kib) * 1024
    assert sorted(out.splitlines()) == [f"[rank {rank}] {expected}" for rank in range(2)]


def test_an_invalid_threshold_is_explained(local: Launch, script: Script) -> None:
    path = script("from carme_runtime import fusion; fusion.threshold(5)")
    _, _, errors = local("-x", "CARME_FUSION_THRESHOLD_KB=much", path).wait()
    assert "CARME_FUSION_THRESHOLD_KB=much is not a size. Give a whole number of KiB" in errors


def test_the_transport_reaches_all_ranks(local: Launch, script: Script) -> None:
    path = script("import os; print(os.environ.get('CARME_TRANSPORT'))")
    for options, expected in (
        ([], "None"),
        (["--transport", "gpi2"], "gpi2"),
        (["--transport", "native"], "native"),
    ):
        code, out, errors = local("-n", "2", *options, path).wait()
        assert (code, errors) == (0, "")
        assert sorted(out.splitlines()) == [f"[rank {rank}] {expected}" for rank in range(2)]


def test_the_backend_of_torch_reaches_all_ranks(local: Launch, script: Script) -> None:
    path = script("import os; print(os.environ.get('CARME_TORCH_BACKEND'))")
    code, out, errors = local("-n", "2", "--torch-backend", "carme", path).wait()
    assert (code, errors) == (0, "")
    assert sorted(out.splitlines()) == [f"[rank {rank}] carme" for rank in range(2)]


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("before", [[], ["--"]])
def test_another_interpreter_runs_scripts(local: Launch, tmp_path: Path, before: list[str]) -> None:
    interpreter = executable(tmp_path / "other python", '#!/bin/sh\necho "$0|$*"\n')
    executable(tmp_path / "train.py", "#!/bin/sh\necho itself\n")
    line = [*before, "train.py", "-n", "a b"]
    code, out, errors = local("-n", "2", "--python-interpreter", f"'{interpreter}' -u", *line).wait()
    assert (code, errors) == (0, "")
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] {interpreter}|-u train.py -n a b" for rank in range(2)
    ]


def test_another_interpreter_is_found_on_path(local: Launch, tmp_path: Path) -> None:
    executable(tmp_path / "mypython", '#!/bin/sh\necho "mine $*"\n')
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = local("--python-interpreter=mypython", "-m", "not.here", "1", PATH=path).wait()
    assert done == (0, "[rank 0] mine -m not.here 1\n", "")


@pytest.mark.parametrize("before", [[], ["--"]])
def test_a_script_without_interpreter_is_a_program(local: Launch, tmp_path: Path, before: list[str]) -> None:
    script = executable(tmp_path / "train.py", '#!/bin/sh\necho "itself $1"\n')
    line = ["--python-interpreter", "", *before, "train.py", "a b"]
    assert local(*line).wait() == (0, "[rank 0] itself a b\n", "")
    script.chmod(0o644)
    code, out, errors = local(*line).wait()
    assert (code, out) == (2, "") and "no program './train.py' that can be executed" in errors


def policies_are_allowed() -> bool:
    """Whether the kernel lets processes here say where their memory comes from."""
    if platform.machine() != "x86_64" or not Path("/proc/self/numa_maps").exists():
        return False
    return ctypes.CDLL(None).syscall(ctypes.c_long(238), ctypes.c_long(0), None, ctypes.c_long(0)) == 0


def test_memory_is_near_the_cores(job: Job, script: Script) -> None:
    path = script(
        "import os; print(open('/proc/self/numa_maps').readline().split()[1], *os.sched_getaffinity(0))"
    )
    if not policies_are_allowed():
        pytest.skip("memory cannot be bound here, or not seen to be")
    nodes = sorted(int(name.name[4:]) for name in Path("/sys/devices/system/cpu/cpu0").glob("node[0-9]*"))
    for options, words in (
        (["--pin-memory-to-socket"], "bind:"),
        ([], "default"),
        (["--pin-memory"], "bind:"),
    ):
        code, out, errors = job.launch("-n", "2", "--nodes", "1", *options, "--", path).wait()
        assert (code, errors) == (0, "")
        message = [line.split()[2:] for line in sorted(out.splitlines())]
        assert all(policy.startswith(words) for policy, *_ in message), out
        if options and len(list(memory.NODES.glob("node[0-9]*"))) == 1:
            assert {policy for policy, *_ in message} == {f"bind:{nodes[0]}"}
        if options and len(CORES) > 1:
            assert not {*message[0][1:]} & {*message[1][1:]}  # and cores are pinned


def test_the_nodes_of_cores_and_no_other_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(memory, "_call", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(memory, "numa_nodes", lambda cores: {core // 4 for core in cores})
    with memory.bound([5, 7, 260]):
        assert [call[0] for call in calls] == [1, 0]  # what was before, and the new one
        _, kind, mask, _ = calls[1]
        assert isinstance(mask, ctypes.Array)
        assert kind == 2 and [index for index in range(1024) if mask[index // 64] >> index % 64 & 1] == [
            1,
            65,
        ]
    assert calls[2][:2] == (0, 0) and not any(calls[2][2])  # pyright: ignore[reportArgumentType]


def test_memory_that_cannot_be_bound_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(memory, "_call", refused)
    monkeypatch.setattr(memory, "NODES", tmp_path)
    (tmp_path / "node0").mkdir()
    with memory.bound([0]):
        pass  # the only node's memory is the nearest
    (tmp_path / "node1").mkdir()
    sentence = r"NUMA nodes: Operation not permitted\. Leave --pin-memory out"
    with pytest.raises(CarmeRuntimeError, match=sentence), memory.bound([0]):
        pass


def test_without_gpus_a_dry_run_says_so(local: Launch) -> None:
    code, out, errors = local("--no-gpus", "--dry-run", "--", "true", CUDA_VISIBLE_DEVICES="0,1").wait()
    assert (code, errors) == (0, "")
    assert out.startswith("1 rank of: ") and out.endswith(", number 0 there, no GPU\n")


def test_a_program_with_an_equals_sign_in_its_name_runs(local: Launch, tmp_path: Path) -> None:
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
        (["--hang-seconds", "soon", "x.py"], "'soon' is not a valid number of seconds"),
        (["--log-level", "LOUD", "x.py"], "invalid choice: 'LOUD'"),
        (["--fusion-threshold", "-1", "x.py"], "'-1' is not a number of 0 or more"),
        (["--fusion-threshold", "1", "--backend", "horovod", "x.py"], "-x HOROVOD_FUSION_THRESHOLD="),
        (["--python-interpreter", "no-python", "x.py"], "no program 'no-python' that can be executed"),
        (["--python-interpreter", "'a", "x.py"], "is not a command: No closing quotation"),
        (["--python-interpreter", "", "-m", "os"], "--python-interpreter names none"),
        (["--pin-memory", "--backend", "mpi", "x.py"], "--pin-memory does not go with --backend mpi"),
        (["--pin-cpus", "--backend", "ray", "x.py"], "--pin-cpus binds ranks, and --backend ray starts no"),
        (["--pin-memory", "--backend", "dask", "x.py"], "Leave --pin-memory out"),
        (
            ["--torch-backend", "carme", "--backend", "jax", "x.py"],
            "--torch-backend is for scripts of PyTorch",
        ),
        (
            ["--memory-per-rank=2G", "--spill=x", "--backend=mxnet", "x.py"],
            "--memory-per-rank is for scripts",
        ),
        (["--fusion-threshold=0", "--backend=tensorflow", "x.py"], "--fusion-threshold is for scripts that"),
        (["--hang-seconds=0", "--backend=jax", "x.py"], "--hang-seconds is for scripts that train over"),
        (["--strategy=data", "--backend=mxnet", "x.py"], "--strategy is for scripts that train over"),
        (["--strategy=hybrid", "--backend=horovod", "x.py"], "--strategy is for scripts that train over"),
        (["--transport=gpi2", "--backend=tensorflow", "x.py"], "--transport is for scripts that train over"),
        (["--output-on-all-devices", "--backend=jax", "x.py"], "--output-on-all-devices is for scripts that"),
        (["--hang-seconds=9", "--backend=dask", "x.py"], "--hang-seconds is for scripts that train over"),
        (["--devices-per-rank=1", "--backend=ray", "x.py"], "Ray's tasks say themselves how many GPUs"),
        (["--plan", "--scale-probe", "x.py"], "--plan trains nothing, so --scale-probe has no steps"),
        *(
            (["--plan", f"--backend={name}", "x.py"], f"--backend {name} is for others. To plan such a")
            for name in ("tensorflow", "jax", "mxnet", "dask", "ray", "horovod")
        ),
        (["--output", "none", "x.py"], "invalid choice: 'none'"),
        (["--no-gpu", "--devices-per-rank", "1", "x.py"], "--no-gpu and --devices-per-rank exclude"),
        (["--no-gpu", "--backend", "mpi", "x.py"], "--no-gpu does not go with --backend mpi"),
        (
            ["--devices-per-rank", "2", "--", "true"],
            "--devices-per-rank 2 was requested, with at least 1 rank on",
        ),
        (["--log-folder", "/proc/none", "--", "true"], "The folder /proc/none for logs cannot be used"),
    ],
)
def test_options_that_cannot_be_granted_are_refused(local: Launch, options: list[str], words: str) -> None:
    code, out, errors = local(*options).wait()
    assert (code, out) == (2, "")
    assert words in errors and "Traceback" not in errors


def test_a_probe_of_any_backend_predicts_with_the_threshold_that_is_given() -> None:
    words = ["-n", "1", "--scale-probe", "--fusion-threshold", "64", "--backend", "tensorflow", "-m", "os"]
    options, _ = arguments.parse(words)
    assert options.fusion_threshold == 64


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
