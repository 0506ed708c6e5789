"""The environment that a user's login files make for a job without an image.

Slurm would read it, too (`--export=NONE`), but waits for minutes where they do not end, and then starts the
job without HOME and without a word. So the job's launcher asks the login shell itself, within a time limit,
and says what went wrong. It imports little, as somebody waits for the job.
"""

import contextlib
import os
import pwd
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

#: How long login files may take; Conda's or modules' take several seconds on a busy file system.
SECONDS = 30.0
#: What Slurm says of the job, which no login file changes.
SLURMS = ("SLURM_", "SLURMD_", "CUDA_", "NVIDIA_", "ROCR_", "GPU_DEVICE_", "CARME_")
#: What a login on the node reads before it starts the shell (pam_env).
SYSTEM_FILES = ("/etc/environment", "/etc/default/locale")
#: What the broker sets for Slurm's programs, or the shell for itself.
_NOT_PASSED = ("LC_ALL", "SLURM_EXPORT_ENV", "_", "PWD", "OLDPWD", "SHLVL")
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_MOST = 8 << 20  # bytes; no program can be started with more
_ERRORS = 4096  # bytes of what failing login files wrote last
_POLL_SECONDS = 0.02
_WITHOUT = "The job runs without what they set."


class Login(NamedTuple):
    """An environment, one sentence on what the login files did wrong, and what they wrote then."""

    environment: dict[str, str]
    note: str = ""
    errors: str = ""


def identity(given: Mapping[str, str]) -> dict[str, str]:
    """HOME, USER, LOGNAME and SHELL of the job's owner, whatever is missing in the environment given."""
    try:
        entry = pwd.getpwuid(os.getuid())
        known = entry.pw_dir, entry.pw_name, entry.pw_shell
    except KeyError:  # this node does not know the account: what the broker passed must do
        known = "/", str(os.getuid()), ""
    user = given.get("USER") or known[1]
    return {
        "HOME": given.get("HOME") or known[0] or "/",
        "USER": user,
        "LOGNAME": user,
        "SHELL": known[2] or "/bin/sh",
    }


def log_in(given: Mapping[str, str], seconds: float = SECONDS) -> Login:
    """The environment after the login files of the job's owner; without them where they fail.

    Args:
        given: The launcher's environment, with `identity` in it.
        seconds: How long they may take.
    """
    own = {name: given[name] for name in ("HOME", "USER", "LOGNAME", "SHELL")}
    base = {name: value for name, value in given.items() if name not in _NOT_PASSED} | _of_system() | own
    shell = own["SHELL"]
    try:
        found, note, errors = _ask(shell, base, seconds)
    except OSError as error:
        note = f"Your login shell {shell} cannot be started on {socket.gethostname()}: {error.strerror}."
        note = f"{note} The job runs without what your login files set, with /bin/sh as its SHELL."
        return Login(base | {"SHELL": "/bin/sh"}, note)
    if found is None:
        return Login(base, note, errors)
    chosen = found.get("SHELL", "")
    if chosen.startswith("/") and os.access(chosen, os.X_OK):
        own["SHELL"] = chosen  # who cannot change the account's shell does so
    slurms = {name: value for name, value in base.items() if name.startswith(SLURMS)}
    return Login({name: value for name, value in found.items() if name not in _NOT_PASSED} | slurms | own)


def _ask(shell: str, base: dict[str, str], seconds: float) -> tuple[dict[str, str] | None, str, str]:
    """What the shell's environment is after login; or None, why, and what it wrote to standard error."""
    mark = f"carme-{os.urandom(16).hex()}"
    # These words are the same in every shell. With `exec` no logout file is read.
    command = f"echo {mark}; exec /usr/bin/env -0 CARME_LOGIN_END={mark}"
    with contextlib.suppress(OSError):
        os.chdir(base["HOME"])
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as output, tempfile.TemporaryFile() as errors:
        try:
            program = os.posix_spawn(
                shell,
                [f"-{os.path.basename(shell)}", "-c", command],
                base,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, writing, 1),
                    (os.POSIX_SPAWN_DUP2, errors.fileno(), 2),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=_IGNORED_BY_PYTHON,
            )
        finally:
            os.close(writing)
        end = time.monotonic() + seconds
        text, code = None, None
        try:
            with _end_of(program) as ended:
                text = _between(output.fileno(), mark.encode(), end, ended)
            if text is None:
                code = _code(program, end)
        finally:
            # What a login starts on purpose (an agent for ssh, say) goes on, unless the login failed.
            _kill(program, everything=text is None)
        if text is not None:
            return _parsed(text), "", ""
        size = errors.seek(0, os.SEEK_END)
        errors.seek(max(0, size - _ERRORS))
        return None, _explain_failure(shell, code, seconds), errors.read().decode(errors="replace").strip()


def _explain_failure(shell: str, code: int | None, seconds: float) -> str:
    files = "Your login files (~/.profile and the like)"
    if code is None:
        return (
            f"{files} had not ended after {seconds:g} seconds and were stopped. {_WITHOUT} "
            "Let them start nothing that waits."
        )
    return (
        f"{files} ended the login shell {shell} with exit code {code} before the job's command. {_WITHOUT} "
        "Where they have 'exit', write 'return'."
    )


@contextlib.contextmanager
def _end_of(program: int) -> Iterator[list[int]]:
    """What can be read once a program has ended; nothing where Linux (before 5.3) does not offer that."""
    try:
        descriptor = os.pidfd_open(program)
    except (AttributeError, OSError):
        yield []
        return
    try:
        yield [descriptor]
    finally:
        os.close(descriptor)


def _between(descriptor: int, mark: bytes, end: float, ended: list[int]) -> bytes | None:
    """What is written between the two marks; None if that is nothing before the end, or too much.

    Args:
        ended: What `_end_of` gives for the shell: what it started may hold its output open for ever.
    """
    first, last = mark + b"\n", b"\0CARME_LOGIN_END=" + mark + b"\0"
    read, has_begun = b"", False
    while (left := end - time.monotonic()) > 0:
        if descriptor not in select.select([descriptor, *ended], [], [], left)[0]:
            return None
        part = os.read(descriptor, 1 << 16)
        if not part:
            return None
        read += part
        if not has_begun:
            _, found, after = read.partition(first)
            has_begun = bool(found)
            read = after if has_begun else read[-len(first) :]
        if has_begun and last in read:
            return read[: read.index(last)]
        if len(read) > _MOST:
            return None
    return None


def _code(program: int, end: float) -> int | None:
    """The exit code of a shell that has written nothing; None if it has not ended."""
    while not os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        if time.monotonic() >= end:
            return None
        time.sleep(_POLL_SECONDS)
    status = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else 128 + status.si_status


def _kill(program: int, everything: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if everything else os.kill)(program, signal.SIGKILL)
    os.waitpid(program, 0)


def _parsed(text: bytes) -> dict[str, str]:
    pairs = (os.fsdecode(part).partition("=") for part in text.split(b"\0"))
    return {name: value for name, equals, value in pairs if name and equals}


def _of_system() -> dict[str, str]:
    found = {}
    for path in SYSTEM_FILES:
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                lines = file.read(1 << 16).splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.strip().removeprefix("export ").partition("=")
            if equals and name.isidentifier():
                found[name] = value.strip().strip("\"'")
    return found
