"""Jobs from a program: functions, scripts and commands."""

from __future__ import annotations

import base64
import importlib.resources
import itertools
import json
import os
import pickle
import secrets
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack
from urllib.parse import urlencode

import cloudpickle
import cloudpickle.cloudpickle

from carme import api
from carme.broker.protocol import JobFacts
from carme.client.connection import Connection
from carme.client.pages import items
from carme.client.remote_object import wait_until
from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.jobs import JobState, arrays
from carme.jobs.contents import from_bytes, wire
from carme.jobs.scripts import check_text, name_of
from carme.scaling import Prediction
from carme.translation import message as _
from carme.wording import nearest

__all__ = ["Array", "Job", "JobFailed", "JobOptions", "Jobs"]

Value = TypeVar("Value")
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of one call, and those by name

#: The program that runs the function; what it needs lies beside it.
_RUN = (
    "import os, runpy; "
    "runpy.run_path(os.environ['CARME_JOB_FOLDER'] + '/files/runner.py', run_name='__main__')"
)
INLINE_BYTES = 600_000  # of a function with its arguments, as text, that travel in the request itself
MAXIMUM_BYTES = 256 << 20  # that travel beside it, into a private file of my home
PART = 8 << 20
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0  # seconds between two requests for more of a log
LAST_LINES = 20
MOST_OF_THEM = 16_384  # bytes; a line may be endless
LOG_BYTES = 1 << 20  # that are requested at once


class JobFailed(CarmeError):
    """The job ended without a result: it failed, was cancelled, or ran out of time or memory.

    Attributes:
        by_function: Whether its function raised; its exception is the cause where its class is known here.
    """

    default_code = "job-failed"
    by_function = False


class Job:
    """A job of mine.

    Args:
        connection: To the portal.
        id: Its number.
        known: What is known of it already.
        returns: Whether it runs a function, so that `result` is what that returns.
        task: Which task of the array with this number it is.
    """

    def __init__(
        self,
        connection: Connection,
        id: int,
        known: api.JobOut | None = None,
        returns: bool = False,
        task: int | None = None,
    ) -> None:
        self._connection, self.id, self._known, self._returns = connection, id, known, returns
        self.task = task

    def __repr__(self) -> str:
        return f"<Job {self.name} {self._known.state if self._known else ''}>".replace(" >", ">")

    @property
    def name(self) -> str:
        """How the commands call it: its number, or `123_4` for task 4 of array 123."""
        return str(self.id) if self.task is None else arrays.task_name(self.id, self.task)

    def info(self) -> api.JobOut:
        """What Slurm knows of it now."""
        if self._known is None or self._known.active:
            self._known = api.JobOut.model_validate(self._ask("GET", f"jobs/{self.id}"))
        return self._known

    @property
    def state(self) -> JobState:
        """Its state now."""
        return self.info().state

    def facts(self) -> JobFacts:
        """Its environment: its image's digest, and the Git revision of its working folder."""
        return JobFacts.model_validate(self._ask("GET", f"jobs/{self.id}/facts"))

    def done(self) -> bool:
        """Whether it is over."""
        return not self.info().active

    def wait(self, timeout: float | None = None) -> api.JobOut:
        """Wait until it is over.

        Raises:
            TimeoutError: It is not after `timeout` seconds.
        """
        wait_until(
            self.done,
            lambda: f"Job {self.name} is not over after {timeout:g} s; its state is {self.info().state}.",
            timeout,
        )
        return self.info()

    def logs(self, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """What it has written, in parts; with `follow` until it is over.

        Args:
            follow: Whether to go on until it is over.
            tail: How many of the lines that are there already to begin with; by default with all.
        """
        return self._text("log", follow, tail)

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
            failure = JobFailed(
                _(
                    "The function of job {name} failed: {why}",
                    name=self.name,
                    why=found["error"].strip(),
                )
            )
            failure.by_function = True
            cause = None
            if found["raised"]:
                try:
                    cause = pickle.loads(base64.b64decode(found["raised"]))
                except Exception:
                    cause = None  # its class is not here
            raise failure from cause
        if info.state is JobState.COMPLETED and not self._returns:
            return "".join(self.logs())
        last = "\n".join(self._last_words().splitlines()[-LAST_LINES:])
        message = info.explanation or f"Its state is {info.state}."
        raise JobFailed(
            f"Job {self.name} left no result. {message}" + (f"\nIts last lines:\n{last}" if last else "")
        )

    def _last_words(self) -> str:
        """The end of its log, read from there, however long it is."""
        try:
            first = self._part("log", tail=LAST_LINES, limit=1)
            # What is not UTF-8 counts for more bytes in the text than in the log.
            begin = max(0, first.offset - len(first.text.encode()), first.size - MOST_OF_THEM)
            return "".join(self._text("log", False, offset=begin))
        except CarmeError as error:
            return str(error)

    def cancel(self) -> None:
        """End it."""
        self._ask("DELETE", f"jobs/{self.id}")

    def extend(self, minutes: int) -> api.Extended:
        """Let it run longer, if the site and the schedule allow it; when it ends now."""
        found = self._connection.ask("POST", f"jobs/{self.id}/extend", {"minutes": minutes}, task=self.task)
        return api.Extended.model_validate(found)

    def resubmit(self) -> Job:
        """The same job once more; of a task, that task."""
        new = self._ask("POST", f"jobs/{self.id}/resubmit")
        return Job(self._connection, new["id"], returns=self._returns, task=self.task)

    def _ask(self, method: str, path: str, **query: Any) -> Any:
        return self._connection.ask(method, path, task=self.task, **query)

    def _part(self, what: str, **options: int | None) -> api.LogOut:
        return api.LogOut.model_validate(self._ask("GET", f"jobs/{self.id}/{what}", **options))

    def _text(self, what: str, follow: bool, tail: int | None = None, offset: int = 0) -> Iterator[str]:
        pause = FIRST_PAUSE
        while True:
            part = self._part(what, offset=offset, limit=LOG_BYTES, tail=tail)
            tail, offset = None, part.offset
            if part.text:
                pause = FIRST_PAUSE
                yield part.text
                if not (part.over and offset >= part.size):
                    continue
            if part.over or not follow:
                return
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, pause * 1.5)


class Array(list[Job]):
    """The tasks of an array of Slurm's, in the order of their items.

    Args:
        connection: To the portal.
        id: The array's number; None: it has no tasks.
        tasks: Their numbers.
        returns: Whether they run a function.
    """

    def __init__(
        self, connection: Connection, id: int | None, tasks: Iterable[int], returns: bool = False
    ) -> None:
        self._connection, self.id, self._returns = connection, id, returns
        self._tasks: dict[int, Job] = {}
        if id is not None:
            self._tasks = {task: Job(connection, id, returns=returns, task=task) for task in tasks}
        super().__init__(self._tasks.values())

    def __repr__(self) -> str:
        return f"<Array {self.id} of {len(self)} tasks>"

    def progress(self) -> api.ArrayOut:
        """How far its tasks are, in one sentence and by state: "1 of 6 tasks failed." and which.

        Raises:
            NotFound: It has no tasks, or the portal does not know them yet.
        """
        if self.id is None:
            raise NotFound(_("This array has no tasks."), _("Give 'map' at least one item."))
        return api.ArrayOut.model_validate(self._connection.ask("GET", f"jobs/{self.id}/array"))

    def failed(self) -> Sequence[Job]:
        """The tasks that have failed so far, each with its `logs`."""
        numbers = _numbers(self.progress().failed) if self.id is not None else []
        return [self._tasks[number] for number in numbers if number in self._tasks]

    def resubmit_failed(self) -> Array:
        """Those tasks once more that failed, as an array of their own, with the numbers that they have.

        Raises:
            InvalidRequest: None failed.
        """
        numbers = _numbers(self.progress().failed)
        new = self._connection.ask("POST", f"jobs/{self.id}/resubmit", failed=True)
        return Array(self._connection, new["id"], numbers, returns=self._returns)

    def infos(self) -> Sequence[api.JobOut]:
        """What is known of its tasks now; those that wait may be one job together, with `tasks`."""
        if self.id is None:
            return []
        found = items(self._connection, "jobs", None, array=self.id)
        known = [api.JobOut.model_validate(each) for each in found]
        by_task = {each.task: each for each in known if each.task is not None}
        for task, job in self._tasks.items():
            ranges = (each for each in known if each.task is None and arrays.includes(each.tasks, task))
            reported = by_task.get(task) or next(ranges, None)
            if reported is not None:
                job._known = reported
            elif known:
                job.info()  # it was cancelled while it waited, so it is not in the list any more
        return known

    def done(self) -> bool:
        """Whether all of them are over."""
        self.infos()
        return not self._active()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all of them are over.

        Raises:
            TimeoutError: They are not after `timeout` seconds.
        """
        wait_until(
            self.done,
            lambda: f"{self._active()} tasks of array {self.id} are not over after {timeout:g} s.",
            timeout,
        )

    def _active(self) -> int:
        return sum(job._known is None or job._known.active for job in self)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Their results. Waits for all; raises what `Job.result` raises, for the first that failed."""
        self.wait(timeout)
        return [job.result() for job in self]

    def cancel(self) -> None:
        """End them all."""
        if self.id is not None:
            self._connection.ask("DELETE", f"jobs/{self.id}")


def _numbers(tasks: str) -> list[int]:
    return list(arrays.numbers(tasks)) if tasks else []


class JobOptions(TypedDict, total=False):
    """What a job asks for; what is left out, the site decides.

    Attributes:
        gpus, cpus, memory_mb: On each node; processors and memory (MiB) by default the share of the GPUs.
        nodes: How many; the program itself starts on the first one.
        minutes: How long it may run.
        image: What it runs in; by default directly on the node. A function needs the same version of Python
            (3.x) there as here.
        account: The account that pays; a project's is `carme-NAME`.
        qos: Slurm's quality of service; by default that of the account.
        reservation: The name of the booking to run in.
        stage: What is to be near before it begins: the site's datasets, or absolute paths of the cluster,
            each with `local:` (default), `scratch:` or `ram:` in front; see `CARME_DATA`.
        results: The folder of the cluster to which what it leaves in `CARME_RESULTS` is copied; a task's
            goes to a folder of its number in it.
        prediction: What a probe's result says of these nodes and GPUs: `carme.scaling.Curve.prediction`.
    """

    gpus: int
    nodes: int
    minutes: int | None
    gpu_type: str | None
    cpus: int | None
    memory_mb: int | None
    image: str | None
    name: str | None
    partition: str | None
    account: str | None
    qos: str | None
    reservation: str | None
    workdir: str | None
    environment: dict[str, str]
    stage: Sequence[str]
    results: str | None
    prediction: Prediction | None


#: Fields that are called otherwise on the wire.
_WIRE = {"gpus": "gpus_per_node", "cpus": "cpus_per_node", "memory_mb": "memory_mb_per_node"}


class Jobs:
    """My jobs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def submit(
        self,
        what: Callable[..., Value] | str | Path | list[str],
        /,
        *arguments: Any,
        named: dict[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Start a batch job.

        Args:
            what: A function; a script of this computer (a path), which is sent along; or a command (a list).
            arguments: The function's or the script's.
            named: The function's arguments by name.
            options: See `JobOptions`.

        Raises:
            InvalidRequest: With the field, and what is possible.
        """
        body = self._payload(what, arguments, [(arguments, named or {})]) | _option_values(options, what)
        found = self._connection.ask("POST", "jobs", body)
        return Job(self._connection, found["id"], returns=callable(what))

    def array(
        self, what: str | Path | list[str], tasks: str, /, *arguments: Any, **options: Unpack[JobOptions]
    ) -> Array:
        """Start a script or a command as an array: one Slurm job with a task for each number.

        Args:
            what: A script of this computer (a path), which is sent along; or a command (a list).
            tasks: Their numbers, as Slurm writes them: `0-99`, `1,3,5`, `0-99%4` (four at a time). A task
                finds its number in `SLURM_ARRAY_TASK_ID`.
            arguments: The script's.
            options: See `JobOptions`; GPUs, processors, memory and time are each task's.

        Raises:
            InvalidRequest: With the field, and what is possible.
        """
        body = self._payload(what, arguments, None) | _option_values(options, what) | {"array": tasks}
        found = self._connection.ask("POST", "jobs", body)
        return Array(self._connection, found["id"], arrays.numbers(tasks))

    def map(
        self,
        function: Callable[..., Value],
        /,
        *arguments: Iterable[Any],
        at_once: int | None = None,
        named: dict[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Array:
        """Call a function for each item of the iterables, like the built-in `map`, in the tasks of an array.

        Args:
            at_once: How many tasks may run at a time; by default as many as there is room for.
            named: The same arguments by name for all of them.
            options: See `JobOptions`; GPUs, processors, memory and time are each task's.

        Raises:
            InvalidRequest: With the field, and what is possible.
        """
        calls = [(each, named or {}) for each in zip(*arguments, strict=False)]
        if not calls:
            return Array(self._connection, None, ())
        tasks = arrays.expression(len(calls), at_once)
        body = self._payload(function, (), calls) | _option_values(options, function) | {"array": tasks}
        found = self._connection.ask("POST", "jobs", body)
        return Array(self._connection, found["id"], range(len(calls)), returns=True)

    def _payload(self, what: Any, arguments: tuple[Any, ...], calls: Sequence[Call] | None) -> dict[str, Any]:
        """The part of a request that says what runs."""
        if isinstance(what, str | Path):
            return {"script": wire(_script(Path(what))), "arguments": list(map(str, arguments))}
        if isinstance(what, list):
            return {"command": [*what, *map(str, arguments)]}
        if callable(what) and calls is not None:
            return _order(_packed([what, *calls], what), self._keep)
        kinds = (
            _("the path of a script, or a list of words")
            if calls is None
            else _("a function, the path of a script, or a list of words")
        )
        raise InvalidRequest(
            _("A job is {kinds}, not {kind}.", kinds=kinds, kind=type(what).__name__),
            _("Give one of these.") if calls else _("Give one of these; functions go with 'map'."),
            field="what",
        )

    def _keep(self, data: bytes) -> str:
        """Leave bytes in a private file of my home; its path there."""
        name, path = secrets.token_hex(16), ""
        for offset in range(0, len(data), PART):
            query = urlencode({"id": name, "offset": offset, "size": len(data)})
            path = self._connection.send("jobs/inputs", data[offset : offset + PART], query)["path"]
        return path

    def get(self, job_id: int, task: int | None = None) -> Job:
        """One of my jobs, or a task of an array. Raises NotFound."""
        job = Job(self._connection, job_id, task=task)
        job.info()
        return job

    def get_array(self, array_id: int) -> Array:
        """An array of mine with all of its tasks. Raises NotFound."""
        array = Array(self._connection, array_id, ())
        states = array.progress().states.values()
        tasks = sorted(number for numbers in states for number in arrays.numbers(numbers))
        return Array(self._connection, array_id, tasks)

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
        known = [api.JobOut.model_validate(each) for each in found]
        return [Job(self._connection, each.id, each) for each in known]


def _script(path: Path) -> str:
    try:
        text = from_bytes(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(
            _("The script {path!r} cannot be read: {why}.", path=str(path), why=error.strerror),
            _("Name a script of this computer; a command is a list of words."),
            field="script",
        ) from None
    check_text(text)
    return text


def _option_values(options: JobOptions, what: Any) -> dict[str, Any]:
    """What is requested, by the API's names; the job's name is by default that of what it runs."""
    for name in options:
        if name not in JobOptions.__annotations__:
            raise InvalidRequest(
                _("A job has no {name!r}.", name=name), nearest(name, JobOptions.__annotations__), field=name
            )
    given: dict[str, Any] = {_WIRE.get(name, name): value for name, value in options.items()}
    if "stage" in given:
        given["stage"] = list(given["stage"])
    if prediction := given.get("prediction"):
        given["prediction"] = prediction.model_dump()
    if not given.get("name"):
        first = what[0] if isinstance(what, list) and what else ""
        path = Path(what).name if isinstance(what, str | Path) else first
        given["name"] = name_of(getattr(what, "__name__", "function") if callable(what) else path)
    return given


def _packed(values: Sequence[Any], function: Callable[..., Any]) -> list[bytes]:
    """Each of them pickled, with what the function's own module has. Raises InvalidRequest."""
    module = sys.modules.get(getattr(function, "__module__", ""), None)
    is_local = (
        module is not None
        and module.__name__ != "__main__"
        and _is_local_module(getattr(module, "__file__", None))
    )
    if is_local and module is not None:
        cloudpickle.register_pickle_by_value(module)  # the job cannot import what lies here
    try:
        return [cloudpickle.dumps(value) for value in values]
    except Exception as error:
        raise InvalidRequest(
            _("The function or its arguments cannot be sent: {error}.", error=error),
            _("Open files and connections in the function itself."),
            field="function",
        ) from None
    finally:
        if is_local and module is not None:
            cloudpickle.unregister_pickle_by_value(module)


def _order(packed: Sequence[bytes], keep: Callable[[bytes], str]) -> dict[str, Any]:
    """The part of a request that calls a function in the job, or with each of several arguments in a task.

    Args:
        packed: The function, and the arguments of each call.
        keep: Leaves bytes where the job can read them; the path there.
    """
    if (size := sum(map(len, packed))) > MAXIMUM_BYTES:
        raise InvalidRequest(
            _(
                "The function with its arguments has {size} bytes; at most {maximum_bytes} can be sent.",
                size=size,
                maximum_bytes=MAXIMUM_BYTES,
            ),
            _("Put large data into a file of your home, and have the function read it."),
            field="function",
        )
    order: dict[str, Any] = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    if size * 4 // 3 <= INLINE_BYTES:
        texts = [base64.b64encode(each).decode() for each in packed]
        order |= {"function": texts[0], "calls": texts[1:]}
    else:
        # Each task reads the function and what is its own, not all of it.
        ends = list(itertools.accumulate(map(len, packed)))
        order |= {"input": keep(b"".join(packed)), "ends": ends}
    return {
        "command": ["python3", "-c", _RUN],
        "files": {
            "function.json": json.dumps(order),
            "runner.py": importlib.resources.files("carme.client").joinpath("runner.py").read_text("utf-8"),
            "cloudpickle.py": Path(cloudpickle.cloudpickle.__file__ or "").read_text("utf-8"),
        },
    }


def _is_local_module(file: str | None) -> bool:
    """Whether a module lies neither in the standard library nor among installed packages."""
    if file is None:
        return False
    places = [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]
    return not any(os.path.realpath(file).startswith(os.path.realpath(place) + os.sep) for place in places)
