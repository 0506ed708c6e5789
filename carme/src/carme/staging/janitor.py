"""`carme-janitor`: what root does on a node about jobs' folders and the copies that are kept.

    carme-janitor --job JOBID    in a job's epilog: results go out, its folder goes, Slurm hears of its copies
    carme-janitor                from time to time: what jobs have left, and copies beyond the limit

Root makes and lists folders that root alone can change (`jobs`, `users`, and what is directly in them).
Whatever is in a user's folder is read, copied and removed by a process that has become that user: a symlink
that somebody planted leads nowhere that they could not go themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from carme.config import load
from carme.errors import CarmeError
from carme.staging import copy, tree
from carme.staging.cache import ENTRY, RESERVE, Cache, CacheEntry, measure
from carme.storage.beeond import BeeOND
from carme.translation import message as _
from carme.wording import size

__all__ = ["main"]

_JOB = re.compile(r"[0-9]{1,12}")
_FEATURE_NAME = re.compile(r"carme_[0-9]+_[0-9a-f]{24}")
#: So many copies on a node are reported to Slurm, the ones that were used last.
_MOST_NAMED = 64
_SECONDS = 60
_NOBODY = 65534  # the group of nobody in particular


def main(arguments: list[str] | None = None) -> int:
    """0: nothing is left that could be removed now; 1: something could not be done."""
    parser = argparse.ArgumentParser(prog="carme-janitor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--job", help="only this job's folder; it has ended")
    parser.add_argument("--here", action="store_true", help="let no unit of systemd copy the results")
    options = parser.parse_args(arguments)
    if options.job is not None and not _JOB.fullmatch(options.job):
        parser.error("a job is a number")
    try:
        staging = load().staging
        beeond = BeeOND(staging.beeond, staging.cache / "beeond") if staging.beeond else None
        janitor = Janitor(staging.cache, staging.cache_gb << 30, beeond)
        return janitor.after(options.job, options.here) if options.job else janitor.tidy()
    except CarmeError as error:
        print(f"carme-janitor: {error}", file=sys.stderr)
        return 1


class Janitor:
    """Tidies one node.

    Args:
        cache: Root's folder with `jobs` and `users`.
        limit: What copies may take, in bytes; 0: as much as leaves a twentieth of the disk free.
        beeond: Jobs' own file systems, where the site has them.
    """

    def __init__(self, cache: Path, limit: int, beeond: BeeOND | None = None) -> None:
        self.cache, self.limit, self.beeond = cache, limit, beeond
        self.failed = False

    def after(self, job: str, here: bool = False) -> int:
        """Take care of what a job that has ended leaves."""
        folder = self.cache / "jobs" / job
        try:
            status = folder.lstat()
        except FileNotFoundError:
            return 0
        names = become(status.st_uid, lambda: " ".join(os.listdir(folder)))
        if "staged" in names.split():
            with self._logged("what this node has"):
                self.publish_features()
        if "results.json" in names.split() and not here and shutil.which("systemd-run"):
            # The node is free for others meanwhile.
            unit = [f"--unit=carme-results-{job}", "--property=Nice=10", "--property=IOSchedulingClass=idle"]
            program = [sys.executable, "-I", "-m", "carme.staging.janitor", "--job", job, "--here"]
            done = subprocess.run(["systemd-run", "--quiet", "--collect", *unit, *program], check=False)
            if done.returncode == 0:
                return 0
        failed = become(status.st_uid, lambda: empty(folder))
        if failed:
            print(f"carme-janitor: job {job}: {failed}", file=sys.stderr)
            return 1
        folder.rmdir()
        return 0

    def tidy(self) -> int:
        """Take care of what is left of jobs that are over, and of copies beyond the limit."""
        # First the folders: whose job begins after that is not among them.
        folders = sorted((self.cache / "jobs").iterdir())
        active = active_jobs()
        for folder in folders:
            if _JOB.fullmatch(folder.name) and folder.name not in active:
                with self._logged(f"job {folder.name}"):
                    self.failed |= bool(self.after(folder.name, here=True))
        self.stop_beeond(active)
        self.trim()
        self.publish_features()
        return int(self.failed)

    def stop_beeond(self, active: set[str]) -> None:
        """End the file systems of jobs that are over, for instance because this node went down under them."""
        if self.beeond is None:
            return
        for job in self.beeond.jobs():
            if job not in active:
                with self._logged(f"BeeOND of job {job}"):
                    self.beeond.stop(job)
                    print(f"carme-janitor: BeeOND of job {job} is removed")

    def trim(self) -> list[str]:
        """Remove what was used least recently, of all users, until the limit holds; what was removed."""
        entries = self._entries(measured=False)
        if not self._is_over(entries):
            return []
        # Users could write down anything: before somebody's copy goes, all are measured.
        entries, removed = self._entries(measured=True), []
        for entry in sorted(entries):
            if not self._is_over(entries):
                break
            _, taken, user, key = entry
            with self._logged(f"copy {key} of user {user}"):
                if become(user, lambda user=user, key=key: str(self._cache_of(user).remove(key))) == "True":
                    entries.remove(entry)
                    removed.append(f"{user}/{key}")
                    print(f"carme-janitor: removed a copy of {size(taken)} of user {user}")
        return removed

    def _entries(self, *, measured: bool) -> list[tuple[float, int, int, str]]:
        """When each copy was used last, its bytes, whose it is, and its key."""
        entries = []
        for user in self._users():
            # One user's folder must not keep the others' from being cleaned up.
            with self._logged(f"copies of user {user}"):
                message = become(user, lambda user=user: known_text(self._cache_of(user), measured))
                entries += [(used, taken, user, key) for used, taken, key in json.loads(message)]
        return entries

    def _is_over(self, entries: list[tuple[float, int, int, str]]) -> bool:
        status = os.statvfs(self.cache)
        short = status.f_bavail < status.f_blocks * RESERVE
        return short or (self.limit > 0 and sum(taken for _, taken, *_ in entries) > self.limit)

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Say what could not be done, and go on."""
        try:
            yield
        except (CarmeError, OSError, ValueError) as error:
            self.failed = True
            print(f"carme-janitor: {what}: {error}", file=sys.stderr)

    def publish_features(self) -> None:
        """Let Slurm know, as features of this node, which copies it has."""
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
        shown = ask("scontrol", "--oneliner", "show", "node", node)
        match = re.search(r" AvailableFeatures=(\S+)", shown)
        if match is None:
            return
        now = [word for word in match[1].split(",") if word != "(null)"]
        wanted = [word for word in now if not _FEATURE_NAME.fullmatch(word)] + self.features()
        if wanted != now:
            features = ",".join(wanted)
            ask(
                "scontrol",
                "update",
                f"NodeName={node}",
                f"AvailableFeatures={features}",
                f"ActiveFeatures={features}",
            )

    def features(self) -> list[str]:
        """A word for each complete copy."""
        found = []
        for user in self._users():
            with contextlib.suppress(OSError), os.scandir(self.cache / "users" / str(user)) as entries:
                for entry in entries:
                    # Names are all that root looks at.
                    if ENTRY.fullmatch(entry.name) and "-" not in entry.name:
                        with contextlib.suppress(OSError):
                            os.lstat(f"{entry.path}/about.json")
                            found.append(
                                (os.lstat(f"{entry.path}/lock").st_mtime, f"carme_{user}_{entry.name}")
                            )
        return sorted(name for _, name in sorted(found)[-_MOST_NAMED:])

    def _cache_of(self, user: int) -> Cache:
        return Cache(str(self.cache / "users" / str(user)))

    def _users(self) -> list[int]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for folder in (self.cache / "users").iterdir():
                if folder.name.isdecimal() and folder.lstat().st_uid == int(folder.name):
                    found.append(int(folder.name))
        return sorted(found)


def known_text(cache: Cache, measured: bool) -> str:
    """A user's entries as JSON, with the sizes that are written down or what they really take."""

    def taken(each: CacheEntry) -> int:
        return measure(f"{cache.folder}/{each.key}/data") if measured else max(0, each.size)

    return json.dumps([(each.used, taken(each), each.key) for each in cache.known()])


def empty(folder: Path) -> str:
    """As the job's owner: copy the results to where they are wanted, then remove what is in the folder.

    Returns:
        What keeps it from being done; empty when it is done.
    """
    here = os.open(folder, tree.FOLDER)
    try:
        fcntl.flock(here, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _empty_folder(folder, here)
    except BlockingIOError:
        return "its results are being taken out already"
    finally:
        os.close(here)


def _empty_folder(folder: Path, here: int) -> str:
    about = None
    with contextlib.suppress(FileNotFoundError):
        about = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    if about is not None:
        try:
            os.makedirs(about["to"], exist_ok=True)
            result = copy(str(folder / "results"), about["to"])
        except (CarmeError, OSError, KeyError, TypeError) as error:
            why = error.message if isinstance(error, CarmeError) else f"{error}."
            return write_log(
                about,
                f"The results could not be copied: {why} They stay on {socket.gethostname()}, which tries "
                "again every few minutes.",
            )
        counts = result.counts
        if not result.ok:
            first = result.problems[0]
            return write_log(
                about,
                f"{counts.problems} of the results could not be copied to {about['to']}; the first is "
                f"{tree.shown(first.path)}: {first.reason}. They stay on {socket.gethostname()}.",
            )
        write_log(
            about, f"Results: {counts.files} files ({size(counts.bytes_copied)}) copied to {about['to']}."
        )
    try:
        for name in os.listdir(here):
            tree.remove(here, name)
    except OSError as error:
        return f"{folder} cannot be emptied: {tree.reason(error)}"
    return ""


def write_log(about: dict[str, str], text: str) -> str:
    """Write a line at the end of the job's log; the line."""
    with contextlib.suppress(OSError, KeyError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(about["log"], flags), "w", encoding="utf-8") as log:
            log.write(f"carme-job: {text}\n")
    return text


def become(uid: int, do: Callable[[], str]) -> str:
    """What a function says in a process of the user's own, with nothing of root's."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            if os.geteuid() == 0:
                try:
                    account = pwd.getpwuid(uid)
                except KeyError:  # an account that is gone has left something
                    os.setgroups([])
                    os.setgid(_NOBODY)
                    os.environ["HOME"] = "/"
                else:
                    os.initgroups(account.pw_name, account.pw_gid)
                    os.setgid(account.pw_gid)
                    os.environ["HOME"] = account.pw_dir
                os.setuid(uid)
            os.chdir("/")
            os.umask(0o077)
            with os.fdopen(writing, "w") as pipe:
                pipe.write(do())
            code = 0
        except BaseException as error:
            print(
                f"carme-janitor: as user {uid}: {type(error).__name__}: {error}", file=sys.stderr, flush=True
            )
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        message = pipe.read()
    _pid, status = os.waitpid(child, 0)
    if status:
        raise CarmeError(_("An action as user {uid} failed.", uid=uid), _("See the line above."))
    return message


def active_jobs() -> set[str]:
    """The jobs that Slurm has on this node. Raises CarmeError: then nothing may be removed."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    states = "RUNNING,COMPLETING,CONFIGURING,SUSPENDED,STAGE_OUT,SIGNALING,STOPPED,RESIZING"
    return set(ask("squeue", "--noheader", f"--nodelist={node}", f"--states={states}", "--format=%A").split())


def ask(*words: str) -> str:
    """What one of Slurm's programs prints. Raises CarmeError."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CarmeError(
            _("{program} cannot be queried: {error}.", program=words[0], error=error),
            _("Check that Slurm is running."),
        ) from None
    if done.returncode:
        raise CarmeError(
            _("{program} failed: {why}.", program=words[0], why=done.stderr.strip()[:200]),
            _("Check that Slurm is running."),
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
