"""Slurm through pyslurm where that reports the same as Slurm's programs, and through these for the rest."""

import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from carme.errors import SlurmError
from carme.jobs import Cluster, Job, Reservation
from carme.slurm.commands import SlurmCommands
from carme.slurm.gateway import MANY_JOBS
from carme.slurm.library import records
from carme.slurm.library.child import Library, LibraryFailed

_log = logging.getLogger("carme.slurm")
_T = TypeVar("_T")

REST = 60.0  # seconds for which the programs are queried after the library has failed


class SlurmLibrary(SlurmCommands):
    """The adapter to pyslurm.

    It reads what is requested again and again: the pulse, the queue, nodes and partitions, reservations. What
    is done as somebody else, or changes something, needs a process of its own anyway. What else could be read
    stays with the commands, as pyslurm 24.11 reports it differently: exit codes from 128 on are less by 128,
    licences lack what is reserved, and jobs in the accounting lack their comments, which say what is ours.

    Where the library fails, this question and those of the next minute are put to the commands.

    Args:
        python, cluster: As for `SlurmCommands`.
        interpreter: The Python that has pyslurm.
    """

    def __init__(
        self, python: str = sys.executable, cluster: str = "", interpreter: str = sys.executable
    ) -> None:
        super().__init__(python, cluster)
        self._library = Library(interpreter)
        self._resting_until = 0.0
        self._count = 0  # jobs at the last poll
        self._jobs: dict[int, Job] = {}
        self._serial = ""  # of the answer that they came with

    @property
    def has_many_jobs(self) -> bool:
        return self._count > MANY_JOBS

    async def pulse(self) -> str:
        # The library reads all jobs for it, too.
        if self.has_many_jobs:
            return secrets.token_hex(8)
        known = await self._ask("pulse", str)
        return await super().pulse() if known is None else known

    async def queue(self) -> list[Job]:
        known = await self._ask("changes", self._changed, known=self._serial)
        jobs = await super().queue() if known is None else known
        self._count = len(jobs)
        return jobs

    def _changed(self, answer: Mapping[str, Any]) -> list[Job]:
        """The jobs, those that have not changed as they were at the last poll."""
        changed = {job.id: job for job in records.queue(answer["changed"])}
        self._jobs = {number: changed.get(number) or self._jobs[number] for number in answer["ids"]}
        self._serial = answer["serial"]
        return list(self._jobs.values())

    async def cluster(self) -> Cluster:
        known = await self._ask("cluster", records.cluster)
        return await super().cluster() if known is None else known

    async def reservations(self) -> list[Reservation]:
        known = await self._ask("reservations", records.reservations)
        return await super().reservations() if known is None else known

    async def close(self) -> None:
        await self._library.close()

    async def _ask(self, question: str, read: Callable[[Any], _T], **about: str) -> _T | None:
        """What the library reports; None where the programs are to be used.

        Raises:
            SlurmError: Slurm refuses, or does not answer: the programs would get no further.
        """
        if time.monotonic() < self._resting_until:
            return None
        try:
            return read(await self._library.ask(question, **about))
        except SlurmError:
            raise
        except Exception as error:
            reason = error.message if isinstance(error, LibraryFailed) else f"pyslurm raised {error!r}."
            self._resting_until = time.monotonic() + REST
            _log.warning("%s Slurm's commands are used instead for %.0f seconds.", reason, REST)
            return None
