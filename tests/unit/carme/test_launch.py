"""`carme-job` on a compute node, with stand-ins for apptainer and srun that record their calls."""

import hashlib
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from carme.errors import CarmeError
from carme.launch import container, preparation
from carme.launch import job as launch
from carme.launch.exits import Exit
from patience import HANG

NASTY = ["$(touch x); ' \" ` | &\nnewline", "*", "--help"]
STAND_IN = """\
#!{python} -IS
import json, os, subprocess, sys
from pathlib import Path
here = Path(__file__).parent
name = Path(sys.argv[0]).name
with (here / "calls.jsonl").open("a") as calls:
    call = {{"program": name, "arguments": sys.argv[1:], "environment": dict(os.environ)}}
    calls.write(json.dumps(call) + "\\n")
arguments = sys.argv[1:]
if name == "srun":
    inner = arguments[next(i for i, word in enumerate(arguments) if not word.startswith("-")):]
    sys.exit(subprocess.call(inner))
if "--announce" in arguments:
    Path(arguments[arguments.index("--announce") + 1]).write_text('{{"host": "10.0.0.1", "port": 7}}')
script = here / ("join" if "--join" in arguments else "first")
os.execv("/bin/sh", ["/bin/sh", str(script)])
"""


class Node:
    """A compute node with a job on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.key = folder / "key"
        self.private = Path(f"/tmp/carme-{os.getpid()}")
        for path in (self.programs, self.key):
            path.mkdir()
        (folder / "torch.sif").touch()
        for name in ("apptainer", "srun"):
            (self.programs / name).write_text(STAND_IN.format(python=sys.executable))
            (self.programs / name).chmod(0o755)
        self.script("first", "exit 0")
        self.script("join", "exit 0")
        self.spec(image=str(folder / "torch.sif"))
        (self.key / "environment.json").write_text('{"TOKEN": "t"}')
        self.environment = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONPATH": str(Path(launch.__file__).parents[2]),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_EXPORT_ENV": "NONE",
            "SLURM_JOB_NUM_NODES": "1",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "USER": "ada",
        }

    def script(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text + "\n")

    def spec(self, **values: Any) -> None:
        spec = {"image": None, "command": ["python", *NASTY], "nodes": 1, "cpus": 4, "gpus": 2}
        spec |= {"gpu_type": "a100", "workdir": None, "binds": ["/usr", "/nowhere"], **values}
        (self.key / "spec.json").write_text(json.dumps(spec))

    def start(self, *options: str, before: str = "") -> "subprocess.Popen[str]":
        # The host's own name may stand for 127.x only.
        program = (
            "import sys; from carme.launch import job as launch, other_nodes, programs; "
            "launch.address_of = lambda node: '10.0.0.1'; "
            f"other_nodes.GRACE_SECONDS = {HANG}; programs.STOP_SECONDS = {HANG:.0f}; "
            "other_nodes.WATCH_SECONDS = launch.WATCH_SECONDS = 0.1; "
            "other_nodes.RETURN_SECONDS = 0.1; other_nodes.RETURN_TRIES = 2; "
            f"{before}\nsys.exit(launch.main({[*options, str(self.key)]!r}))"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program], env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *options: str, before: str = "") -> tuple[int, str, str]:
        process = self.start(*options, before=before)
        output, errors = process.communicate()
        return process.returncode, output, errors

    def calls(self, program: str) -> list[dict[str, Any]]:
        lines = (self.programs / "calls.jsonl").read_text().splitlines()
        return [call for call in map(json.loads, lines) if call["program"] == program]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_command_without_an_image_runs_with_its_arguments_and_environment(node: Node) -> None:
    show = (
        "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()])); sys.exit(7)"
    )
    node.spec(command=[sys.executable, "-c", show, *NASTY], workdir=str(node.programs))
    code, output, _ = node.run()
    arguments, environment, folder = json.loads(output)
    assert (code, arguments, folder) == (7, NASTY, str(node.programs))
    assert environment["TOKEN"] == "t"
    assert "SLURM_EXPORT_ENV" not in environment  # else the job's own steps would lose their PATH
    assert not (node.folder / "x").exists()


LOGIN = "from carme.launch import login; "
IMPATIENT_LOGIN = LOGIN + "login.SECONDS = 1.0; login.log_in.__defaults__ = (1.0,); "
# For a login whose end is noticed, whatever it has left running: longer than a test may take.
PATIENT_LOGIN = LOGIN + "login.log_in.__defaults__ = (1e6,); "
SHOW = [sys.executable, "-I", "-c", "import json, os; print(json.dumps(dict(os.environ)))"]


def test_login_files_are_the_programs_and_not_the_launchers(node: Node) -> None:
    (node.folder / "json.py").write_text("raise SystemExit('the wrong json')")
    (node.folder / ".profile").write_text(
        f"export PYTHONHOME=/nonexistent PYTHONPATH={node.folder} SLURM_JOB_ID=1 USER=eve HOME=/\n"
        "export ODD='a\n=b'\necho hello\n"
    )
    node.spec(command=SHOW)
    code, output, errors = node.run()
    assert (code, errors) == (0, "")
    environment = json.loads(output)
    assert environment["PYTHONHOME"] == "/nonexistent" and environment["ODD"] == "a\n=b"
    assert (environment["HOME"], environment["USER"]) == (str(node.folder), "ada")
    assert environment["LOGNAME"] == "ada" and os.access(environment["SHELL"], os.X_OK)
    assert environment["SLURM_JOB_ID"] == str(os.getpid())
    assert not {"LC_ALL", "SHLVL", "PWD", "CARME_LOGIN_END"} & environment.keys()
    assert "login" not in json.loads((node.key / "facts.json").read_text())


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("echo oh dear >&2; exit 1", "with exit code 1 before the job's command"),
        ("exec sleep 1000", "had not ended after 1 seconds and were stopped"),
        ("sleep 1000 & kill -9 $$", "with exit code 137 before the job's command"),
        ("exec >/dev/null; sleep 1000", "had not ended after 1 seconds"),
        (None, "Your login shell /no/such/shell cannot be started on"),
    ],
)
def test_what_login_files_did_is_reported(node: Node, profile: str | None, words: str) -> None:
    before = IMPATIENT_LOGIN if "after 1 seconds" in words else PATIENT_LOGIN
    if profile is None:
        known = {"USER": "ada", "LOGNAME": "ada", "SHELL": "/no/such/shell"}
        before += f"login.identity = lambda given: {{**given, **{known}}}"
    else:
        (node.folder / ".profile").write_text(f"export MINE=1\n{profile}\n")
    del node.environment["USER"]
    node.spec(command=SHOW)
    code, output, errors = node.run(before=before)
    environment = json.loads(output)
    assert code == 0 and "MINE" not in environment and environment["TOKEN"] == "t"
    assert errors.startswith("carme-job: Your login ") and words in errors
    assert ("oh dear" in errors) == (profile is not None and "oh dear" in profile)
    noted = json.loads((node.key / "facts.json").read_text())["login"]
    assert words in noted and "\n" not in noted
    assert environment["HOME"] == str(node.folder)
    if profile is not None:
        assert environment["USER"] == environment["LOGNAME"] == pwd.getpwuid(os.getuid()).pw_name
    else:
        assert environment["SHELL"] == "/bin/sh"


def test_only_one_of_all_submissions_begins(node: Node) -> None:
    node.spec(command=["sh", "-c", "echo began"])
    for _ in range(2):  # Slurm may start one submission again, once it has ended the first try
        assert node.run("--submission", "2")[:2] == (0, "began\n")
    for late in ([], ["--submission", "3"]):
        code, output, errors = node.run(*late)
        assert (code, output) == (Exit.BEGUN_BEFORE, "")
        assert "does not start again" in errors


def test_a_container_gets_its_image_binds_and_environment(node: Node) -> None:
    node.script("first", "echo hello; exit 5")
    code, output, _ = node.run()
    assert (code, output) == (5, "hello\n")
    (call,) = node.calls("apptainer")
    text = call["arguments"]
    image = text.index(str(node.folder / "torch.sif"))
    assert text[:6] == ["-q", "exec", "--contain", "--cleanenv", "--home", str(node.folder)]
    assert text[image - 2 : image] == ["--pwd", str(node.folder)]
    binds = [text[i + 1] for i, word in enumerate(text) if word == "--bind"]
    assert binds[:2] == ["/tmp:/tmp", "/usr:/usr"]
    assert "/nowhere:/nowhere" not in binds
    # With --contain it has a /dev/shm of its own; Apptainer would warn of another one in each job's log.
    assert not [bind for bind in binds if bind.startswith("/dev/shm:")]
    private = f"/tmp/carme-{os.getpid()}"
    credentials = ["--key-file", str(node.key / "fabric.key"), "--certificate", str(node.key / "fabric.pem")]
    assert text[image + 1 :] == [
        *["carme-agent", "--nodes", "1", *credentials],
        *["--announce", f"{private}/fabric.json", "--announce", str(node.key / "fabric.json")],
        *["--listen", "10.0.0.1"],
        *["--environment-file", str(node.key / "environment.json"), "--", "python", *NASTY],
    ]
    environment = call["environment"]
    assert environment["APPTAINERENV_SLURM_JOB_ID"] == str(os.getpid())
    assert environment["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment["APPTAINERENV_CARME_JOB_FOLDER"] == str(node.key)
    assert "APPTAINERENV_CARME_HELP" not in environment
    assert float(environment["APPTAINERENV_CARME_STEP_PROLOG"]) <= time.time()
    assert "TOKEN" not in environment
    assert not Path(private).exists()


@pytest.mark.parametrize("has_image", [True, False])
def test_a_job_knows_the_address_of_the_help(node: Node, has_image: bool) -> None:
    image = str(node.folder / "torch.sif") if has_image else None
    node.spec(command=SHOW, image=image, help="https://a.example/help")
    code, output, errors = node.run()
    assert code == 0, errors
    environment = node.calls("apptainer")[0]["environment"] if has_image else json.loads(output)
    name = "APPTAINERENV_CARME_HELP" if has_image else "CARME_HELP"
    assert environment[name] == "https://a.example/help"


def test_data_in_memory_is_bound_where_a_container_can_have_it(node: Node) -> None:
    """A container has a /dev/shm of its own, in which nothing can be mounted."""
    (node.folder / "data").mkdir()
    (node.folder / "data/file").write_text("content")
    source = str(node.folder / "data")
    wanted = [{"name": "all", "source": source, "target": "ram", "key": "k", "version": ""}]
    places = {"cache": str(node.folder / "cache"), "cache_gb": 1, "scratch": "", "beeond": ""}
    of_data: dict[str, Any] = {"stage": wanted, "staging": places, "results": None}
    private, memory = f"/tmp/carme-{os.getpid()}", f"/dev/shm/carme-{os.getpid()}-k"
    node.script("first", f"readlink {private}/data/all; ls -d {private}/memory-k")
    node.spec(image=str(node.folder / "torch.sif"), **of_data)
    code, output, errors = node.run()
    assert (code, output.split()) == (0, [f"{private}/memory-k"] * 2), errors
    (call,) = node.calls("apptainer")
    assert f"{memory}:{private}/memory-k:ro" in call["arguments"]
    assert not Path(private).exists() and not Path(memory).exists()
    # Without a container it is where it lies.
    node.spec(
        image=None, command=["readlink", f"{private}/data/all"], stage=wanted, staging=places, results=None
    )
    assert node.run()[1] == f"{memory}\n"


def test_agents_of_the_other_nodes_join(node: Node) -> None:
    node.spec(image=str(node.folder / "torch.sif"), nodes=3)
    node.environment["SLURM_JOB_NUM_NODES"] = "3"
    # As real agents do, the others stay until the first one leaves.
    joined, left = node.folder / "joined", node.folder / "left"
    node.script("first", f"while [ ! -e {joined} ]; do sleep 0.05; done; touch {left}; exit 3")
    node.script("join", f"touch {joined}; while [ ! -e {left} ]; do sleep 0.05; done")
    code, _, _ = node.run()
    assert code == 3
    (step,) = node.calls("srun")
    arguments = step["arguments"]
    for word in (
        "--nodes=2",
        "--ntasks=2",
        "--relative=1",
        "--overlap",
        "--cpus-per-task=4",
        "--gres=gpu:a100:2",
        "--no-kill",
    ):
        assert word in arguments
    assert "SLURM_EXPORT_ENV" not in step["environment"]
    joined = node.calls("apptainer")[1]["arguments"]
    at = joined.index("carme-agent")
    credentials = ["--key-file", str(node.key / "fabric.key"), "--certificate", str(node.key / "fabric.pem")]
    assert joined[at + 1 :] == [*credentials, "--join", "10.0.0.1:7"]


def records_what_it_sees(node: Node) -> tuple[str, Path]:
    """What has the launcher write down which nodes it has last seen, and where."""
    seen = node.folder / "seen"
    return (
        "look = other_nodes.OtherAgents._read_present\n"
        "def look_and_record(others):\n"
        "    present = look(others)\n"
        f"    with open({str(seen)!r}, 'w') as out: print(*(present or ()), file=out)\n"
        "    return present\n"
        "other_nodes.OtherAgents._read_present = look_and_record\n"
    ), seen


def keeps_the_list(node: Node, while_: str, then: str) -> Path:
    """Let the first agent keep its list of nodes as the returned file has it, until `while_` fails.

    All nodes are one here, so a process that ends takes the folder with it that the list is in.
    """
    wanted = node.folder / "wanted"
    draft = node.private / "new"
    loop = f"mkdir -p -m 700 {node.private}; cp {wanted} {draft}; mv {draft} {node.private}/hosts.hydra"
    node.script("first", f"while {while_}; do {loop}; sleep 0.02; done 2>/dev/null; {then}")
    wanted.write_text("n1:4\n")
    return wanted


def test_a_lost_node_is_brought_back_while_the_first_one_lives(node: Node) -> None:
    node.spec(image=str(node.folder / "torch.sif"), nodes=3)
    node.environment |= {"SLURM_JOB_NUM_NODES": "3", "SLURMD_NODENAME": "n1"}
    hosts, tries = keeps_the_list(node, f"[ ! -e {node.folder}/back ]", "exit 3"), node.folder / "tries"
    both, fewer = "n1:4\\nn2:4\\nn3:4\\n", "n1:4\\nn2:4\\n"
    report, seen = records_what_it_sees(node)
    is_seen = f"until grep -qs n3 {seen}; do sleep 0.05; done"
    node.script(
        "join",
        f"echo try >>{tries}; case $(wc -l <{tries}) in "
        f"1) printf '{both}' >{hosts}; {is_seen}; printf '{fewer}' >{hosts}; exit 1;; "
        "2) exit 1;; "
        f"3) printf '{both}' >{hosts}; {is_seen}; touch {node.folder}/back;; esac",
    )
    code, _, errors = node.run(before=report)
    assert (code, errors) == (3, "")
    together, *alone = [call["arguments"] for call in node.calls("srun")]
    assert "--relative=1" in together
    assert ["--nodelist=n3" in step for step in alone] == [True, True]
    assert all("--nodes=1" in step and "--gres=gpu:a100:2" in step for step in alone)


def test_a_node_that_does_not_come_back_is_given_up(node: Node) -> None:
    node.environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}
    node.spec(image=str(node.folder / "torch.sif"), nodes=2)
    enough, tries = node.folder / "enough", node.folder / "tries"
    hosts = keeps_the_list(node, f"[ ! -e {enough} ]", "exit 0")
    report, seen = records_what_it_sees(node)
    node.script(
        "join",
        f"echo try >>{tries}; [ $(wc -l <{tries}) = 1 ] || exit 1; printf 'n1:4\\nn2:4\\n' >{hosts}; "
        f"until grep -qs n2 {seen}; do sleep 0.05; done; echo n1:4 >{hosts}",
    )
    process = node.start(before=report)
    assert process.stderr is not None
    reported = process.stderr.readline()
    enough.touch()
    assert (process.wait(), len(node.calls("srun"))) == (0, 3)
    assert "After 2 tries to bring n2 back, the job goes on without it." in reported


NO_GRACE = "other_nodes.GRACE_SECONDS = 0.2"


def test_agents_that_never_joined_end_the_job_and_say_so(node: Node) -> None:
    node.environment["SLURM_JOB_NUM_NODES"] = "2"
    node.script("first", "exec sleep 600")
    node.script("join", "exit 9")
    code, _, errors = node.run(before=NO_GRACE)
    assert code == Exit.FAILED
    assert "The agents on the other nodes ended with exit code 9; the job was ended." in errors


def test_why_the_other_nodes_could_not_join_is_why_the_job_ended(node: Node) -> None:
    node.environment["SLURM_JOB_NUM_NODES"] = "2"
    node.script("first", "exec sleep 600")
    node.script("join", f"exit {int(Exit.IMAGE_MISSING)}")
    assert node.run(before=NO_GRACE)[0] == Exit.IMAGE_MISSING


def test_a_first_agent_that_dies_at_once_needs_no_others(node: Node) -> None:
    node.environment["SLURM_JOB_NUM_NODES"] = "2"
    text = (node.programs / "apptainer").read_text()
    (node.programs / "apptainer").write_text(text.replace("--announce", "--never"))
    node.script("first", "exit 4")
    assert node.run()[0] == 4
    assert node.calls("srun") == []


def test_sigterm_is_passed_on(node: Node) -> None:
    node.spec(
        command=["/bin/sh", "-c", "trap 'echo bye; exit 6' TERM; echo up; while :; do sleep 0.05; done"]
    )
    process = node.start()
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert (process.returncode, output) == (6, "bye\n")


def test_a_job_of_several_nodes_that_is_stopped_ends_as_its_first_agent_does(node: Node) -> None:
    node.environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}
    node.spec(image=str(node.folder / "torch.sif"), nodes=2)
    # It takes a while to save, and learns at once that the other agent has left.
    leave = node.folder / "leave"
    node.script(
        "first", f"trap 'touch {leave}; sleep 0.3; exit 6' TERM; echo up; while :; do sleep 0.05; done"
    )
    node.script("join", f"echo joining; while [ ! -e {leave} ]; do sleep 0.05; done")
    process = node.start()
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"up\n", "joining\n"}
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert (process.returncode, len(node.calls("srun"))) == (6, 1)
    assert "carme-job" not in errors


def test_a_command_that_ignores_sigterm_is_killed(node: Node) -> None:
    node.spec(command=["/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"])
    process = node.start(before="programs.STOP_SECONDS = 1")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert (process.returncode, output) == (137, "")


def test_a_signal_gives_the_exit_code_of_a_shell(node: Node) -> None:
    node.spec(command=["/bin/sh", "-c", "kill -9 $$"])
    assert node.run()[0] == 137


@pytest.mark.parametrize(
    ("spec", "exit_code", "words"),
    [
        ({"image": "/gone.sif"}, Exit.IMAGE_MISSING, "The image file /gone.sif is missing on"),
        ({"command": ["/no/such"]}, Exit.NO_COMMAND, "'/no/such' cannot be run on"),
        (
            {"command": ["true"], "workdir": "/no/where"},
            Exit.NO_WORKDIR,
            "The folder /no/where cannot be entered on",
        ),
    ],
)
def test_a_failed_start_is_reported_in_one_sentence(
    node: Node, spec: dict[str, Any], exit_code: Exit, words: str
) -> None:
    node.spec(**spec)
    code, _, errors = node.run()
    assert code == exit_code
    assert errors.startswith(f"carme-job: {words}")
    assert len(errors.splitlines()) == 1


def test_a_missing_apptainer_is_reported(node: Node) -> None:
    (node.programs / "apptainer").unlink()
    node.environment["PATH"] = str(node.programs)
    code, _, errors = node.run()
    assert (code, "Apptainer is not installed on" in errors) == (Exit.NO_APPTAINER, True)


@pytest.mark.parametrize("image", [True, False])
def test_a_home_that_cannot_be_written_is_reported(node: Node, image: bool) -> None:
    if not image:
        node.spec(command=["true"])
    # Root may write anywhere but into a file system that takes nothing.
    node.environment["HOME"] = "/proc"
    code, _, errors = node.run()
    assert code == Exit.HOME_NOT_WRITABLE
    assert errors.startswith("carme-job: The home directory /proc cannot be written on")
    assert len(errors.splitlines()) == 1


def test_a_missing_specification_or_job_is_reported(node: Node) -> None:
    (node.key / "spec.json").unlink()
    assert "spec.json cannot be read on" in node.run()[2]
    del node.environment["SLURM_JOB_ID"]
    assert "This is not inside a Slurm job. Start jobs with 'carme submit'." in node.run()[2]


def test_a_private_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    preparation.make_private(str(folder))
    preparation.make_private(str(folder))
    folder.chmod(0o755)
    with pytest.raises(CarmeError, match="is in the way"):
        preparation.make_private(str(folder))
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(CarmeError, match="is in the way"):
        preparation.make_private(str(folder))


def test_a_node_is_never_known_by_a_loopback_address() -> None:
    for name in ("127.0.1.1", "localhost", "no.such.name.invalid"):
        with pytest.raises(CarmeError, match="other nodes can reach"):
            preparation.address_of(name)
    assert preparation.address_of("10.1.2.3") == "10.1.2.3"


def test_only_allotted_devices_are_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,2")
    folder = str(tmp_path)
    assert container.devices(folder) == [f"{folder}/{name}" for name in ("nvidia0", "nvidia2", "nvidiactl")]
    monkeypatch.setenv("SLURM_STEP_GPUS", "1")
    assert container.devices(folder) == [f"{folder}/{name}" for name in ("nvidia1", "nvidiactl")]
    monkeypatch.delenv("SLURM_STEP_GPUS")
    monkeypatch.delenv("SLURM_JOB_GPUS")
    assert container.devices(folder) == []


def test_an_own_image_is_run_only_as_it_was_built(node: Node) -> None:
    image = node.folder / "mine.sif"
    image.write_bytes(b"an image")
    digest = "sha256:" + hashlib.sha256(b"an image").hexdigest()
    node.spec(image=str(image), own_image=True, digest=digest)
    # Anyone who may write to it changes it in the moment of the start: what runs is what was checked.
    node.script(
        "first", f"echo evil >{image}; cat {node.private}/image.sif; stat -c %a {node.private}/image.sif"
    )
    code, output, errors = node.run()
    assert (code, output) == (0, "an image400\n"), errors
    (call,) = node.calls("apptainer")
    assert str(image) not in call["arguments"] and f"{node.private}/image.sif" in call["arguments"]
    assert not node.private.exists(), "the copy ends with the job"
    image.write_bytes(b"another image")
    code, _output, errors = node.run()
    assert code == Exit.IMAGE_CHANGED and "is not what was built" in errors
    assert len(node.calls("apptainer")) == 1


def test_the_copy_of_an_own_image_lies_on_the_nodes_disk(node: Node) -> None:
    image = node.folder / "mine.sif"
    image.write_bytes(b"an image")
    digest = "sha256:" + hashlib.sha256(b"an image").hexdigest()
    place = node.folder / f"cache/jobs/{os.getpid()}"
    place.mkdir(parents=True)
    staging = {"cache": str(node.folder / "cache")}
    node.spec(image=str(image), own_image=True, digest=digest, staging=staging)
    assert node.run()[0] == 0
    assert f"{place}/image.sif" in node.calls("apptainer")[0]["arguments"]
    assert not list(place.iterdir())


def test_a_job_notes_its_image_and_the_revision_of_its_folder(node: Node) -> None:
    folder = node.folder / "code/deep"
    folder.mkdir(parents=True)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t.example", "-C", str(node.folder / "code")]
    for words in (["init", "-q", "-b", "topic/x"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    node.spec(command=["true"], workdir=str(folder), image_name=None, digest="")
    reported = {"repository": str(node.folder / "code"), "branch": "topic/x", "revision": head}

    def noted() -> dict[str, str]:
        (node.key / "begun").unlink(missing_ok=True)
        assert node.run()[0] == 0
        return json.loads((node.key / "facts.json").read_text())

    assert noted() == {"image": "", "digest": "", **reported}
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    assert noted()["revision"] == head
    subprocess.run([*git, "checkout", "-q", "--detach"], check=True)
    assert noted() == {"image": "", "digest": "", **reported, "branch": ""}
    subprocess.run([*git, "worktree", "add", "-q", "-b", "other", str(node.folder / "tree")], check=True)
    node.spec(command=["true"], workdir=str(node.folder / "tree"), image_name="torch", digest="sha256:1")
    assert noted() == {
        "image": "torch", "digest": "sha256:1", "repository": str(node.folder / "tree"), "branch": "other",
        "revision": head,
    }  # fmt: skip
    (node.folder / "code/.git/HEAD").write_text("ref: ../../../etc/passwd")
    node.spec(command=["true"], workdir=str(folder))
    assert noted() == {"image": "", "digest": ""}
