"""carme-run on a laptop, and what is wrong before anything starts."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import carme_runtime

from .conftest import MEET, RUN, Process, Witness, clean_environment

Script = Callable[[str], str]
Launch = Callable[..., Process]


def test_all_ranks_run_here(local: Launch, script: Script) -> None:
    names = ["WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "CARME_AGENT"]
    text = f"import os; print(*map(os.environ.get, {names}))"
    code, out, errors = local("-n", "3", script(text)).wait()
    assert (code, errors) == (0, "")
    assert sorted(out.splitlines()) == [f"[rank {rank}] 3 {rank} 0 127.0.0.1 None" for rank in range(3)]


def test_one_rank_is_the_default(local: Launch) -> None:
    assert local("--", "echo", "x").wait() == (0, "[rank 0] x\n", "")
    assert local("--", "echo", "x", CUDA_VISIBLE_DEVICES="0,1").wait()[1].count("x") == 2


#: As `sbatch --nodes 2` sets them for its script, and srun for one of four tasks.
BATCH = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": str(2**32 - 5)}
NODE = {"SLURMD_NODENAME": "n1", "PATH": "/nonexistent"}
TASK = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("slurm", "words"),
    [
        (BATCH, "carme-run was started on none of the job's 2 nodes: all ranks start on this host. Start"),
        (BATCH | NODE, "This job has 2 nodes, but there is no srun here to start agents on the others: all"),
        (
            BATCH | NODE | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0"},
            "srun gave carme-run one of the job's 2 nodes: all ranks start on it. For ranks on all",
        ),
        (TASK, "srun started carme-run 4 times: each is a run of its own, with ranks on its node alone."),
        (TASK | {"SLURM_PROCID": "1"}, ""),
        (BATCH | {"SLURM_JOB_NUM_NODES": "1"}, ""),
    ],
)
def test_in_a_job_of_slurm_alone_ranks_run_on_this_node_with_a_message(
    local: Launch, slurm: dict[str, str], words: str
) -> None:
    code, out, errors = local("-n", "2", "--", "/bin/echo", "x", **slurm).wait()
    assert (code, sorted(out.splitlines())) == (0, ["[rank 0] x", "[rank 1] x"])
    assert words in errors and errors.count("carme-run: ") == bool(words)


@pytest.mark.parametrize(
    ("slurm", "words"),
    [
        (BATCH, "carme-run was started on none of the job's 2 nodes. Start it in the job's script, or by:"),
        (
            BATCH | NODE,
            "This job has 2 nodes, but there is no srun here to start agents on the others. Start",
        ),
        (TASK, "srun started carme-run 4 times. Start it once, or"),
    ],
)
def test_nodes_that_no_agents_can_join_are_not_used(local: Launch, slurm: dict[str, str], words: str) -> None:
    code, out, errors = local("--nodes", "2", "--", "/bin/true", **slurm).wait()
    assert (code, out) == (2, "")
    assert f"--nodes 2 cannot be used here. {words}" in errors and "all ranks start" not in errors


def test_options_behind_a_script_are_its_own_with_a_message(local: Launch, script: Script) -> None:
    show = script("import sys; print(*sys.argv[1:])")
    code, out, errors = local(show, "-n", "2", "--backend", "x").wait()
    assert (code, out) == (0, "[rank 0] -n 2 --backend x\n")
    assert f"carme-run: -n behind {show} is {show}'s. Options of carme-run stand before it" in errors
    for quiet in (["--", show, "-n", "2"], [show, "--backend", "x"]):
        assert local(*quiet).wait()[2] == ""


def test_ranks_on_a_host_without_loopback_are_not_started(tmp_path: Path) -> None:
    apart = ["unshare", "--net"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--net"]
    for ranks, expected in (("2", (1, "")), ("1", (0, "[rank 0] x\n"))):
        run = Process([*apart, *RUN, "-n", ranks, "--", "echo", "x"], clean_environment(), tmp_path)
        code, out, errors = run.wait()
        run.close()
        assert (code, out) == expected
        if ranks == "2":
            assert "is down, by which ranks on one host meet. Turn on" in errors
            assert errors.rstrip().endswith("ip link set lo up.")


#: What PyTorch calls when it is imported: in torchrun, and in its ranks.
IMPORTED = "from carme_runtime.autoload import register_backend; register_backend(); print('on')"


@pytest.mark.parametrize(
    ("words", "environment", "ends"),
    [
        (["torchrun", "--nproc-per-node=2"], {}, True),
        (["torchrun", "--nnodes=2", "--rdzv-endpoint=n1:29500"], {}, False),
        (["train.py"], {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, True),
        (["train.py"], {"WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, False),
        (["train.py"], {}, False),
    ],
)
def test_torchrun_ends_at_once_on_a_host_without_loopback(
    words: list[str], environment: dict[str, str], ends: bool, tmp_path: Path
) -> None:
    apart = ["unshare", "--net"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--net"]
    command = [*apart, sys.executable, "-c", IMPORTED, *words]
    run = Process(command, clean_environment() | environment, tmp_path)
    code, out, errors = run.wait()
    run.close()
    assert (code, out) == ((1, "") if ends else (0, "on\n")), errors
    assert ("is down, by which ranks on one host meet. Turn on" in errors) is ends


def test_a_failure_is_that_of_the_run(local: Launch, script: Script) -> None:
    code, _, errors = local(script("raise SystemExit(4)")).wait()
    assert (code, errors.count("carme-run: Rank 0 on")) == (4, 1)


def test_the_reason_of_a_probe_is_shown_once(local: Launch, script: Script) -> None:
    sentence = "carme-run --scale-probe: The script ended after 5 steps."
    code, _, errors = local(script(f"import sys; print({sentence!r}, file=sys.stderr); sys.exit(2)")).wait()
    assert code == 2 and errors == f"[rank 0] {sentence}\n"
    code, _, errors = local(script("import sys; print('a word', file=sys.stderr); sys.exit(2)")).wait()
    assert code == 2 and "carme-run: Rank 0 on" in errors


def test_a_killed_launcher_leaves_no_ranks(local: Launch, script: Script, witness: Witness) -> None:
    run = local("-n", "2", script(MEET + "witness.recv(1)"), **witness.environment)
    witness.expect(2)
    run.popen.kill()
    assert witness.all_gone()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--nodes", "2", "--", "true"],
            "outside of a job, where there is this host alone. Start",
        ),
        (["none.py"], "There is no script 'none.py' in "),
        (["/none.py"], "There is no script '/none.py'. Check"),
        (["."], "'.' is a folder, not a script. Name a Python file in it."),
        (["-m", "none.such"], "There is no module 'none' for "),
        (["-m"], "No module follows -m. Give one"),
        (["--", "no-such-program"], "There is no program 'no-such-program' that can be executed."),
        (["--"], "No program follows --. Give one"),
        ([], "Nothing to run was named. Give a script: carme-run train.py"),
        (["-n", "0", "x.py"], "'0' is not a number of 1 or more."),
        (["-n"], "expected one argument"),
        (["--gpus", "2", "x.py"], "unrecognized arguments: --gpus"),
    ],
)
def test_what_is_wrong_is_reported_before_anything_starts(
    local: Launch, arguments: list[str], words: str
) -> None:
    code, out, errors = local(*arguments).wait()
    assert (code, out) == (2, "")
    assert words in errors
    assert "Traceback" not in errors


def test_a_script_that_may_not_be_read_is_reported() -> None:
    # Root may read everything; and the tests' own Python may be where only root can read.
    unprivileged = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        script = Path(folder) / "train.py"
        script.touch(0)
        ended = subprocess.run(
            ["/usr/bin/python3", "-m", "carme_runtime.launcher.command", str(script)],
            env=clean_environment(PYTHONDONTWRITEBYTECODE="1"),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            **unprivileged,
        )
    assert ended.returncode == 2
    assert "may not be read by you" in ended.stderr


@pytest.mark.parametrize("python", [["-c"], ["-I", "-c"]])
def test_what_is_set_for_python_is_the_programs(tmp_path: Path, python: list[str]) -> None:
    """Job images start the command isolated; elsewhere its own modules come first all the same."""
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    (tmp_path / "mine.py").write_text(
        "import os; print(os.environ['PYTHONPATH'], os.environ.get('PYTHONUTF8'))"
    )
    source = str(Path(carme_runtime.__file__).parents[1])
    isolated = python[0] == "-I"
    start = f"import sys; sys.path.append({source!r}); " if isolated else ""
    path = f"{tmp_path}:{source}"
    # The program's own Python cannot be started with a PYTHONHOME that is not there.
    home = {"PYTHONHOME": "/nonexistent"} if isolated else {}
    shell = ["--", "/bin/sh", "-c", 'echo "$PYTHONPATH" "$PYTHONHOME"']
    command = ["-n1", *(shell if isolated else ["-m", "mine"])]
    ended = subprocess.run(
        [sys.executable, *python, f"{start}from carme_runtime.commands import run; run()", *command],
        env=clean_environment(PYTHONPATH=path, PYTHONUTF8="1", **home),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip().endswith(f"{path} {'/nonexistent' if isolated else '1'}")


def test_output_that_cannot_be_written_is_reported() -> None:
    line = f"{sys.executable} -m carme_runtime.launcher.command -- echo hello > /dev/full"
    done = subprocess.run(
        ["bash", "-c", line], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr == "carme-run: The output cannot be written: No space left on device.\n"


def test_unusual_folders_and_arguments_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import os, sys; print(os.fsencode(sys.argv[1]), os.getcwdb())")
    run = f"{sys.executable} -m carme_runtime.launcher.command"
    line = f"mkdir $'caf\\xe9' gone; cd $'caf\\xe9'; {run} ../x.py $'\\xe9'; cd ../gone; rmdir ../gone"
    line += f"; {run} ../x.py"
    done = subprocess.run(
        ["bash", "-c", line],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "b'\\xe9'" in done.stdout and "/caf\\xe9'" in done.stdout
    assert done.returncode == 2
    assert (
        done.stderr == "carme-run: The folder that you are in has been removed. Go to another one with cd.\n"
    )


def test_a_missing_agent_is_reported(local: Launch, tmp_path: Path) -> None:
    code, _, errors = local("--", "true", CARME_AGENT=str(tmp_path / "agent.sock")).wait()
    assert code == 2
    assert "The job's agent does not answer at" in errors
    assert "or unset CARME_AGENT and add --nodes 1 to run on this node alone" in errors


def test_help_names_every_way_to_start(local: Launch) -> None:
    code, out, _ = local("--help").wait()
    assert code == 0
    for words in ("script.py", "-m module", "-- program", "--devices-per-node K", "--nodes M", "-n N"):
        assert words in out


def test_the_package_exports_its_public_names() -> None:
    assert carme_runtime.__all__ == ["CarmeRuntimeError", "__version__", "memory"]
