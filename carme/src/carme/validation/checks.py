"""The checks that an installed site must pass, each done the way a user would do it.

`Validation.run` gives a verdict for people and programs: every check with its result, how long it took and
what to do when it failed. A check that needs an earlier one (no notebook without a session) is reported as
not run.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from carme.broker.client import BrokerClient
from carme.errors import CarmeError, InvalidRequest, SlurmError
from carme.jobs import Cluster, Job, JobState
from carme.slurm.parsing import unheard
from carme.validation.notebook import CellResult, NotebookKernel
from carme.validation.visitor import Visitor

#: Where the job images keep the example that the training check runs.
EXAMPLE = "/opt/carme/examples/digits.py"
STEPS_COMPARED = 20
RELATIVE_TOLERANCE = 1e-4
ACCURACY_WANTED = 0.95

#: How long the first check waits for nodes that Slurm has not heard of yet, as after its controller's start.
UNHEARD_SECONDS = 60.0

# A notebook gives its commands a terminal, so they print colours.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Account:
    """A portal account to check with."""

    name: str
    password: str = field(repr=False)


@dataclass
class Check:
    """One line of the verdict.

    `ok` is None when an earlier check failed; one that this site cannot have is `skipped`, and no failure:
    `detail` has the reason. `seconds` is the wall time it took.
    """

    name: str
    ok: bool | None = None
    skipped: bool = False
    detail: str = ""
    remedy: str = ""
    seconds: float = 0.0


class Failed(CarmeError):
    """A check found something else than it wanted."""


class Skipped(CarmeError):
    """This site has not what a check needs."""


class Validation:
    """Walks through a site as `account`.

    Arguments: `url` of the site and the `certificate` to trust; `options` finds those of the start form, by
    what the broker says of the site; `training` adds the training run over all nodes; `stranger` is a second
    account that must not get in; `notify` gets a line of progress.
    """

    def __init__(
        self,
        *,
        url: str,
        certificate: str | None,
        account: Account,
        options: Callable[[], dict[str, str]],
        training: bool,
        stranger: Account | None,
        notify: Callable[[str], None],
    ) -> None:
        self.url, self.certificate = url, certificate
        self.account, self.stranger = account, stranger
        self.training, self.notify = training, notify
        self._find_options = options
        self.options: dict[str, str] = {}
        self.nodes = self.gpus_per_node = 0
        self.checks: list[Check] = []
        self.report: dict[str, Any] = {}
        self.session = ""
        self.server_url = ""
        self.broker = BrokerClient()

    def run(self) -> dict[str, Any]:
        """Run all checks; returns the verdict as plain data."""
        with Visitor(self.url, self.certificate) as visitor:
            steps: list[tuple[str, Callable[[], str], str]] = [
                ("broker", self._broker, "systemctl status carme-broker, then journalctl -u carme-broker."),
                (
                    "login",
                    lambda: self._login(visitor),
                    "systemctl status nginx carme-portal; make the account with carme-portal add-user.",
                ),
                (
                    "start",
                    lambda: self._start(visitor),
                    "Read the session's page; then journalctl -u carme-hub -u carme-portal on the head.",
                ),
                (
                    "notebook",
                    lambda: self._notebook(visitor),
                    "Check carme-proxy and the job's log: carme logs JOBID.",
                ),
            ]
            steps.append(
                (
                    "apart",
                    self._check_privacy,
                    "Stop the portal: another user reached this user's notebook server.",
                )
            )
            if self.training:
                steps.append(
                    (
                        "training",
                        lambda: self._training(visitor),
                        "Run the cell in the notebook and read its output.",
                    )
                )
            blocked = False
            for name, action, remedy in steps:
                blocked = self._check(name, action, remedy, blocked) is not True or blocked
            if self.session:
                self._check("stop", lambda: self._stop(visitor), "Cancel the job: carme cancel JOBID.")
                self._check(
                    "accounting",
                    self._accounting,
                    "Check slurmdbd and AccountingStoreFlags=job_comment in slurm.conf.",
                )
        return {
            "ok": all(check.ok for check in self.checks),
            "url": self.url,
            "user": self.account.name,
            "checks": [vars(check) for check in self.checks],
            "training": self.report,
        }

    def _check(self, name: str, action: Callable[[], str], remedy: str, blocked: bool = False) -> bool | None:
        check = Check(name)
        self.checks.append(check)
        if blocked:
            check.detail = "Not run, because an earlier check failed."
            return None
        begin = time.monotonic()
        try:
            check.detail, check.ok = action(), True
        except Skipped as error:
            check.detail, check.ok, check.skipped = str(error), True, True
        except InvalidRequest as error:  # nothing is broken; the sentence says what to name instead
            check.detail, check.ok, check.remedy = str(error), False, "" if error.remedy else remedy
        except CarmeError as error:
            check.detail, check.ok, check.remedy = str(error), False, remedy
        check.seconds = round(time.monotonic() - begin, 2)
        result = "skip  " if check.skipped else "ok    " if check.ok else "FAILED"
        self.notify(f"{result} {name:<11} {check.seconds:7.1f} s  {check.detail}")
        if check.remedy:
            self.notify(f"                           {check.remedy}")
        return check.ok

    def _broker(self) -> str:
        deadline = time.monotonic() + UNHEARD_SECONDS
        while True:
            cluster = self.broker.cluster()
            try:
                return self._size(cluster)
            except (Failed, InvalidRequest):
                is_coming = any(unheard(node.state) for node in cluster.nodes)
                if not is_coming or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _size(self, cluster: Cluster) -> str:
        """Find the session's options, and whether the site has nodes for them."""
        self.options = self._find_options()
        self.nodes = int(self.options["nodes"])
        self.gpus_per_node = int(self.options["gpus_per_node"])
        able = [node for node in cluster.nodes if node.available]
        if len(able) < self.nodes:
            states = ", ".join(f"{node.name}: {node.state}" for node in cluster.nodes)
            raise Failed(f"{len(able)} nodes are available and {self.nodes} are needed ({states}).", "")
        gpus = sum(sum(node.gpus.values()) for node in able)
        return f"{len(able)} nodes with {gpus} GPUs are available."

    def _login(self, visitor: Visitor) -> str:
        visitor.login(self.account.name, self.account.password)
        return f"{self.account.name} is logged in at {self.url}."

    def _start(self, visitor: Visitor) -> str:
        self.session = visitor.start(self.options)
        visitor.wait(self.session, "ready", timeout=180)
        return f"Session {self.session} is ready."

    def _notebook(self, visitor: Visitor) -> str:
        self.server_url = visitor.open(self.session)
        with visitor.kernel(self.server_url) as kernel:
            cell = kernel.run(
                "import glob, json, os, socket\n"
                "print(json.dumps({'host': socket.gethostname(), 'uid': os.getuid(),"
                " 'gpus': sorted(glob.glob('/dev/nvidia[0-9]*'))}))",
                timeout=60,
            )
        seen = json.loads(_printed(cell))
        if len(seen["gpus"]) != self.gpus_per_node:
            raise Failed(
                f"The notebook sees {len(seen['gpus'])} GPUs and {self.gpus_per_node} were requested.", ""
            )
        return f"A cell ran on {seen['host']} as uid {seen['uid']} and sees {len(seen['gpus'])} GPUs."

    def _check_privacy(self) -> str:
        if self.stranger is None:
            raise Skipped("No second account was given, see --stranger.")
        with Visitor(self.url, self.certificate) as visitor:
            visitor.login(self.stranger.name, self.stranger.password)
            visitor.fetch(f"{self.url.rstrip('/')}/jupyter/hub/home")
            for address in (f"{self.server_url}api/contents", f"{self.server_url}lab"):
                status = visitor.fetch(address).status_code
                if status < 400:
                    raise Failed(f"{self.stranger.name} got {status} from {address}.", "")
            page = visitor.fetch(f"{self.url.rstrip('/')}/sessions/{self.session}/")
            if page.status_code != 404:
                raise Failed(f"{self.stranger.name} got {page.status_code} from {page.url}.", "")
        return f"{self.stranger.name} was refused at the notebook server and at the session's page."

    def _training(self, visitor: Visitor) -> str:
        ranks = self.nodes * max(1, self.gpus_per_node)  # without GPUs the ranks train on processors
        if ranks == 1:
            raise Skipped("One node with at most one GPU has one rank: there is nothing to compare it with.")
        with visitor.kernel(self.server_url) as kernel:
            parallel = self._train(kernel, ranks)
            single = self._train(kernel, 1)
        hosts = sorted(set(parallel["hosts"]))
        first = list(zip(parallel["losses"], single["losses"], strict=False))[:STEPS_COMPARED]
        off = max(abs(a - b) / abs(b) for a, b in first)
        self.report = {
            "ranks": parallel["world_size"],
            "hosts": hosts,
            "accuracy": parallel["accuracy"],
            "steps_compared": len(first),
            "largest_relative_difference": off,
        }
        if parallel["world_size"] != ranks or len(parallel["hosts"]) != ranks or len(hosts) != self.nodes:
            raise Failed(
                f"{len(parallel['hosts'])} ranks on {hosts} took part instead of {ranks} on {self.nodes}.", ""
            )
        if len(first) < STEPS_COMPARED or off > RELATIVE_TOLERANCE:
            raise Failed(
                f"The losses of {len(first)} steps differ from one rank's by up to {off:.1e} relative; "
                f"{STEPS_COMPARED} steps within {RELATIVE_TOLERANCE:.0e} were expected.",
                "",
            )
        if parallel["accuracy"] <= ACCURACY_WANTED:
            raise Failed(f"The test accuracy is {parallel['accuracy']:.3f}, not above {ACCURACY_WANTED}.", "")
        return (
            f"{ranks} ranks on {' and '.join(hosts)}: accuracy {parallel['accuracy']:.3f}, losses of the "
            f"first {len(first)} steps within {off:.1e} of a single rank's."
        )

    def _train(self, kernel: NotebookKernel, ranks: int) -> dict[str, Any]:
        report = f"carme-validation-{self.session}-{ranks}.json"
        cell = kernel.run(
            f"!carme-run -n {ranks} {EXAMPLE} --report {report}",
            timeout=300,
            on_line=lambda line: self.notify(f"       | {_COLOURS.sub('', line)}"),
        )
        _printed(cell)
        read = kernel.run(
            f"import pathlib; p = pathlib.Path('{report}'); print(p.read_text()); p.unlink()", timeout=60
        )
        if not read.ok:
            raise Failed(f"The training run with {ranks} ranks left no report: {cell.output[-500:]}", "")
        return json.loads(read.output)

    def _stop(self, visitor: Visitor) -> str:
        visitor.stop(self.session)
        visitor.wait(self.session, "ended", timeout=60)
        return f"Session {self.session} has ended."

    def _accounting(self) -> str:
        end = time.monotonic() + 120
        while True:
            try:
                job = self._recorded()
            except SlurmError as error:
                if error.code == "no-accounting":
                    raise Skipped("Slurm keeps no accounting at this site.") from None
                raise
            if job and job.is_over:
                break
            if time.monotonic() > end:
                raise Failed(f"Slurm's accounting does not show session {self.session} as ended.", "")
            time.sleep(0.5)
        gpus = self.nodes * self.gpus_per_node
        if job.user != self.account.name or job.gpus != gpus or job.nodes != self.nodes:
            raise Failed(
                f"Job {job.id} is recorded for {job.user} with {job.nodes} nodes and {job.gpus} GPUs.", ""
            )
        if job.state not in {JobState.COMPLETED, JobState.CANCELLED}:
            raise Failed(f"Job {job.id} is recorded as {job.state}.", "")
        return f"Job {job.id} is recorded for {job.user}: {job.nodes} nodes, {job.gpus} GPUs, {job.state}."

    def _recorded(self) -> Job | None:
        jobs = self.broker.history(user=self.account.name)
        return next((job for job in jobs if job.name == f"session-{self.session}"), None)


def _printed(cell: CellResult) -> str:
    if not cell.ok:
        raise Failed(f"The cell ended with {cell.error}. It printed: {cell.output[-500:]}", "")
    return cell.output
