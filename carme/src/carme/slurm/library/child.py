"""The child process that asks Slurm's library, seen from the broker."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

from carme.errors import CarmeError, SlurmError
from carme.slurm.account import UnixAccount
from carme.slurm.library import worker
from carme.slurm.programs import TIMEOUT
from carme.slurm.refusals import refusal

QUESTIONS_PER_CHILD = 20_000  # then another child takes over, should the library lose memory
LAST_WORDS = 2000  # bytes
OWN_END = 2.0  # seconds for a child that fails to say why


class LibraryFailed(CarmeError):
    """The library gave no answer that can be used; Slurm itself may well have one."""

    default_code = "library"


class Library:
    """One child at a time, started when it is needed; questions wait for each other.

    Args:
        python: The interpreter that has pyslurm.
    """

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._words = bytearray()
        self._question_count = 0
        self._turn = asyncio.Lock()

    async def ask(self, question: str, **about: str) -> Any:
        """The worker's answer.

        Args:
            about: What the question is about, as the worker's function takes it.

        Raises:
            SlurmError: Slurm refuses, or does not answer.
            LibraryFailed: The child has ended, or could not read what Slurm sent.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(TIMEOUT):
                    message = await self._exchange(question, about)
            except TimeoutError:
                await self._end()
                raise SlurmError(
                    f"Slurm does not answer: pyslurm had no answer after {TIMEOUT:.0f} seconds.",
                    "Running jobs go on; try again in a moment, or tell an administrator.",
                    code="slurm-away",
                ) from None
            except (OSError, EOFError) as error:
                killed = _signal(await self._own_end())
                words = await self._end()
                reason = "; ".join(filter(None, (words, killed))) or error or type(error).__name__
                raise LibraryFailed(f"pyslurm ended: {reason}.") from None
            except ValueError as error:
                await self._end()
                raise LibraryFailed(f"pyslurm's answer cannot be read: {error}.") from None
            except BaseException:
                # Nobody waits for this answer any more: the next one must not be taken for it.
                await self._end()
                raise
            # Where Slurm did not answer, another child reads slurm.conf anew: it may name another controller.
            if "refused" in message or self._question_count >= QUESTIONS_PER_CHILD:
                await self._end()
        if "refused" in message:
            raise refusal("pyslurm", message["refused"])
        if "failed" in message:
            raise LibraryFailed(f"pyslurm cannot read Slurm's answer: {message['failed']}.")
        return message["answer"]

    async def close(self) -> None:
        """End the child."""
        await self._end()

    async def _exchange(self, question: str, about: dict[str, str]) -> dict[str, Any]:
        process = self._process or await self._start()
        assert process.stdin and process.stdout
        self._question_count += 1
        process.stdin.write(json.dumps({"ask": question, "about": about}).encode() + b"\n")
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(8))
        return json.loads(await process.stdout.readexactly(size))

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            # Isolated: nothing that a site sets for Python reaches it.
            *[self._python, "-I", str(worker.__file__)],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=UnixAccount.numbered(os.getuid()).environment(),
            cwd="/",
            start_new_session=True,
            umask=0o077,
        )
        self._question_count = 0
        self._words.clear()
        assert process.stderr
        self._listening = asyncio.create_task(self._listen(process.stderr))
        return process

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        """Keep the last of what the library complains about, which shows why it ended."""
        while part := await stream.read(1 << 12):
            self._words += part
            del self._words[:-LAST_WORDS]

    async def _own_end(self) -> int | None:
        """The code with which the child ends by itself, having closed its output; None if it does not."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OWN_END):
                    return await self._process.wait()
        return None

    async def _end(self) -> str:
        """End the child; the last line that it wrote."""
        process, listening = self._process, self._listening
        self._process = self._listening = None
        if process is None or listening is None:
            return ""
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await listening
        # asyncio offers no other way to let go of the pipes.
        process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]
        lines = [line for line in self._words.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip().rstrip(".")[:300] if lines else ""


def _signal(code: int | None) -> str:
    """The signal that has ended a process, such as the kernel's for want of memory; empty where none has."""
    return f"killed by signal {-code}" if code is not None and code < 0 else ""
