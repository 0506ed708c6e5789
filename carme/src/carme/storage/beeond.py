"""`carme-beeond`: a BeeGFS over the local disks of one job's nodes, from its prolog to its epilog.

    carme-beeond start --job JOBID --uid UID --nodes NODELIST    in the prolog, on each of the job's nodes
    carme-beeond stop --job JOBID                                in the epilog, on each of them

The job's first node starts it on all of them with the program `beeond` (of BeeGFS's package of that name),
which reaches the others by ssh as root; the others wait until it is there. Each node stops its own part, so
that nothing stays when another one is lost; `carme-janitor` does that for a node that went down itself.

All files lie where root alone can write: `beeond` removes, as root, the paths that its status file names.
Source of the program's options: `beeond --help` and the documentation of BeeGFS 7.4.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from carme.config import load
from carme.errors import CarmeError
from carme.jobs.nodes import expand

__all__ = ["BeeOND", "main"]

PROGRAM = "beeond"
#: Where BeeGFS's programs are installed, besides root's usual PATH.
PLACES = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/opt/beegfs/sbin"
#: The folder with a file for each instance since the host's start; it is empty after the next one.
MARKS = Path("/run/carme-beeond")
SECONDS = 120  # for it to start on all nodes
POLL_SECONDS = 0.2
_JOB = re.compile(r"[0-9]{1,12}")


def main(arguments: list[str] | None = None) -> int:
    """0: it is done, or there is nothing to do; 1: it could not be done; 2: wrong words."""
    parser = argparse.ArgumentParser(prog="carme-beeond", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("do", choices=["start", "stop"])
    parser.add_argument("--job", required=True, help="Slurm's number")
    parser.add_argument("--uid", type=int, help="start: whose job it is")
    parser.add_argument("--nodes", help="start: its nodes, as Slurm writes them")
    options = parser.parse_args(arguments)
    if not _JOB.fullmatch(options.job):
        parser.error("a job is a number")
    if options.do == "start" and (options.uid is None or not options.nodes):
        parser.error("start needs --uid and --nodes")
    try:
        staging = load().staging
        if staging.beeond is None:
            raise CarmeError("This site has no BeeOND.", "Set staging.beeond in carme.toml.")
        instance = BeeOND(staging.beeond, staging.cache / "beeond")
        if options.do == "start":
            instance.start(options.job, options.uid, expand(options.nodes))
        else:
            instance.stop(options.job)
    except CarmeError as error:
        print(f"carme-beeond: job {options.job}: {error}", file=sys.stderr)
        return 1
    return 0


class BeeOND:
    """Jobs' own file systems on this node.

    Args:
        mounts: Root's folder in which each job's is mounted, under the job's number.
        state: Root's folder on the node's own disk, for the data and what `beeond` notes.
        marks: Root's folder that is empty after the host has started.
        node: This node, as Slurm calls it.
    """

    def __init__(self, mounts: Path, state: Path, marks: Path = MARKS, node: str = "") -> None:
        self.mounts, self.state, self.marks = mounts, state, marks
        self.node = node or os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]

    def start(self, job: str, uid: int, nodes: Sequence[str], seconds: float = SECONDS) -> None:
        """Have it over these nodes, and let it belong to a user.

        Args:
            job: Its number.
            uid: Its owner's.
            nodes: Its nodes, the same everywhere. The first of them does it, others wait.
            seconds: For all of that.

        Raises:
            CarmeError: It is not there.
        """
        self.marks.mkdir(mode=0o700, exist_ok=True)
        (self.marks / job).touch()
        if self.node != nodes[0]:
            self._await(job, uid, nodes[0], seconds)
            return
        names = self.state / f"{job}.nodes"
        names.write_text("".join(f"{node}\n" for node in nodes))
        words = ["start", "-q", "-F", "-n", str(names), "-d", str(self.state / f"{job}.data")]
        words += ["-c", str(self.mounts / job), "-i", str(self.state / f"{job}.status")]
        words += ["-L", str(self.state / f"{job}.log")]
        if shutil.which("pdsh", path=PLACES):
            words.append("-P")
        configuration = Path("/etc/beegfs/beeond")
        if configuration.is_dir():
            # For instance with connAuthFile, which BeeGFS demands since 7.3.
            words += ["-f", str(configuration)]
        self._call(words, seconds)
        if not self._is_mounted(job):
            raise CarmeError(
                f"BeeOND has started, but nothing is mounted at {self.mounts / job}.",
                "Tell an administrator.",
            )
        # Nobody but root could have put anything there until now.
        os.chmod(self.mounts / job, 0o700)  # noqa: PTH101
        os.chown(self.mounts / job, uid, -1)

    def stop(self, job: str) -> bool:
        """End this node's part of it and remove its data; False where there is none.

        Raises:
            CarmeError: Something of it is left. Called again it goes on.
        """
        status, mount = self.state / f"{job}.status", self.mounts / job
        saved = [self.state / f"{job}.{what}" for what in ("status", "data", "nodes", "log")]
        mark = self.marks / job
        if not (mark.exists() or os.path.lexists(mount) or any(path.exists() for path in saved)):
            return False
        failed = ""
        # After the host's start none of its processes is there, and their numbers are others' by now.
        if status.exists() and mark.exists():
            try:
                self._call(["stoplocal", "-q", "-c", "-d", "-L", "-i", str(status)], SECONDS)
            except CarmeError as error:
                failed = error.message
        if self._is_mounted(job):
            subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)
        with contextlib.suppress(FileNotFoundError):
            mount.rmdir()
        if failed:
            raise CarmeError(failed, "The janitor tries again.")
        for path in saved:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
        return True

    def jobs(self) -> list[str]:
        """The jobs that have anything here, whether they run or are over."""
        found = set()
        for folder in (self.state, self.marks, self.mounts):
            with contextlib.suppress(FileNotFoundError):
                found |= {path.name.partition(".")[0] for path in folder.iterdir()}
        return sorted(name for name in found if _JOB.fullmatch(name))

    def _await(self, job: str, uid: int, first: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not (self._is_mounted(job) and (self.mounts / job).stat().st_uid == uid):
            if time.monotonic() > end:
                raise CarmeError(
                    f"BeeOND was not there after {seconds:.0f} s.", f"See what the prolog of {first} says."
                )
            time.sleep(POLL_SECONDS)

    def _is_mounted(self, job: str) -> bool:
        return os.path.ismount(self.mounts / job)

    def _call(self, words: list[str], seconds: float) -> None:
        program = shutil.which(PROGRAM, path=PLACES)
        if program is None:
            raise CarmeError("The program beeond is not installed here.", "Install BeeGFS's package beeond.")
        try:
            done = subprocess.run(
                [program, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=seconds, check=False, cwd="/",
                env={"PATH": PLACES, "HOME": "/root", "LC_ALL": "C"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CarmeError(f"beeond {words[0]} failed: {error}.", "Tell an administrator.") from None
        if done.returncode:
            text = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
            why = next((line for line in text if "ERROR" in line), text[-1] if text else "it says nothing")
            raise CarmeError(f"beeond {words[0]} failed: {why[:200]}.", "Tell an administrator.")


if __name__ == "__main__":
    sys.exit(main())
