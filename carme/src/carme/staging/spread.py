"""One copy by several hosts that share a file system.

Who asks for it writes a plan beside the copy: the source in units. Each worker, on whichever host, takes the
units that nobody has taken, by creating a file, and copies them as any copy is made, with a journal of its
own. At the end the caller copies the whole once more: what the workers have done is unchanged then, and
what they have not, whatever kept them from it, is done. So the result is that of a copy by one host.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.staging import tree
from carme.staging.engine import Notify, copy, copy_names
from carme.staging.options import PART, Counts, Options, Problem, Progress, Result, shown
from carme.storage import balanced, first_targets
from carme.translation import message as _

__all__ = ["Spread", "work"]

#: The folder at the destination's top that holds the plan.
FOLDER = f"{tree.STATE}-nodes"
#: So many units for each worker, so that all end at about the same time.
UNITS = 32
#: So many files of one folder are one unit.
NAMES = 5000
#: A worker reports how far it is so often, in seconds.
REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class Unit:
    """What one worker copies in one go.

    `names` are entries of the folder `path` that are not folders; None: the folder with all that is below it.
    `large`: it is one file that is read for a while.
    """

    path: str
    names: list[str] | None = None
    large: bool = False


class Spread:
    """A copy by several hosts, as its caller sees it.

    Args:
        source: A folder that all hosts have.
        destination: Where the copy goes, on a file system that all hosts have; it is made if it is not there.
        options: How to copy.

    Raises:
        CarmeError: It cannot be begun.
    """

    def __init__(self, source: str, destination: str, options: Options) -> None:
        self.source, self.destination = tree.check(source, destination)
        if not os.path.isdir(self.source):
            raise InvalidRequest(_("One file is copied by one host."), _("Leave out --nodes."))
        self.options = options
        self.workers, self.dsync = 1, False
        self.folder = Path(self.destination) / FOLDER
        with _explained_errors(self.folder):
            os.makedirs(self.destination, 0o700, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            status = self.folder.lstat()
            if status.st_uid != os.geteuid() or not self.folder.is_dir() or self.folder.is_symlink():
                raise CarmeError(
                    _("{folder} is not a folder of yours.", folder=shown(str(self.folder))),
                    _("Check what it is, and remove it before you copy."),
                )
            before = _read(self.folder / "plan.json")
            #: The job of a run before this one, which may still be at work; None: there is none.
            self.job: int | None = None
            if before.get("source") == self.source:
                self.job = before.get("job")
                self.dsync = before.get("dsync", False)
            else:
                shutil.rmtree(self.folder)
                self.folder.mkdir(mode=0o700)

    def plan(self, workers: int, *, dsync: bool = False) -> int:
        """Write down the units of work, and return how many there are.

        What a run before this one has begun is finished first.

        Args:
            workers: How many there will be. They share the limits on bytes and operations.
            dsync: There are no units; mpiFileUtils' dsync copies, started by one worker on all of its nodes.
        """
        with _explained_errors(self.folder):
            for unit in self._interrupted_units():
                _copy_unit(self.source, self.destination, unit, self.options, None)
            for name in ("claims", "done", "workers"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
                (self.folder / name).mkdir(mode=0o700)
            count = 0
            with open(self.folder / "units", "w", encoding="utf-8") as file:
                units = [] if dsync else list(_units(self.source, UNITS * workers))
                for unit in _balanced(self.source, units):
                    # Names may hold bytes that are not text, which JSON keeps.
                    file.write(json.dumps([unit.path, unit.names]) + "\n")
                    count += 1
            self.workers, self.dsync = workers, dsync
            self._note(None)
        return count

    def submitted(self, job: int) -> None:
        """Note which job does it."""
        with _explained_errors(self.folder):
            self._note(job)

    def _note(self, job: int | None) -> None:
        self.job = job
        options = vars(self.options) | {"estimate": False}
        for limit in ("bandwidth", "operations"):
            if options[limit]:
                options[limit] = max(1, options[limit] // self.workers)
        plan = {"source": self.source, "options": options, "job": job, "dsync": self.dsync}
        _write(self.folder / "plan.json", plan)

    def _interrupted_units(self) -> list[Unit]:
        """The units that somebody has taken and not finished."""
        if not (self.folder / "claims").is_dir():
            return []
        done = {path.name for path in (self.folder / "done").iterdir()}
        open_ = {int(path.name) for path in (self.folder / "claims").iterdir() if path.name not in done}
        return [unit for number, unit in _numbered(self.folder) if number in open_]

    def progress(self) -> tuple[Counts, list[str]]:
        """What the workers have done so far, and the hosts that they are on."""
        counts, hosts = Counts(), set[str]()
        with contextlib.suppress(FileNotFoundError):
            for path in (self.folder / "workers").iterdir():
                reported = _read(path)
                if reported and not path.name.startswith("."):
                    counts.add(Counts(**reported["counts"]))
                    hosts.add(reported["host"])
        return counts, sorted(hosts)

    def finish(self, notify: Notify | None = None) -> Result:
        """What the workers have not done, when there are none any more; the whole copy's result."""
        done, hosts = self.progress()
        with _explained_errors(self.folder):
            for unit in self._interrupted_units():
                _copy_unit(self.source, self.destination, unit, self.options, None)

        def reported(what: Problem | Progress | tuple[str, str]) -> None:
            if notify and isinstance(what, Problem):
                notify(what)

        options = self.options
        if self.dsync and options.verify != "none":
            # It does not read back what it has written.
            options = Options(**{**vars(options), "contents": True})
        result = copy(self.source, self.destination, options, notify=reported)
        if self.dsync:
            result.engine = "dsync"
            result.warnings.append("what dsync has copied counts as unchanged")
        counts = result.counts
        # What the workers copied is unchanged now.
        counts.unchanged = max(0, counts.unchanged - done.copied - done.updated)
        counts.bytes_unchanged = max(0, counts.bytes_unchanged - done.bytes_copied)
        counts.copied += done.copied
        counts.updated += done.updated
        counts.bytes_copied += done.bytes_copied
        result.hosts = hosts
        if result.ok:
            with _explained_errors(self.folder):
                shutil.rmtree(self.folder)
                _restore_times(self.source, self.destination)
        return result


def work(folder: str, name: str = "") -> Result:
    """Copy units of a plan until there are no more.

    Args:
        folder: The plan's folder.
        name: Of this worker, among all that work on the plan.

    Raises:
        CarmeError: There is no such plan, or the destination takes no more.
    """
    where = Path(folder)
    plan = _read(where / "plan.json")
    if not plan or where.name != FOLDER:
        raise NotFound(
            _("There is no plan in {folder}.", folder=shown(folder)),
            _("Start it with: carme data copy --nodes N"),
        )
    source, destination, options = plan["source"], os.path.realpath(where.parent), Options(**plan["options"])
    host = socket.gethostname()
    total = Result(hosts=[host])
    start = time.monotonic()
    reported = 0.0
    counts_file = where / "workers" / f"{name or host}-{os.getpid()}.json"

    def write_counts(now: Counts | None = None) -> None:
        counts = Counts(**vars(total.counts))
        if now:
            counts.add(now)
        _write(counts_file, {"host": host, "counts": vars(counts)})

    def report(what: Problem | Progress | tuple[str, str]) -> None:
        nonlocal reported
        if isinstance(what, Progress) and time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            write_counts(what.counts)

    with _explained_errors(where):
        write_counts()
        if plan.get("dsync"):
            _dsync(source, destination)
        for number, unit in _numbered(where):
            try:
                os.close(os.open(where / "claims" / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                continue
            result = _copy_unit(source, destination, unit, options, report)
            total.counts.add(result.counts)
            total.problems += result.problems
            total.engine, total.hash = result.engine, result.hash or total.hash
            _write(where / "done" / str(number), {"host": host})
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                write_counts()
        write_counts()
    total.seconds = time.monotonic() - start
    return total


def _dsync(source: str, destination: str) -> None:
    """Have dsync copy, on all nodes of this job; what it writes goes to the job's log.

    Raises:
        CarmeError: It is not there, or failed.
    """
    try:
        code = subprocess.run(["srun", "dsync", source, destination], check=False).returncode
    except FileNotFoundError:
        raise CarmeError(_("There is no srun on this node."), _("Copy without --dsync.")) from None
    if code:
        raise CarmeError(
            _("dsync failed with exit code {code}.", code=code),
            _("The reason is above. If the nodes do not have dsync (mpiFileUtils), copy without --dsync."),
        )


def _copy_unit(
    source: str, destination: str, unit: Unit, options: Options, notify: Callable[[Any], None] | None
) -> Result:
    """Copy a unit; what is in its way is left to the copy of the whole, which reports it."""
    unit_source = os.path.join(source, unit.path) if unit.path else source
    unit_target = os.path.join(destination, unit.path) if unit.path else destination
    into = unit_target if unit.names is not None else os.path.dirname(unit_target)
    try:
        os.makedirs(into, 0o700, exist_ok=True)
    except OSError:
        return Result()
    if os.path.realpath(into) != into:
        return Result()  # A symlink is in the way.
    try:
        if unit.names is None:
            return copy(unit_source, unit_target, options, notify=notify)
        return copy_names(unit_source, unit_target, unit.names, options, notify=notify)
    except (NotFound, InvalidRequest):
        return Result()


def _units(source: str, wanted: int) -> Iterator[Unit]:
    """Divide a tree into at least so many units, as far as it has so many folders or large files."""
    waiting = deque([""])
    units = 0
    while waiting and units + len(waiting) < wanted:
        path = waiting.popleft()
        names: list[str] = []
        try:
            with os.scandir(os.path.join(source, path)) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(os.path.join(path, entry.name))
                    elif _is_large(entry):
                        units += 1
                        yield Unit(path, [entry.name], large=True)
                    else:
                        names.append(entry.name)
                        if len(names) >= NAMES:
                            units += 1
                            yield Unit(path, names)
                            names = []
        except OSError:
            continue  # The copy of the whole reports it.
        if names:
            units += 1
            yield Unit(path, names)
    for path in waiting:
        yield Unit(path)


def _balanced(source: str, units: list[Unit]) -> list[Unit]:
    """Units in an order in which the workers, who take the next one each, do not all read from one target."""
    large = {
        os.path.join(source, unit.path, unit.names[0]): unit for unit in units if unit.large and unit.names
    }
    targets = first_targets(list(large))
    if len(set(targets.values())) < 2:
        return units
    known = {id(large[path]): target for path, target in targets.items()}
    return balanced(units, lambda unit: known.get(id(unit)))


def _is_large(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size >= PART
    except OSError:
        return False


def _numbered(folder: Path) -> Iterator[tuple[int, Unit]]:
    with open(folder / "units", encoding="utf-8") as file:
        for number, line in enumerate(file):
            yield number, Unit(*json.loads(line))


def _read(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where it is not there or is just being written."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def _write(path: Path, what: dict[str, Any]) -> None:
    """Write a file, completely or not at all."""
    writing = path.with_name(f".{path.name}.{os.getpid()}")
    writing.write_text(json.dumps(what))
    writing.replace(path)


def _restore_times(source: str, destination: str) -> None:
    """The plan was in the top folder, which has changed with it."""
    its = os.stat(source)
    os.utime(destination, ns=(its.st_atime_ns, its.st_mtime_ns))


@contextlib.contextmanager
def _explained_errors(folder: Path) -> Iterator[None]:
    """Report in words that the plan cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise CarmeError(
            _("{folder} cannot be used: {why}.", folder=shown(str(folder)), why=tree.reason(error)),
            _(
                "Free some space or get permission there, then run the same command again; files "
                "that are already copied stay."
            ),
        ) from None
