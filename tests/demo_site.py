"""The running demo cluster, as tests see it: its address, its accounts, and commands on its hosts."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from host_programs import HostPrograms
from undo_journal import UndoJournal

from carme.jobs import Job, JobState
from carme.validation import Visitor
from carme_demo.podman import Podman, host_runtime
from carme_demo.settings import DEFAULT_NAME, Places, load, passwords
from host_commands import PROGRAMS
from patience import HANG

ROOT = Path(__file__).resolve().parent.parent

#: For `DemoSite.slurm_settings`: a node that does not answer is given up after about 17 s.
IMPATIENT = "SlurmdTimeout=6\n"


#: Two more users with their uids, for what runs beside other tests: jobs, sessions and homes are its own.
SECOND_USERS = {"user3": 2013, "user4": 2014}


class DemoSite:
    """The demo that `./demo up` left running, or the one that `name` or CARME_DEMO names.

    `user` acts where no user is named, `second_user` is another one. `end_all_jobs` ends what both run.
    Raises `RuntimeError` when there is no demo.
    """

    def __init__(self, user: str = "user1", second_user: str = "user2", name: str = "") -> None:
        self.user, self.second_user = user, second_user
        places = Places(name or os.environ.get("CARME_DEMO", DEFAULT_NAME))
        settings = load(places)
        if settings is None:
            raise RuntimeError("There is no demo cluster. Run: sudo ./demo up --no-run")
        self.settings = settings
        self.url = settings.url
        self.passwords = passwords(places)
        self.podman = Podman(places, host_runtime())
        self._programs = HostPrograms(self._inside, self.podman.environment)
        self._journal = UndoJournal(places.state / "undo", lambda command: self.run(*command, check=False))
        for host, *words in self._journal.recovered:
            print(f"Undone on {host}, as a run that was killed had not: {' '.join(words)}", file=sys.stderr)
        self._folder = tempfile.TemporaryDirectory(prefix="carme-test-")
        self.certificate = Path(self._folder.name) / "site.pem"
        self.certificate.write_text(ssl.get_server_certificate(("localhost", settings.port)))

    def run(
        self,
        node: str,
        *command: str,
        user: str | None = None,
        data: str | None = None,
        check: bool = True,
        timeout: float = HANG,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on one of the hosts, as root or in a login session of `user`."""
        words = self._words(command, user)
        return self._programs.run(node, words, data=data, check=check, timeout=timeout)

    def begin(self, node: str, *command: str, user: str | None = None) -> subprocess.Popen[str]:
        """Begin a program on one of the hosts, which talks over its standard input and output."""
        return subprocess.Popen(
            self._inside(node, self._words(command, user)),
            env={"PATH": PROGRAMS, **self.podman.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    @staticmethod
    def _words(command: tuple[str, ...], user: str | None) -> list[str]:
        """The command as root types it, for a login session of `user` where one is named."""
        if not user:
            return list(command)
        home = f"/home/{user}"
        return ["runuser", "-u", user, "--", "env", "-C", home, f"HOME={home}", f"USER={user}", *command]

    def _inside(self, node: str, words: list[str]) -> list[str]:
        return self.podman.inside(node, words, terminal=False)

    @classmethod
    def with_second_users(cls) -> DemoSite:
        """The demo with two users that no other test uses, made as an administrator does."""
        demo = cls(*SECOND_USERS)
        for name, uid in SECOND_USERS.items():
            demo.onboard(name, uid)
        return demo

    def onboard(self, name: str, uid: int) -> None:
        """Make somebody a user of the site with a new password; what is there already stays."""
        for machine in self.settings.machines():
            if self.run(machine.name, "id", name, check=False).returncode:
                words = ["--no-create-home", "--user-group", "--uid", str(uid), "--shell", "/bin/bash"]
                self.run(machine.name, "useradd", *words, name)
        self.passwords[name] = secrets.token_urlsafe(12)
        portal = "/opt/carme/venv/bin/carme-portal"

        def taken_in() -> bool:
            done = self.run("head", portal, "onboard", name, check=False)
            # The broker of a busy machine needs longer than the command waits; it may be queried again.
            assert not done.returncode or "Try again in a moment" in done.stderr, done.stderr
            return not done.returncode

        wait_until(f"{name} is onboarded", taken_in)
        as_portal = ("runuser", "-u", "carme-portal", "--", portal)
        self.run("head", *as_portal, "add-user", name, data=self.passwords[name] + "\n")

    def carme(
        self, *arguments: str, user: str | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """The command `carme` on the head, as a user types it."""
        return self.run("head", "/opt/carme/venv/bin/carme", *arguments, user=user or self.user, **options)

    def carme_json(self, *arguments: str, user: str | None = None) -> Any:
        """What `carme ... --json` printed."""
        return json.loads(self.carme(*arguments, "--json", user=user).stdout)

    def sbatch(self, *options: str, second: Sequence[str] = (), user: str | None = None) -> int:
        """The number of a job that sleeps, given to Slurm by itself, so that Carme finds it there.

        Args:
            second: Options of the second component of a heterogeneous job, whose number is the next one.
        """
        each = ("--time=20:00:00", "--mem=100")
        command = ["sbatch", "--parsable", "--output=/dev/null", *each, *options]
        command += ["--chdir=/tmp", "--wrap=sleep 600", *([":", *each, *second] if second else [])]
        done = self.run("head", *command, user=user or self.user)
        return int(done.stdout.strip().split(";")[0])

    def end_all_jobs(self) -> None:
        """Cancel what runs or waits of the two users, and wait until the nodes are free of it."""
        for user in (self.user, self.second_user):
            self.run("head", "scancel", f"--user={user}")
        left = ("squeue", "--noheader", f"--user={self.user},{self.second_user}")
        wait_until("no job is left", lambda: not self.run("head", *left).stdout.strip())

    @contextmanager
    def undoing(self, *commands: tuple[str, ...]) -> Iterator[None]:
        """Run commands at the end, or before the next tests of the demo where this run is killed.

        Args:
            commands: Host, program and arguments of each. They can run twice, and before what they undo.
        """
        with self._journal.undoing(lambda command: self.run(*command), commands):
            yield

    @contextmanager
    def slurm_settings(self, lines: str) -> Iterator[None]:
        """Further lines of slurm.conf on every host for a while; the last of equal ones counts.

        No job may be left afterwards.
        """
        hosts = [machine.name for machine in self.settings.machines()]
        saved = f"/etc/slurm/slurm.conf.{secrets.token_hex(4)}"
        restore = f"[ ! -e {saved} ] || mv {saved} /etc/slurm/slurm.conf"
        undo = [(host, "sh", "-c", restore) for host in hosts]
        with self.undoing(*undo, ("head", "scontrol", "reconfigure")):
            for host in hosts:
                self.run(host, "cp", "--preserve=all", "/etc/slurm/slurm.conf", saved)
                self.run(host, "tee", "--append", "/etc/slurm/slurm.conf", data=lines)
            self.run("head", "scontrol", "reconfigure")
            try:
                yield
            finally:
                self.end_all_jobs()

    def wait_for_hub(self) -> None:
        """Wait until JupyterHub answers, after it was started."""
        health = ("curl", "--fail", "--silent", "http://127.0.0.1:8000/jupyter/hub/health")
        wait_until("the hub answers", lambda: self.run("head", *health, check=False).returncode == 0)

    def visitor(self, user: str | None = None) -> Visitor:
        """A browser, logged in as `user` when one is named. Close it, or use it as a context manager."""
        visitor = Visitor(self.url, str(self.certificate))
        if user:
            visitor.login(user, self.passwords[user])
        return visitor

    def job_of(self, session: str, user: str | None = None) -> dict[str, Any]:
        """The job of a session, as its owner sees it, once the broker has seen it run.

        Not the only job that the owner sees: one that an earlier test has ended may be shown a while longer.
        """
        name = f"session-{session}"

        def job() -> dict[str, Any] | None:
            known = (item for item in self.carme_json("jobs", user=user) if item["name"] == name)
            return next((item for item in known if Job.model_validate(item).is_running), None)

        return wait_until(f"the job of session {session} is seen to run", job)

    def job_ids(self, user: str | None = None) -> set[int]:
        """The jobs that a user sees: what was submitted at once, and what has ended for a moment longer."""
        return {item["id"] for item in self.carme_json("jobs", user=user)}

    def job_state(self, job: int, user: str | None = None) -> JobState:
        """The job's state as its owner sees it, from the accounting once Slurm has forgotten the job."""
        known = self.carme_json("jobs", "--all-states", user=user)
        for item in known:
            if item["id"] == job:
                return Job.model_validate(item).state
        query = ["sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={job}"]
        words = self.run("head", *query).stdout.split()
        assert words, f"Neither Slurm nor its accounting knows job {job}."
        return JobState(words[0])


def wait_until(what: str, holds: Callable[[], Any], timeout: float = HANG) -> Any:
    """Wait until `holds()` is true and return it; fails with `what` after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        begun = time.monotonic()
        result = holds()
        if result:
            return result
        now = time.monotonic()
        if now > end:
            raise AssertionError(f"After {timeout:.0f} s still not: {what}")
        # Where it takes long to find out, the machine has others to work for; yet what shows briefly is seen.
        time.sleep(min(max(0.3, now - begun), 2.0))
