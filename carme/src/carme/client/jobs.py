"""Jobs from a program: functions, scripts and commands."""

from __future__ import annotations

import base64
import importlib.resources
import json
import os
import pickle
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import cloudpickle.cloudpickle

from carme import api
from carme.broker.protocol import JobFacts
from carme.client.connection import Connection
from carme.client.pages import items
from carme.errors import CarmeError, InvalidRequest
from carme.jobs import JobState
from carme.jobs.scripts import check_text, name_of

__all__ = ["Array", "Job", "JobFailed", "Jobs"]

Value = TypeVar("Value")

#: The program that runs the function; what it needs lies beside it.
_RUN = (
    "import os, runpy; "
    "runpy.run_path(os.environ['CARME_JOB_FOLDER'] + '/files/runner.py', run_name='__main__')"
)
MAXIMUM_BYTES = 600_000  # of a function with its arguments, as text
LOOK, CALM = 1.0, 10.0  # seconds between two looks at a job
LAST_LINES = 20


class JobFailed(CarmeError):
    """The job ended without a result: it failed, was cancelled, or ran out of time or memory."""

    default_code = "job-failed"


class Job:
    """A job of mine.

    Args:
        connection: To the portal.
        id: Its number.
        known: What is known of it already.
        returns: Whether it runs a function, so that `result` is what that returns.
    """

    def __init__(
        self, connection: Connection, id: int, known: api.JobOut | None = None, returns: bool = False
    ) -> None:
        self._connection, self.id, self._known, self._returns = connection, id, known, returns

    def __repr__(self) -> str:
        return f"<Job {self.id} {self._known.state if self._known else ''}>".replace(" >", ">")

    def info(self) -> api.JobOut:
        """What Slurm knows of it now."""
        if self._known is None or self._known.active:
            self._known = api.JobOut.model_validate(self._connection.ask("GET", f"jobs/{self.id}"))
        return self._known

    @property
    def state(self) -> JobState:
        """Its state now."""
        return self.info().state

    def facts(self) -> JobFacts:
        """Where it began: its image's digest, and the Git revision of its working folder."""
        return JobFacts.model_validate(self._connection.ask("GET", f"jobs/{self.id}/facts"))

    def done(self) -> bool:
        """Whether it is over."""
        return not self.info().active

    def wait(self, timeout: float | None = None) -> api.JobOut:
        """Wait until it is over.

        Raises:
            TimeoutError: It is not after `timeout` seconds.
        """
        end, pause = time.monotonic() + (timeout or 0), LOOK
        while not self.done():
            if timeout is not None and time.monotonic() + pause > end:
                raise TimeoutError(
                    f"Job {self.id} is not over after {timeout:g} s; its state is {self.info().state}."
                )
            time.sleep(pause)
            pause = min(CALM, pause * 1.2)
        return self.info()

    def logs(self, follow: bool = False) -> Iterator[str]:
        """What it has written, in parts; with `follow` until it is over."""
        return self._text("log", follow)

    def result(self, timeout: float | None = None) -> Any:
        """What the function returned; of a script or a command, what it wrote. Waits until the job is over.

        The value is unpickled: only the job's own account could have written it.

        Raises:
            JobFailed: It ended otherwise; a function's own exception is its cause (`__cause__`).
            TimeoutError: It is not over after `timeout` seconds.
        """
        info = self.wait(timeout)
        text = "".join(self._text("result", False))
        if text:
            found = json.loads(text)
            if not found["error"]:
                return pickle.loads(base64.b64decode(found["value"]))
            failure = JobFailed(f"The function of job {self.id} failed: {found['error'].strip()}")
            cause = None
            if found["raised"]:
                try:
                    cause = pickle.loads(base64.b64decode(found["raised"]))
                except Exception:
                    cause = None  # its class is not here
            raise failure from cause
        if info.state is JobState.COMPLETED and not self._returns:
            return "".join(self.logs())
        last = "\n".join("".join(self._readable_log()).splitlines()[-LAST_LINES:])
        said = info.explanation or f"Its state is {info.state}."
        raise JobFailed(
            f"Job {self.id} left no result. {said}" + (f"\nIts last lines:\n{last}" if last else "")
        )

    def _readable_log(self) -> Iterator[str]:
        try:
            yield from self.logs()
        except CarmeError as error:
            yield str(error)

    def cancel(self) -> None:
        """End it."""
        self._connection.ask("DELETE", f"jobs/{self.id}")

    def resubmit(self) -> Job:
        """The same job once more."""
        new = self._connection.ask("POST", f"jobs/{self.id}/resubmit")
        return Job(self._connection, new["id"], returns=self._returns)

    def _text(self, what: str, follow: bool) -> Iterator[str]:
        offset, pause = 0, LOOK
        while True:
            part = api.LogOut.model_validate(
                self._connection.ask("GET", f"jobs/{self.id}/{what}", offset=offset)
            )
            if part.text:
                offset, pause = part.offset, LOOK
                yield part.text
                continue
            if part.over or not follow:
                return
            time.sleep(pause)
            pause = min(CALM, pause * 1.5)


class Array(list[Job]):
    """Jobs that belong together, in the order of their items."""

    def results(self, timeout: float | None = None) -> list[Any]:
        """Their results. Raises what `Job.result` raises, for the first that failed."""
        end = None if timeout is None else time.monotonic() + timeout
        return [job.result(None if end is None else max(0.0, end - time.monotonic())) for job in self]

    def cancel(self) -> None:
        """End them all."""
        for job in self:
            job.cancel()


class Jobs:
    """My jobs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def submit(
        self,
        what: Callable[..., Value] | str | Path | list[str],
        /,
        *arguments: Any,
        gpus: int = 0,
        nodes: int = 1,
        minutes: int | None = None,
        gpu_type: str | None = None,
        cpus: int | None = None,
        memory_mb: int | None = None,
        image: str | None = None,
        name: str | None = None,
        partition: str | None = None,
        account: str | None = None,
        reservation: str | None = None,
        workdir: str | None = None,
        environment: dict[str, str] | None = None,
        stage: Sequence[str] = (),
        results: str | None = None,
        named: dict[str, Any] | None = None,
    ) -> Job:
        """Start a batch job.

        Args:
            what: A function; a script of this computer (a path), which is sent along; or a command (a list).
            arguments: The function's or the script's.
            gpus, cpus, memory_mb: On each node; processors and memory (MiB) by default the share of the GPUs.
            nodes: How many; the program itself starts on the first one.
            minutes: How long it may run; by default what the site says.
            image: What it runs in; by default directly on the node. A function needs the same version of
                Python (3.x) there as here.
            stage: What is to be near before it begins: the site's datasets, or absolute paths of the
                cluster, each with `local:` (default), `scratch:` or `ram:` in front; see `CARME_DATA`.
            results: The folder of the cluster to which what it leaves in `CARME_RESULTS` is copied.
            named: The function's arguments by name.

        Raises:
            InvalidRequest: With the field, and what is possible.
        """
        asked: dict[str, Any] = {
            "gpus_per_node": gpus,
            "nodes": nodes,
            "minutes": minutes,
            "gpu_type": gpu_type,
            "cpus_per_node": cpus,
            "memory_mb_per_node": memory_mb,
            "image": image,
            "partition": partition,
            "account": account,
            "reservation": reservation,
            "workdir": workdir,
            "environment": environment or {},
            "stage": list(stage),
            "results": results,
        }
        if isinstance(what, str | Path):
            path = Path(what)
            asked |= {"script": _script(path), "arguments": [str(one) for one in arguments]}
            asked["name"] = name or name_of(path.name)
        elif isinstance(what, list):
            asked |= {
                "command": [*what, *map(str, arguments)],
                "name": name or name_of(what[0] if what else ""),
            }
        elif callable(what):
            asked |= _call(what, arguments, named or {})
            asked["name"] = name or name_of(getattr(what, "__name__", "function"))
        else:
            raise InvalidRequest(
                f"A job is a function, the path of a script, or a list of words, not {type(what).__name__}.",
                "Give one of these.",
                field="what",
            )
        found = self._connection.ask("POST", "jobs", asked)
        return Job(self._connection, found["id"], returns=callable(what))

    def map(self, function: Callable[..., Value], /, *arguments: Iterable[Any], **asked: Any) -> Array:
        """Start a job for each item of the iterables, as the built-in `map` calls a function.

        Args:
            asked: As for `submit`.

        Raises:
            InvalidRequest: As `submit`; jobs that were started before are ended.
        """
        started = Array()
        try:
            for one in zip(*arguments, strict=False):
                started.append(self.submit(function, *one, **asked))
        except BaseException:
            started.cancel()
            raise
        return started

    def get(self, job_id: int) -> Job:
        """One of my jobs. Raises NotFound."""
        job = Job(self._connection, job_id)
        job.info()
        return job

    def list(
        self,
        *,
        q: str | None = None,
        state: str | None = None,
        kind: str | None = None,
        partition: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = 50,
    ) -> Sequence[Job]:
        """My jobs of all years, newest first.

        Args:
            q: Part of the name, or the number.
            state: `pending`, `running`, `completed`, `cancelled` or `failed`.
            kind: `batch`, `session` or `other`.
            since, until: Submitted in this time; with a zone.
            limit: How many at most; None: all.
        """
        query = {"q": q, "state": state, "kind": kind, "partition": partition}
        query |= {"since": since and since.isoformat(), "until": until and until.isoformat()}
        found = items(self._connection, "jobs", limit, **query)
        known = [api.JobOut.model_validate(one) for one in found]
        return [Job(self._connection, one.id, one) for one in known]


def _script(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"The script {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}.",
            "Name a script of this computer; a command is a list of words.",
            field="script",
        ) from None
    check_text(text)
    return text


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The part of a request that calls a function in the job."""
    module = sys.modules.get(getattr(function, "__module__", ""), None)
    mine = (
        module is not None and module.__name__ != "__main__" and _is_mine(getattr(module, "__file__", None))
    )
    if mine and module is not None:
        cloudpickle.register_pickle_by_value(module)  # the job cannot import what lies here
    try:
        call = cloudpickle.dumps((function, arguments, named))
    except Exception as error:
        raise InvalidRequest(
            f"The function or its arguments cannot be sent: {error}.",
            "Open files and connections in the function itself.",
            field="function",
        ) from None
    finally:
        if mine and module is not None:
            cloudpickle.unregister_pickle_by_value(module)
    text = base64.b64encode(call).decode()
    if len(text) > MAXIMUM_BYTES:
        raise InvalidRequest(
            f"The function with its arguments has {len(text)} bytes; at most {MAXIMUM_BYTES} can be sent.",
            "Put large data into a file of your home, and have the function read it.",
            field="function",
        )
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return {
        "command": ["python3", "-c", _RUN],
        "files": {
            "function.json": json.dumps({"python": version, "call": text}),
            "runner.py": importlib.resources.files("carme.client").joinpath("runner.py").read_text("utf-8"),
            "cloudpickle.py": Path(cloudpickle.cloudpickle.__file__ or "").read_text("utf-8"),
        },
    }


def _is_mine(file: str | None) -> bool:
    """Whether a module lies neither in the standard library nor among installed packages."""
    if file is None:
        return False
    places = [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]
    return not any(os.path.realpath(file).startswith(os.path.realpath(place) + os.sep) for place in places)
