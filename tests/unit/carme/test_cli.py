"""The command line against a running broker."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simulated_quota

from carme.cli import main

from .conftest import carme

PROGRAM = "import sys; from carme.cli import main; sys.exit(main())"
RUNNING: dict[str, Any] = {
    "A": 7, "j": "a\x1b[31m", "u": "ada", "P": "gpu", "T": "PENDING", "r": "Priority", "D": 1, "C": 1,
    "m": "1M", "l": "1:00:00",
}  # fmt: skip


async def test_status_shows_partitions_nodes_and_gpus(
    site: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await carme("status") == 0
    output = capsys.readouterr().out
    assert "gpu*" in output and "3 of 4 a100" in output and "bad fan" in output
    assert " mixed " in output and " idle, drain " in output and " down, not responding " in output
    assert await carme("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["name"] == "n1"


async def test_a_job_is_submitted_and_cancelled(
    site: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = ["$(touch x); ' \" ` | &\nnewline", "*", "-x"]
    assert (
        await carme("submit", "--gpus", "1", "--time", "2h", "--name", "try it", "--", "python", *nasty) == 0
    )
    output = capsys.readouterr().out
    assert "Job 100 is in the queue, for 2 hours at most." in output
    assert "carme logs -f 100" in output
    (spec,) = (site.home / ".local/share/carme/jobs").glob("*/spec.json")
    assert json.loads(spec.read_text())["command"] == ["python", *nasty]
    assert await carme("cancel", "100") == 0
    assert "Job 100 is being ended. It had not begun, so it has written nothing." in capsys.readouterr().out
    assert site.slurm.jobs[0]["T"] == "CANCELLED"
    assert await carme("submit", "--json", "--", "true") == 0
    assert json.loads(capsys.readouterr().out) == {"job_id": 101}


async def test_a_cancelled_task_has_no_log_to_see(
    site: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await carme("submit", "--array", "0-3", "--", "true") == 0
    capsys.readouterr()
    assert await carme("cancel", "100_2") == 0
    assert "Job 100_2 is being ended. It had not begun" in capsys.readouterr().out
    site.slurm.jobs = [site.slurm.jobs[0] | {"T": "PENDING", "K": "0,1,3"}]
    while (await site.client.job(100)).has_task(100, 2):  # noqa: ASYNC110 - what changes is outside
        await asyncio.sleep(0.02)
    assert await carme("logs", "100_2") == 0
    assert "Job 100_2 has written nothing. You cancelled this job before it began" in capsys.readouterr().err
    assert await carme("cancel", "100") == 0
    assert "See what one of its tasks wrote with: carme logs 100_TASK" in capsys.readouterr().out


async def test_a_script_runs_with_its_interpreter_and_arguments(site: Any, file: Path, folder: Path) -> None:
    plain, marked, ready = (folder / name for name in ("plain.sh", "marked.py", "ready.sh"))
    plain.write_text("echo hi\n")
    marked.write_text("#!/usr/bin/env python3\n")
    ready.write_text("#!/bin/bash\n")
    ready.chmod(0o755)
    for script in (plain, marked, ready):
        assert await carme("submit", str(script), "-1", "--", "--gpus", "x y") == 0
    specs = (site.home / ".local/share/carme/jobs").glob("*/spec.json")
    commands = sorted(json.loads(spec.read_text())["command"] for spec in specs)
    assert commands == sorted(
        [
            ["/bin/sh", str(plain), "-1", "--gpus", "x y"],
            ["/usr/bin/env", "python3", str(marked), "-1", "--gpus", "x y"],
            [str(ready), "-1", "--gpus", "x y"],
        ]
    )


async def test_a_template_starts_a_script_over_the_nodes_of_its_job(
    site: Any, file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = folder / "train.py"
    script.write_text("import jax\n")
    jobs = site.home / ".local/share/carme/jobs"
    assert await carme("submit", "--template", "jax", str(script), "--", "--epochs", "3") == 0
    (folder_of_job,) = jobs.iterdir()
    request = json.loads((folder_of_job / "request.json").read_text())
    requested = ("name", "image", "nodes", "gpus_per_node")
    assert [request[name] for name in requested] == ["jax", "torch", 2, 1]
    assert request["command"] == ["carme-run", "--backend", "jax", str(script), "--epochs", "3"]
    more = ["--nodes", "1", "--gpus", "0", "--name", "mine", "--", "./simulate", "-n", "1"]
    assert await carme("submit", "--template", "mpi", *more) == 0
    (folder_of_mpi,) = set(jobs.iterdir()) - {folder_of_job}
    request = json.loads((folder_of_mpi / "request.json").read_text())
    assert [request[name] for name in requested] == ["mine", "torch", 1, 0]
    assert request["command"] == ["carme-run", "--backend", "mpi", "--", "./simulate", "-n", "1"]
    # If the site has an image with the framework's name, that image is used.
    for name in ("dask.sif", "dask.json"):
        (Path(site.settings.images.directory) / name).write_text('{"title": "Dask"}')
    before = set(jobs.iterdir())
    assert await carme("submit", "--template", "dask", str(script)) == 0
    assert await carme("submit", "--template", "dask", "--image", "torch", str(script)) == 0
    folders = sorted(set(jobs.iterdir()) - before, key=lambda path: path.stat().st_mtime_ns)
    images = [json.loads((path / "request.json").read_text())["image"] for path in folders]
    assert images == ["dask", "torch"]
    capsys.readouterr()
    assert await carme("submit", "--template", "jax", "nowhere.py") == 1
    assert "There is no script 'nowhere.py'." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pytorch", "The nearest known one is 'torch'. Choose from: accelerate, dask,"),
        ("xyzzy", "'xyzzy'. Choose from: accelerate, dask,"),
    ],
)
async def test_an_unknown_template_gets_the_names_that_there_are(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        await carme("submit", "--template", word, "train.py")
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed and printed.count("Choose from") == 1


async def test_sbatch_lines_are_read_and_the_command_line_wins(
    site: Any, file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = folder / "theirs.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --job-name=my/run -t 1:30:00 --nodes=2-4  # a comment\n\n##SBATCH --gpus=9\n"
        "#SBATCH --gres=gpu:a100:2 --mem=8G\n#SBATCH --output out-%j.txt --qos=high --mail-type=END\n"
        "echo hi\n#SBATCH --partition=nowhere\n"
    )
    assert await carme("submit", str(script), "--time", "10m", "--nodes", "1") == 0
    (folder_of_job,) = (site.home / ".local/share/carme/jobs").iterdir()
    request = json.loads((folder_of_job / "request.json").read_text())
    requested = ("name", "minutes", "nodes", "gpus_per_node", "gpu_type", "memory_mb_per_node", "partition")
    assert [request[name] for name in requested] == ["my-run", 10, 1, 2, "a100", 8192, None]
    assert request["qos"] == "high"
    error = capsys.readouterr().err
    assert "for what carme submit does not have, which is ignored: --output, --mail-type." in error
    script.write_text("#SBATCH --nodes=many\n")
    assert await carme("submit", str(script)) == 1
    assert "Line 1 of the script, '#SBATCH --nodes=many', cannot be understood" in capsys.readouterr().err


async def test_a_script_with_foreign_line_ends_or_encoding_is_refused(
    site: Any, file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = folder / "a b.sh"
    for text, words in (
        (
            b"#!/bin/bash -l\r\necho hi\r\n",
            "line ends of Windows (CR LF), which bash cannot read. Convert it",
        ),
        (b"echo hi\r\n", "which sh cannot read. Convert it with: sed -i 's/\\r$//' '"),
        (b"\xef\xbb\xbf#!/usr/bin/env bash\n", "begins with a byte order mark (BOM), which bash takes"),
        ("#!/bin/sh\n".encode("utf-16"), "is text in UTF-16"),
    ):
        script.write_bytes(text)
        for mode in (0o644, 0o755):
            script.chmod(mode)
            assert await carme("submit", str(script)) == 1
            assert words in capsys.readouterr().err
    assert not site.slurm.calls("sbatch")
    # Python reads both; the system, which starts an executable script, does not.
    script.write_bytes(b"\xef\xbb\xbf#!/usr/bin/python3\r\nprint(1)\r\n")
    script.chmod(0o755)
    assert await carme("submit", str(script)) == 0
    (folder_of_job,) = (site.home / ".local/share/carme/jobs").iterdir()
    request = json.loads((folder_of_job / "request.json").read_text())
    assert request["command"] == ["/usr/bin/python3", str(script)]


async def test_options_after_the_script_and_before_two_hyphens_belong_to_submit(
    site: Any, file: Path, folder: Path
) -> None:
    script = folder / "train.sh"
    script.write_text("echo hi\n")
    assert (
        await carme("submit", str(script), "--gpus", "2", "data.csv", "--time=2h", "--", "--gpus", "9") == 0
    )
    (folder_of_job,) = (site.home / ".local/share/carme/jobs").iterdir()
    request = json.loads((folder_of_job / "request.json").read_text())
    assert (request["gpus_per_node"], request["minutes"]) == (2, 120)
    assert request["command"] == ["/bin/sh", str(script), "data.csv", "--gpus", "9"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["submit", "train.sh", "a b", "--epochs", "3", "--gpus", "2"],
            "there is no option --epochs. What the script is to get stands after --: "
            "carme submit train.sh 'a b' -- --epochs 3",
        ),
        (["submit", "--gpu=2", "--", "x"], "there is no option --gpu. The nearest known one is '--gpus'."),
        (["submit", "train.sh", "--gpu", "2"], "there is no option --gpu"),
        (["session", "shell", "s1", "--nod", "1"], "there is no option --nod"),
        (
            ["session", "shell", "s1", "ls", "-l"],
            "What the command is to get stands after --: carme session shell s1 ls -- -l",
        ),
    ],
)
def test_no_option_is_swallowed(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


async def test_jobs_are_listed_as_a_table_and_as_json(
    site: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await carme("jobs") == 0
    assert "You have no jobs at the moment." in capsys.readouterr().out
    await site.queue([RUNNING])
    assert await carme("jobs") == 0
    output = capsys.readouterr().out
    assert "Other jobs with a higher priority" in output
    assert "\x1b" not in output  # a name must not steer the terminal
    assert await carme("jobs", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["id"] == 7


async def test_a_log_is_printed_followed_and_cut_to_its_tail(
    site: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await carme("submit", "--", "true")
    capsys.readouterr()
    assert await carme("logs", "100") == 0
    assert "Job 100 has written nothing yet." in capsys.readouterr().err
    (folder,) = (site.home / ".local/share/carme/jobs").iterdir()
    (folder / "output.log").write_text("hello\n")
    (folder / "output.log").chmod(0o644)
    site.slurm.jobs = [site.slurm.jobs[0] | {"T": "COMPLETED"}]
    assert await carme("logs", "-f", "100") == 0
    assert capsys.readouterr().out == "hello\n"
    (folder / "output.log").write_text("one\ntwo\nthree\n")
    for options, words in ((["--tail", "2"], "two\nthree\n"), (["-f", "-n", "1"], "three\n"), (["-n0"], "")):
        assert await carme("logs", "100", *options) == 0
        reported = capsys.readouterr()
        assert (reported.out, reported.err) == (words, "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["submit", "nowhere.sh"], "There is no script 'nowhere.sh'. Name a file, or put a command after --"),
        (
            ["submit", "--gpus", "9", "--", "x"],
            "A node has at most 4 GPUs; 9 were requested. Ask for 1 to 4.",
        ),
        (["submit", "--time", "soon", "--", "x"], "'soon' is not a length of time."),
        (["submit", "--name", "a/b", "--", "x"], "'name' must be 1 to 64 letters"),
        (["cancel", "5"], "There is no job 5 of ada."),
        (["cancel", "0"], "'job_id' must be at least 1, not 0."),
        (["config", "check", "/nowhere"], "There is no configuration file /nowhere."),
    ],
)
async def test_a_refusal_is_one_sentence(
    site: Any, file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert await carme(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("carme: ") and sentence in error


@pytest.mark.parametrize("arguments", [[], ["fly"], ["submit"], ["submit", "--"], ["cancel", "x"], ["logs"]])
def test_wrong_usage_ends_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: carme" in capsys.readouterr().err


def test_a_broker_that_is_down_is_reported(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert "does not answer: no such file" in capsys.readouterr().err


def test_a_configuration_is_checked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    assert "is right: site 'Carme'" in capsys.readouterr().out
    file.write_text("[site]\n")
    assert main(["config", "check", str(file), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and len(answer["problems"]) == 2


async def test_nothing_is_submitted_that_would_die_of_a_quota(site: Any, file: Path, tmp_path: Path) -> None:
    """The kernel's answer is simulated (tests/simulated_quota.c): 2,000,000 KiB at most."""
    library = simulated_quota.build(tmp_path)

    async def submit(kibibytes: int, *options: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "LD_PRELOAD": str(library),
            "SIMULATED_QUOTA": f"{os.getuid()} 2000000 0 {kibibytes << 10} 0 0 7",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HOME": str(tmp_path),
        }
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", PROGRAM, "submit", *options, "--", "true"],
            env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = await submit(2_000_000)
    assert done.returncode == 1 and not site.slurm.calls("sbatch")
    assert f"{tmp_path} is full (100 % of your quota used, 0 B left)" in done.stderr
    assert "not even the job's log. Delete what you do not need there" in done.stderr
    done = await submit(1_900_000, "--results", str(tmp_path / "not/there/yet"))
    assert done.returncode == 0 and "in the queue" in done.stdout
    assert "is nearly full (95 % of your quota used, 97.7 MiB left)" in done.stderr
    done = await submit(1_000_000)
    assert done.returncode == 0 and not done.stderr
    assert len(site.slurm.calls("sbatch")) == 2


def typed(line: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A line as bash runs it, with the command in `$carme`."""
    environment = {
        "carme": f'{sys.executable} -c "from carme.cli import program; program()"',
        "PYTHONPATH": os.pathsep.join(sys.path),
        **more,
    }
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], env=os.environ | environment, cwd=folder, capture_output=True,
        text=True, errors="backslashreplace", check=False,
    )  # fmt: skip


ODD = {
    "eval $carme jobs > /dev/full": "carme: The output cannot be written: No space left on device.\n",
    "PYTHONUNBUFFERED=1 eval $carme jobs --json > /dev/full": "carme: The output cannot be written",
    "eval $carme jobs --help > /dev/full": "carme: The output cannot be written",
    "eval $carme jobs --json | true": "",
    "PYTHONIOENCODING=ascii eval $carme jobs": "",
    "eval $carme jobs >&-": "",
    "eval $carme submit -- echo $'caf\\xe9'": "'command[1]' must be text in UTF-8, not 'caf\\xe9'",
    "mkdir $'caf\\xe9'; cd $'caf\\xe9'; eval $carme submit -- true": "'workdir' must be text in UTF-8",
    "mkdir $'a\\nb'; cd $'a\\nb'; eval $carme submit -- true": "must not have a line end",
    "mkdir gone; cd gone; rmdir ../gone; eval $carme submit -- true": (
        "carme: The folder that you are in has been removed. Go to another one with cd.\n"
    ),
}


async def test_commands_run_in_unusual_places_and_with_unusual_outputs(
    site: Any, file: Path, tmp_path: Path
) -> None:
    await site.queue([RUNNING | {"j": "grüße"}])
    all_done = await asyncio.gather(*(asyncio.to_thread(typed, line, tmp_path) for line in ODD))
    for (line, words), done in zip(ODD.items(), all_done, strict=True):
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, line
        assert words in done.stderr and (words or not done.stderr), line
        if "ascii" in line:
            assert "gr\\xfc\\xdfe" in done.stdout


async def test_a_very_long_name_widens_no_other_line(
    site: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await site.queue([RUNNING | {"A": 8, "j": "n" * 900}, RUNNING | {"j": "short", "D": 1}])
    assert await carme("jobs") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(len(line) < 300 for line in lines)
    assert "nnn..." in "".join(lines)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system without room."""
    if os.getuid() != 0:
        pytest.skip("mounting takes root")
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        with contextlib.suppress(OSError), (folder / "all").open("wb", buffering=0) as stream:
            while stream.write(bytes(1 << 16)):
                pass
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_results_into_a_full_file_system_are_refused(
    site: Any, file: Path, full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await carme("submit", "--results", str(full / "new/one"), "--", "true") == 1
    message = capsys.readouterr().err
    assert f"{full} is full (0 B free): nothing can be written there, no results." in message
