"""Running a program: an argument list, no shell, a time limit, a limit on what it may print."""

import asyncio
import contextlib
import functools
import os
import signal
from typing import NamedTuple

from carme.errors import SlurmError
from carme.slurm.account import UnixAccount
from carme.slurm.lookups import identity_of
from carme.translation import message as _

TIMEOUT = 30.0  # seconds; Slurm's own limits are shorter
OUTPUT_OF_USERS = 4 << 20  # bytes; a program that runs as a user must not fill our memory
#: For which a program that was killed may take to end. One that waits for a file server that does not answer
#: ends only when that does.
END_SECONDS = 1.0

#: What waits for the ends of killed programs, by the number of the account that they run as.
_unended: dict[int, set[asyncio.Task[int]]] = {}


class Finished(NamedTuple):
    """How a program ended and what it wrote."""

    code: int
    output: bytes
    errors: str


async def run(
    *arguments: str,
    owner: UnixAccount | None = None,
    stdin: bytes = b"",
    environment: dict[str, str] | None = None,
) -> Finished:
    """Run a program as its `owner`, in a clean environment and a private session, else as ourselves.

    Raises:
        SlurmError: It is not installed, did not end in time, or printed too much.
    """
    program = arguments[0].rsplit("/", 1)[-1]
    account = owner or UnixAccount.numbered(os.getuid())
    identity = await identity_of(owner) if owner else {}
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=account.environment() | (environment or {}),
            cwd="/",
            start_new_session=True,
            umask=0o077,
            **identity,
        )
    except FileNotFoundError:
        raise SlurmError(
            _("The program {program} is not installed on this host.", program=program),
            _("Install Slurm's client programs."),
        ) from None
    except PermissionError as error:
        raise _forbidden(program, account, error) from None
    except OSError as error:  # such as one process too many for this service, or too long an argument
        raise SlurmError(
            _("{program} cannot be started: {why}.", program=program, why=error.strerror or error),
            _("Try again in a moment; if it stays so, tell an administrator."),
        ) from None
    try:
        async with asyncio.timeout(TIMEOUT):
            return await _finish(process, stdin, OUTPUT_OF_USERS if owner else None)
    except TimeoutError:
        raise _silent(program) from None
    except _TooMuch:
        raise SlurmError(
            _("{program} printed more than {most} bytes.", program=program, most=OUTPUT_OF_USERS)
        ) from None
    finally:
        await end(process, account.uid)


def check_home(owner: UnixAccount) -> None:
    """See that no program of an account still hangs, before one more is run that reads or writes its home.

    Each holds a process of this host until the home's file server answers.

    Raises:
        SlurmError: One hangs.
    """
    if owner.uid in _unended:
        raise SlurmError(
            _("The home directory of {name} does not answer.", name=owner.name),
            _("Try again in a moment; if it stays so, tell an administrator."),
            code="home",
        )


async def end(process: asyncio.subprocess.Process, uid: int) -> None:
    """Kill a program unless it has ended, and let go of it, also where nothing can end it now.

    Args:
        process: The program; its own session.
        uid: The number of the account that it runs as.
    """
    # What it started may still hold its pipes; asyncio offers no other way to let go of them.
    close = process._transport.close  # pyright: ignore[reportAttributeAccessIssue]
    if process.returncode is not None:
        return close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({ended}, timeout=END_SECONDS)
    finally:
        close()
        if not ended.done():
            _unended.setdefault(uid, set()).add(ended)
            ended.add_done_callback(functools.partial(_forget, uid))


def _forget(uid: int, ended: asyncio.Task[int]) -> None:
    _unended[uid].discard(ended)
    if not _unended[uid]:
        del _unended[uid]


def _forbidden(program: str, account: UnixAccount, error: OSError) -> SlurmError:
    return SlurmError(
        _(
            "{program} cannot be run as {account_name}: {why}.",
            program=program,
            account_name=account.name,
            why=error.strerror,
        ),
        _("Run the broker as root, and check that every account may execute that program."),
    )


def _silent(program: str) -> SlurmError:
    return SlurmError(
        _(
            "Slurm does not answer: {program} had not ended after {timeout:.0f} seconds.",
            program=program,
            timeout=TIMEOUT,
        ),
        _("Running jobs go on; try again in a moment, or tell an administrator."),
        code="slurm-away",
    )


class _TooMuch(Exception):
    pass


async def _finish(process: asyncio.subprocess.Process, stdin: bytes, limit: int | None) -> Finished:
    assert process.stdin and process.stdout and process.stderr
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(stdin)
        await process.stdin.drain()
        process.stdin.close()
    output, errors = await asyncio.gather(_read(process.stdout, limit), _read(process.stderr, limit))
    return Finished(await process.wait(), output, errors.decode(errors="replace"))


async def _read(stream: asyncio.StreamReader, limit: int | None) -> bytes:
    parts = bytearray()
    while part := await stream.read(1 << 16):
        parts += part
        if limit is not None and len(parts) > limit:
            raise _TooMuch
    return bytes(parts)
