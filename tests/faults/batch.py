"""One batch: sessions in every phase, one fault, and the time until all views show the same state again."""

import contextlib
import secrets
import time
from dataclasses import dataclass, field

import httpx

from carme.errors import CarmeError
from carme.sessions import SessionState
from carme.validation import NotebookKernel
from demo_site import DemoSite, wait_until
from faults.plan import NODE, PHASES, Fault
from faults.views import View, Views
from patience import HANG

USER, BLOCKING_USER = "user1", "user2"
#: Seconds for which all views must have shown the same state.
STEADY = 2.0


@dataclass
class Result:
    """The result of one session: seconds from the fault until all views agreed, the state, and problems."""

    seconds: float | None = None
    state: str = ""
    problems: list[str] = field(default_factory=list)


class Batch:
    """Four sessions of one user, one in each phase, all on one node.

    Args:
        site: The demo, idle.
    """

    def __init__(self, site: DemoSite) -> None:
        self.site = site
        self.views = Views(site, USER)
        self.names: dict[str, str] = {}
        self.results = {phase: Result() for phase in (*PHASES, "after")}
        self._kernel: NotebookKernel | None = None
        self._open = contextlib.ExitStack()
        self._secret = secrets.token_hex(4)

    def prepare(self) -> None:
        """Bring each session into its phase, the short phases last."""
        # Another user's job holds the other node so long that shorter sessions start before the queued one.
        self.site.run(
            *("head", "sbatch", "--nodelist=n2", "--gres=gpu:4", "--cpus-per-task=8", "--mem=16000"),
            *("--time=120", "--job-name=blocker", "--output=/dev/null", "--chdir=/tmp"),
            "--wrap=exec sleep 7200",
            user=BLOCKING_USER,
        )
        self._await_slurm("blocker", "RUNNING")
        visitor = self.views.visitor
        self._start("running")
        self._start("stopping")
        for phase in ("running", "stopping"):
            wait_until(f"{phase} is ready", lambda phase=phase: self._view(phase).state is SessionState.READY)
        self._kernel = self._open.enter_context(visitor.kernel(visitor.open(self.names["running"])))
        if not self._kernel.run(f"kept = {self._secret!r}", timeout=HANG).ok:
            raise AssertionError("The kernel of the running session does not work before the fault.")
        self._start("queued", nodes="2", gpus_per_node="4")
        wait_until("queued waits", lambda: self._view("queued").state is SessionState.QUEUED)
        self._start("starting")
        self._await_slurm(f"session-{self.names['starting']}", "RUNNING")
        visitor.stop(self.names["stopping"])

    def run_fault(self, fault: Fault) -> None:
        """Start the fault, and wait until all views show a correct state of each session."""
        begin = time.monotonic()
        fault.begin(self.site)
        repaired = False
        agreed: dict[str, tuple[float, SessionState]] = {}
        views: dict[str, View] = {}
        while time.monotonic() - begin < fault.patience:
            if not repaired and time.monotonic() - begin >= fault.seconds:
                fault.end(self.site)
                repaired = True
            requested = time.monotonic() - begin
            views = self.views.observe(list(self.names.values()))
            for phase, name in self.names.items():
                state = views[name].state
                if state is None or state not in fault.outcome[phase]:
                    agreed.pop(phase, None)
                elif phase not in agreed or agreed[phase][1] is not state:
                    agreed[phase] = (requested, state)
            steady = all(requested - since >= STEADY for since, _ in agreed.values())
            if repaired and len(agreed) == len(self.names) and steady:
                break
            time.sleep(0.2)
        if not repaired:
            fault.end(self.site)
        for phase, name in self.names.items():
            result = self.results[phase]
            if phase in agreed:
                result.seconds, result.state = round(agreed[phase][0], 1), str(agreed[phase][1])
            else:
                result.problems.append(f"not agreed after {fault.patience:.0f} s: {views[name]}")
            if result.state == SessionState.ENDED and phase != "stopping" and not views[name].sentence:
                result.problems.append("it ended, and no sentence says why")
        self._check_kernel()

    def _check_kernel(self) -> None:
        result = self.results["running"]
        if result.state != SessionState.READY or self._kernel is None:
            return
        try:
            self._kernel.connect()
            cell = self._kernel.run("print(kept)", timeout=HANG)
        except (CarmeError, OSError) as error:
            result.problems.append(f"its kernel cannot be used: {error}")
            return
        if cell.output.strip() != self._secret:
            result.problems.append(f"its kernel lost its state: {cell.output} {cell.error}")

    def finish(self) -> None:
        """Stop the remaining sessions through the portal; nothing of them may be left."""
        after = self.results["after"]
        begin = time.monotonic()
        for name, view in self.views.observe(list(self.names.values())).items():
            if view.portal not in (SessionState.ENDED, SessionState.STOPPING):
                try:
                    self.views.visitor.stop(name)
                except CarmeError as error:
                    after.problems.append(f"{name} cannot be stopped: {error}")
        end = time.monotonic() + 60
        views: dict[str, View] = {}
        while time.monotonic() < end:
            views = self.views.observe(list(self.names.values()))
            if all(view.state is SessionState.ENDED for view in views.values()):
                break
            time.sleep(0.3)
        for phase, name in self.names.items():
            if views[name].state is not SessionState.ENDED:
                after.problems.append(f"{phase} ({name}) does not end: {views[name]}")
            self._check_accounting(phase, name)
        if orphans := self.views.jobs():
            after.problems.append(f"jobs are left in Slurm: {orphans}")
        if orphans := self.views.servers():
            after.problems.append(f"servers are left in the hub: {sorted(orphans)}")
        self.site.end_all_jobs()
        # A node that was cut off gets this only after it has registered again.
        end = time.monotonic() + 60
        while (found := self._processes()) and time.monotonic() < end:
            time.sleep(1)
        after.seconds = round(time.monotonic() - begin, 1)
        if found:
            after.problems.append(f"processes are left on {NODE}: {found}")

    def _processes(self) -> str:
        """Processes of the sessions' owner that still run on their node."""
        return self.site.run(NODE, "pgrep", "--list-full", "--euid", USER, check=False).stdout.strip()

    def _check_accounting(self, phase: str, name: str) -> None:
        """Check that the accounting has one submission and an end."""
        output = self.site.run(
            *("head", "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2"),
            *(f"--name=session-{name}", f"--user={USER}", "--starttime=now-2hours"),
            "--format=JobIDRaw,State,End,Start",
        ).stdout.split("\n")
        # A job that Slurm lost before it began has a record without a start; the one that followed it counts.
        jobs = [job for line in output if line and not _never_began(job := line.split("|"))]
        problems = self.results[phase].problems
        if len(jobs) != 1:
            problems.append(f"accounting has {len(jobs)} jobs of it instead of 1: {jobs}")
        problems += [f"accounting has no end of its job: {job}" for job in jobs if job[2] == "Unknown"]

    def close(self) -> None:
        """Close kernels and views."""
        with contextlib.suppress(httpx.HTTPError):  # the kernel went with its server
            self._open.close()
        self.views.close()

    def _start(self, phase: str, **options: str) -> None:
        form = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "30", "title": phase}
        self.names[phase] = self.views.visitor.start(form | options)

    def _view(self, phase: str) -> View:
        name = self.names[phase]
        return self.views.observe([name])[name]

    def _await_slurm(self, job: str, state: str) -> None:
        def there() -> bool:
            found = self.site.run("head", "squeue", "--noheader", f"--name={job}", "--format=%T").stdout
            return found.strip() == state

        wait_until(f"{job} is {state}", there)


def _never_began(job: list[str]) -> bool:
    """Whether this is the record of a lost job that was closed when the job was submitted again."""
    _, state, end, start = job
    return state == "COMPLETED" and end != "Unknown" and start in ("None", "Unknown")
