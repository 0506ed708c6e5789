"""`carme session shell`, from a real terminal into real agents."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import carme
from carme.jobs.certificate import make_certificate

from .conftest import HUB_TOKEN, MEET, PATIENCE, Job, Witness, clean_environment, private_file

MakeJob = Callable[..., Job]
VISIT = (
    "import sys; from pathlib import Path; from carme.cli.shell import visit\n"
    "from carme.errors import CarmeError\n"
    "try: sys.exit(visit(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))\n"
    "except CarmeError as error: sys.exit(f'carme: {error}')"
)


def command(job: Job, *words: str, node: int = 0, folder: Path | None = None) -> list[str]:
    return [sys.executable, "-c", VISIT, str(folder or job.folder), str(node), *words]


def environment() -> dict[str, str]:
    inside = clean_environment(TERM="xterm-256color", HERE="yes")
    return inside | {"PYTHONPATH": str(Path(carme.__file__).parents[1])}


def run(job: Job, *words: str, data: bytes = b"", **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """Without a terminal."""
    return subprocess.run(
        command(job, *words, **options), input=data, capture_output=True, env=environment(), timeout=60
    )


class Screen:
    """A terminal with a shell of the job in it."""

    def __init__(self, process_arguments: list[str]) -> None:
        self._terminal, shell_end = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(shell_end)
        self.process = subprocess.Popen(
            process_arguments,
            stdin=shell_end,
            stdout=shell_end,
            stderr=shell_end,
            env=environment(),
            start_new_session=True,
        )
        self._shell_end = shell_end
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, pattern: str) -> "re.Match[str]":
        """Wait until the screen shows `pattern`; what was shown until there is forgotten."""
        end = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.text)):
            assert select.select([self._terminal], [], [], max(0, end - time.monotonic()))[0], self.text
            self.text += os.read(self._terminal, 65536).decode(errors="replace")
        self.text = self.text[found.end() :]
        return found

    def ended(self) -> int:
        """The exit code; the terminal is as it was."""
        code = self.process.wait(PATIENCE)
        assert termios.tcgetattr(self._shell_end) == self.before
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._shell_end)
        os.close(self._terminal)


@pytest.fixture
def screen(job: Job) -> Iterator[Callable[..., Screen]]:
    opened: list[Screen] = []
    (job.folder / ".inputrc").write_text("set enable-bracketed-paste off\n")

    def start(*words: str, node: int = 0) -> Screen:
        opened.append(Screen(command(job, *words, node=node)))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_a_login_shell_has_the_jobs_environment(job: Job, screen: Callable[..., Screen]) -> None:
    shell = screen()
    shell.wait_for(r"[$#] $")
    shell.type("echo $((6*7)) $TERM $TOKEN/$HERE/$CARME_AGENT; shopt login_shell; stty size\n")
    shell.wait_for(rf"42 xterm-256color from the file//{job.socket(0)}\r\n")
    shell.wait_for(r"login_shell\s+on\r\n30 100\r\n")
    shell.type("env | grep -c JUPYTERHUB_ ; env | grep -c JPY_; exit 7\n")
    shell.wait_for(r"\n0\r\n0\r\n")
    assert shell.ended() == 7
    job.first.wait_for_error("a client at 127.0.0.1 was let in")


def test_control_keys_reach_the_program(screen: Callable[..., Screen]) -> None:
    shell = screen()
    busy = "sh -c 'echo go''ing; exec sleep 600'\n"  # its output shows that it reads keys, not the shell
    shell.type(busy)
    shell.wait_for("going")
    shell.type("\x03")
    shell.type("echo still $?\n")
    shell.wait_for(r"still 130")
    shell.type("sh -c 'echo go''ing; exec cat'; echo read $?\n")
    shell.wait_for("going")
    shell.type("\x04")
    shell.wait_for(r"read 0")
    shell.type(busy)
    shell.wait_for("going")
    shell.type("\x1a")  # Ctrl-Z: job control works
    shell.wait_for(r"Stopped")
    shell.type("kill -9 %1; exit\nexit 0\n")
    assert shell.ended() == 0


def test_the_size_of_the_terminal_follows(screen: Callable[..., Screen]) -> None:
    shell = screen("bash", "-c", "trap 'stty size' WINCH; echo ready; while :; do read -t 0.05; done")
    shell.wait_for("ready")
    shell.resize(41, 123)
    shell.process.send_signal(signal.SIGWINCH)
    shell.wait_for("41 123")


def test_a_shell_opens_on_another_node(job: Job, screen: Callable[..., Screen]) -> None:
    shell = screen(node=1)
    shell.type("echo on $SLURMD_NODENAME at $CARME_AGENT; exit\n")
    shell.wait_for(rf"\non n2 at {job.socket(1)}")
    assert shell.ended() == 0
    done = run(job, "true", node=2)
    assert done.returncode == 1
    assert b"There is no node 2 in this session. Choose one of its nodes (0: n1, 1: n2)." in done.stderr


def test_the_shell_can_start_ranks(job: Job) -> None:
    run_module = [sys.executable, "-m", "carme_runtime.launcher.command"]
    done = run(job, *run_module, "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] 0 of 2", b"[rank 1] 1 of 2"]


@pytest.mark.parametrize("node", [0, 1])
def test_pipes_pass_every_byte(job: Job, node: int) -> None:
    data = bytes(range(256)) * 20000  # 5 MiB: more than all windows hold
    done = run(job, "cat", data=data, node=node)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == data


def test_pipes_keep_the_streams_apart(job: Job) -> None:
    done = run(job, "sh", "-c", "echo out; echo err >&2; tty; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\nnot a tty\n", b"err\n")
    assert run(job, data=b"echo from a login shell $0\n").stdout == b"from a login shell bash\n"


def test_commands_end_with_the_exit_codes_of_a_shell(job: Job) -> None:
    assert run(job, "sh", "-c", "kill -9 $$").returncode == 137
    missing = run(job, "no-such-program", "x")
    assert (missing.returncode, missing.stderr) == (127, b"no-such-program: No such file or directory\n")
    assert run(job, "/").returncode == 126
    assert run(job, "printf", "%s|", "a b", "$(id)", "*").stdout == b"a b|$(id)|*|"


def test_a_command_that_does_not_read_its_input_ends(job: Job) -> None:
    assert run(job, "true", data=b"x" * 2**22).returncode == 0


def test_a_reader_that_goes_away_ends_the_command(job: Job, witness: Witness) -> None:
    text = f"{MEET}\nwhile True: print('x' * 1000)"
    there = [sys.executable, "-c", text]
    process = subprocess.Popen(
        command(job, "env", f"WITNESS={witness.environment['WITNESS']}", *there),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stdout.read(1000)
    process.stdout.close()
    assert process.wait(PATIENCE) == 141
    witness.expect(1)
    assert witness.all_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_what_runs_in_the_shell_ends_when_the_client_goes(
    screen: Callable[..., Screen], witness: Witness, script: Callable[[str], str], number: signal.Signals
) -> None:
    shell = screen()
    port = witness.environment["WITNESS"]
    shell.type(f"WITNESS={port} {sys.executable} {script(MEET + 'witness.recv(1)')}\n")
    witness.expect(1)
    shell.process.send_signal(number)
    assert witness.all_gone()
    if number != signal.SIGKILL:
        assert shell.ended() == 128 + number


def test_a_program_that_ignores_the_hangup_is_killed(job: Job, witness: Witness) -> None:
    text = MEET + (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "witness.send(b'r')\nwitness.recv(1)"
    )  # fmt: skip
    process = subprocess.Popen(
        command(job, "env", f"WITNESS={witness.environment['WITNESS']}", sys.executable, "-c", text),
        env=environment(), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    witness.expect(1)
    witness.wait_until_ready()
    process.kill()
    process.wait()
    assert witness.all_gone()


def test_the_end_of_the_job_ends_the_shell(make_job: MakeJob) -> None:
    job = make_job("n1")
    shell = Screen(command(job))
    shell.type("echo rea''dy\n")
    shell.wait_for("ready")
    assert job.end()[0] == 0
    shell.wait_for(r"The other side hung up. See whether the session still runs: carme session list")
    assert shell.ended() == 1
    shell.close()
    done = run(job, "true")
    assert (done.returncode, b"Carme cannot find the address of the job's agent" in done.stderr) == (1, True)


def test_the_loss_of_its_node_ends_the_shell(make_job: MakeJob) -> None:
    job = make_job("n1", "n2")
    shell = Screen(command(job, node=1))
    shell.type("echo rea''dy\n")
    shell.wait_for("ready")
    job.joined[0].popen.kill()
    shell.wait_for("The node of this shell was lost.")
    assert shell.ended() == 1
    shell.close()


def test_an_agent_that_was_killed_is_reported_to_be_silent(make_job: MakeJob) -> None:
    job = make_job("n1")
    job.first.popen.kill()
    job.first.popen.wait()
    done = run(job, "true")
    assert done.returncode == 1
    assert b"does not answer: " in done.stderr
    assert b"See whether the job still runs" in done.stderr


def copied(job: Job, folder: Path, **instead: str) -> Path:
    """A folder like the job's, with other contents for some files."""
    folder.mkdir()
    for name in ("fabric.json", "fabric.key", "fabric.pem"):
        private_file(folder / name, instead.get(name[-3:], (job.folder / name).read_text()))
    return folder


@pytest.mark.parametrize(
    ("instead", "logged"),
    [
        ({"key": "0" * 64}, "the connection ended within"),
        ({"pem": make_certificate()}, "no TLS with this job's certificate"),
    ],
)
def test_a_client_without_key_or_certificate_is_refused_and_logged(
    make_job: MakeJob, tmp_path: Path, instead: dict[str, str], logged: str
) -> None:
    job = make_job("n1")
    done = run(job, "true", folder=copied(job, tmp_path / "false", **instead))
    assert done.returncode == 1
    assert b"is not this job's agent, or does not know this job's key" in done.stderr
    assert run(job, "echo", "hello").stdout == b"hello\n"
    job.first.wait_for_error("refused a connection from 127.0.0.1: ")
    assert HUB_TOKEN not in job.end()[2]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_read_the_agents_address_and_key(job: Job) -> None:
    done = subprocess.run(
        [
            *[sys.executable, "-c"],
            "import os, sys; from pathlib import Path; folder = Path(sys.argv[1]); opened = []\n"
            "import carme.cli.shell\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "for name in ('fabric.key', 'fabric.pem', 'fabric.json'):\n"
            "    try: opened.append(open(folder / name))\n"
            "    except PermissionError: pass\n"
            "assert not opened, opened\n"
            "carme.cli.shell.visit(folder, 0, ['id'])",
            str(job.folder),
        ],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Carme cannot find the address of the job's agent" in done.stderr
    assert "Permission denied" in done.stderr
