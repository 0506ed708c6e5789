"""Functions of a net that run as jobs of a Slurm cluster: `net.start(workers=SlurmJobs(carme.Client, ...))`.

The net's own workers are then processes that submit a job for each task and wait for what it gives. Marking,
journal and retries are the net's; where and when a job runs is Slurm's to choose. Functions that use ranges,
and commands, run in the net's workers, beside the program.

Jobs are submitted through a client of the site; of it this module knows only what `Client` and `Job` say.
"""

import contextlib
import fcntl
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from carme_runtime.petri import forwarding
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.model import Transition

#: Jobs that wait or run at the same time, where nobody says how many.
_COUNT = 8
#: How often a task's job is submitted that was lost, and of a job the states that say so.
_STARTS, _LOST = 4, ("BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "PREEMPTED")
#: Errors of a client, by their names: a job ended without a result; the site does not answer; Slurm does not,
#: or refuses what it gets; the site refuses.
_FAILED, _SILENT, _SLURM = "JobFailed", ("Unreachable", "BrokerUnavailable", "BrokerTimeout"), "SlurmError"
_REFUSED = ("Denied", "InvalidRequest")
#: The code of an error of a site that is not the one it should be: nothing was sent, and nothing will be.
_DISTRUSTED = "certificate"
#: Seconds between two tries to reach the site, and how many.
_PAUSE, _TRIES = 10.0, 360
#: The folder in that of a run which names its jobs: by their numbers, and before these are known by a mark in
#: their names.
_FOLDER = "jobs"
_NAME_LENGTH = 64
#: Seconds after which a submission that is broken off has come to the site, or never will.
_SUBMISSION_SECONDS = 120.0


class Job(Protocol):
    """A job, as `carme.Client.submit` gives it."""

    @property
    def id(self) -> int:
        """Its number."""
        ...

    @property
    def state(self) -> str:
        """Slurm's word for its state."""
        ...

    def result(self) -> Any:
        """What its function returned; waits.

        Raises:
            JobFailed: It ended without a result. Where its function raised, `by_function` is true, and the
                function's exception the cause.
            Unreachable: The site does not answer.
        """

    def cancel(self) -> None:
        """End it."""


class Jobs(Protocol):
    """The jobs of a client."""

    def get(self, number: int, /) -> Job:
        """One of them."""
        ...

    def list(self, *, q: str) -> Sequence[Job]:
        """Those that have this in their names."""
        ...


class Client(Protocol):
    """A client of a site, such as `carme.Client`."""

    @property
    def jobs(self) -> Any:
        """See `Jobs`."""

    def submit(self, function: Any, /, *arguments: Any, named: dict[str, Any], **options: Any) -> Any:
        """Start a function with these arguments as a job; see `Job`."""


class SlurmJobs:
    """Slurm jobs as a net's workers: one job for each task.

    Args:
        connect: Makes a client: `carme.Client`, or a function without parameters. Each of the net's workers
            calls it once, as connections cannot be shared between processes.
        jobs: The most that wait or run at the same time.
        options: Of each job, as the client's `submit` takes them, such as image, gpus, cpus, minutes.

    Raises:
        PetriError: `connect` makes no client, or the number makes no sense.
    """

    def __init__(self, connect: Callable[[], Client], jobs: int = _COUNT, **options: Any) -> None:
        if not callable(connect):
            raise PetriError(
                f"A {type(connect).__name__} makes no client: each worker needs one of its own.",
                "Give what makes it: SlurmJobs(carme.Client, ...).",
            )
        if isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= 1024:
            raise PetriError(f"{jobs!r} is not a valid number of jobs.", "Give a number from 1 to 1024.")
        self.connect, self.count, self.options = connect, jobs, options
        self._clients: dict[int, Client] = {}

    @property
    def client(self) -> Client:
        """The client of this process."""
        if os.getpid() not in self._clients:
            self._clients = {os.getpid(): self.connect()}
        return self._clients[os.getpid()]

    def forwarded(self, net: Definition, folder: Path) -> Definition:
        """The net as its own workers have it, which submit what its functions do.

        Args:
            net: Which.
            folder: Of its run, where the numbers of jobs are noted.

        Raises:
            PetriError: The site is not reached, or the folder cannot be written.
        """
        try:
            (folder / _FOLDER).mkdir(exist_ok=True)
            self.client.jobs  # noqa: B018
        except Exception as error:
            raise PetriError(
                f"The site cannot be reached for Slurm jobs: {_sentence(error)}",
                "Sign in with carme login, or give another client.",
            ) from None
        return forwarding.forwarded(
            net, lambda transition: _Submitted(transition, self, folder / _FOLDER), limited=False
        )

    def cancel_left(self, folder: Path) -> list[str]:
        """Cancel jobs of a run whose tasks nobody waits for any more.

        Args:
            folder: Of the run.

        Returns:
            What could not be cancelled, in sentences.
        """
        trouble = []
        for note in sorted((folder / _FOLDER).glob("*")):
            try:
                if not self.cancel(note):
                    trouble.append(
                        f"A job with {note.name} in its name may still begin: it was being submitted."
                    )
            except Exception as error:
                trouble.append(f"Job {note.name} of the net may still run: {_sentence(error)}")
        return trouble

    def cancel(self, note: Path) -> bool:
        """Cancel the job of a note, which goes with it; False where it may not have come to the site yet.

        Args:
            note: Which. What the client raises is raised.
        """
        try:
            came = self._cancel(note)
        except Exception as error:
            if not _is_over(error):
                raise
            came = True
        if came:
            note.unlink(missing_ok=True)
        return came

    def _cancel(self, note: Path) -> bool:
        if note.name.isdigit():
            self.client.jobs.get(int(note.name)).cancel()
            return True
        try:
            age = time.time() - note.stat().st_mtime
        except FileNotFoundError:
            return True
        found = self.client.jobs.list(q=note.name)
        for job in found:
            job.cancel()
        return bool(found) or age > _SUBMISSION_SECONDS


class _Submitted:
    """What a transition does, as a job."""

    def __init__(self, transition: Transition, jobs: SlurmJobs, folder: Path) -> None:
        self._body, self._generates, self._name = transition.body, transition.generates, transition.name
        self._jobs, self._folder, self._limit = jobs, folder, transition.limit

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run it, and wait for what it gives."""
        self._cancel_abandoned()
        for start in range(1, _STARTS + 1):
            with self._noted(arguments, keywords) as (job, note):
                loss, value = self._wait_for(job, note)
            if loss is None:
                return value
            if start == _STARTS:
                raise loss
            print(f"Job {job.id} of transition {self._name} was lost; the task runs again.")
        raise AssertionError("The last start returns or raises.")

    def _wait_for(self, job: Any, note: Path) -> tuple[Exception | None, Any]:
        """What a job that was lost raised, or None and what its function gave."""
        try:
            value = _patiently(job.result)
        except Exception as error:
            by_function = getattr(error, "by_function", False)
            if not by_function and type(error).__name__ != _FAILED:
                raise  # it may not be over
            lost = not by_function and _patiently(lambda: str(job.state)) in _LOST
            note.unlink(missing_ok=True)
            if by_function:
                raise error.__cause__ or error from None
            if not lost:
                raise
            return error, None
        note.unlink(missing_ok=True)
        return None, value

    @contextlib.contextmanager
    def _noted(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[tuple[Any, Path]]:
        """A job, and its note: there is one before the job, so that none is ever unknown.

        This process has the note locked as long as it waits for the job.
        """
        for _ in range(_TRIES):
            mark = f"t{secrets.token_hex(6)}"
            early = self._folder / mark
            with os.fdopen(os.open(early, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX)
                except OSError as error:
                    early.unlink(missing_ok=True)
                    raise PetriError(
                        f"The folder {self._folder} cannot be locked: {error.strerror}.",
                        "Start the net with a folder on a file system that has locks, such as your home.",
                    ) from None
                try:
                    job = self._submit(arguments, keywords, mark)
                except Exception as error:
                    kind = type(error).__name__
                    if kind in _REFUSED or _is_distrusted(error):
                        early.unlink(missing_ok=True)
                        raise
                    if kind not in _SILENT:
                        raise  # it may be Slurm's: the next task that starts cancels it
                    print(f"A job of transition {self._name} is submitted again: {_sentence(error)}")
                    self._withdraw(early)
                    continue
                yield job, early.rename(self._folder / str(job.id))
                return
        raise TimeoutError("The site takes no jobs")

    def _withdraw(self, note: Path) -> None:
        """See that the job of a submission that was broken off does not run; waits for the site."""
        while not _patiently(lambda: self._jobs.cancel(note)):
            time.sleep(_PAUSE)

    def _cancel_abandoned(self) -> None:
        """Cancel jobs for which no worker waits any more: it was killed, or could not know how they end."""
        for note in sorted(self._folder.glob("*")):
            # What fails here is done later, or when the run is closed.
            with contextlib.suppress(Exception), note.open("r+b") as file:  # NFS locks for writers alone
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if note.exists():
                    self._jobs.cancel(note)

    def _submit(self, arguments: tuple[Any, ...], keywords: dict[str, Any], mark: str) -> Any:
        options = {"name": f"net-{self._name}", **self._jobs.options}
        options["name"] = f"{options['name'][: _NAME_LENGTH - len(mark) - 1]}-{mark}"
        if self._limit:  # which is the job's: the time that it waits does not count
            limit = math.ceil(self._limit / 60)
            options["minutes"] = min(options.get("minutes") or limit, limit)
        if self._generates:
            call, inputs, named = forwarding.call_all, (self._body, arguments, keywords), {}
            with contextlib.suppress(ImportError):
                import cloudpickle  # pyright: ignore[reportMissingImports]

                cloudpickle.register_pickle_by_value(sys.modules[forwarding.__name__])
        else:
            call, inputs, named = self._body, arguments, keywords
        return self._jobs.client.submit(call, *inputs, named=named, **options)


def _patiently(call: Callable[[], Any]) -> Any:
    """What a call of the client gives; where the site does not answer, later."""
    for _ in range(_TRIES):
        try:
            return call()
        except Exception as error:
            if type(error).__name__ not in (*_SILENT, _SLURM) or _is_distrusted(error):
                raise
            time.sleep(_PAUSE)
    return call()


def _is_distrusted(error: Exception) -> bool:
    return getattr(error, "code", "") == _DISTRUSTED


def _is_over(error: Exception) -> bool:
    """Whether a job could not be cancelled as it has ended already."""
    return type(error).__name__ in ("NotFound", "InvalidRequest")


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
