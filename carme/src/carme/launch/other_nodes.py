"""The agents on a job's other nodes: they join the first one, and come back after their node was lost."""

import json
import os
import time
from collections.abc import Callable

from carme.errors import CarmeError
from carme.launch.exits import Exit, LaunchError
from carme.launch.preparation import Allocation
from carme.launch.programs import POLL_SECONDS, Programs, log, without_export
from carme.launch.spec import JobSpec

ANNOUNCE_SECONDS = 120.0  # for the first agent to listen; images on a busy file system start slowly
GRACE_SECONDS = 5.0  # between the end of the agents here and there; each hears of the other's
HOSTS = "hosts.hydra"  # the list of the nodes that are there, in the private folder of each
WATCH_SECONDS = 1.0  # between two checks which nodes are there
RETURN_SECONDS = 5.0  # until a lost node is brought back; after each try that fails, twice as much
RETURN_MOST_SECONDS = 60.0
RETURN_TRIES = 12  # in a row; by then Slurm has long taken from the job a node that it cannot reach


def keep_other_agents(
    programs: Programs,
    first: int,
    spec: JobSpec,
    allocation: Allocation,
    joining: Callable[[str], list[str]],
) -> None:
    """Keep agents on the other nodes; returns when both the first and they have ended.

    Args:
        programs: What runs on this node.
        first: The first agent's number there.
        spec: The job's.
        allocation: The job's.
        joining: The command line that joins the first agent, which listens at `HOST:PORT`.
    """
    where = _announced(programs, first, f"{allocation.private}/fabric.json")
    if where is None:
        return
    agents = OtherAgents(programs, spec, allocation, joining(where))
    try:
        while not programs.has_ended(first):
            programs.wait_for_any(WATCH_SECONDS)
            # When the first agent ends, the others may hear of it before we do.
            code = agents.failed()
            if code is not None and not programs.has_ended(first, GRACE_SECONDS):
                programs.end(first)
                raise LaunchError(
                    Exit(code) if code in list(Exit) else Exit.FAILED,
                    f"The agents on the other nodes ended with exit code {code}; the job was ended.",
                    "See the lines above; if there are none, start the job again.",
                )
            agents.bring_back()
    finally:
        agents.end()


class OtherAgents:
    """The agents on all nodes but the first.

    They are started together. Who is lost afterwards is started anew, alone, while Slurm leaves its node to
    the job: what runs in the job may go on without it meanwhile, and then with it again.
    """

    def __init__(self, programs: Programs, spec: JobSpec, allocation: Allocation, program: list[str]) -> None:
        self._programs, self._spec, self._allocation, self._program = programs, spec, allocation, program
        self._together = self._start()
        self._alone: list[int] = []
        self._joined: set[str] = set()
        self._lost: dict[str, LostNode] = {}

    def failed(self) -> int | None:
        """The exit code with which they ended, unasked, before all of them had joined; None: they did not."""
        if self._programs.has_ended(self._together) and not self._programs.stopping:
            self._read_present()
            if len(self._joined) < self._allocation.nodes - 1:
                return self._programs.wait(self._together)
        return None

    def bring_back(self) -> None:
        """Start the agents of lost nodes, each time after a longer pause."""
        for program in self._alone:
            self._programs.has_ended(program)
        present = self._read_present()
        if present is None or self._programs.stopping:
            return
        self._lost = {node: lost for node, lost in self._lost.items() if node not in present}
        for node in sorted(self._joined - present):
            lost = self._lost.setdefault(node, LostNode())
            if lost.given_up or time.monotonic() < lost.due:
                continue
            if lost.program is not None and not self._programs.has_ended(lost.program):
                continue
            if lost.tries == RETURN_TRIES:
                lost.given_up = True
                log(f"After {RETURN_TRIES} tries to bring {node} back, the job goes on without it.")
                continue
            lost.program = self._start(node)
            self._alone.append(lost.program)
            lost.tries += 1
            lost.due = time.monotonic() + min(RETURN_SECONDS * 2**lost.tries, RETURN_MOST_SECONDS)

    def end(self) -> None:
        """See that they are over: agents leave by themselves when the first one does."""
        end = time.monotonic() + GRACE_SECONDS
        for program in (self._together, *self._alone):
            if not self._programs.has_ended(program, max(0.0, end - time.monotonic())):
                self._programs.end(program)

    def _read_present(self) -> set[str] | None:
        """The nodes that are there, by the list that the first agent keeps; None: it keeps none now."""
        try:
            with open(f"{self._allocation.private}/{HOSTS}", encoding="utf-8") as opened:
                present = {line.rpartition(":")[0] for line in opened} - {self._allocation.node}
        except OSError:  # it begins when somebody joins, and removes the list at its end
            return None
        self._joined |= present
        return present

    def _start(self, node: str = "") -> int:
        beginning = step(self._spec, self._allocation.nodes, node)
        return self._programs.start([*beginning, *self._program], without_export(os.environ))


class LostNode:
    """A node whose agent was lost."""

    def __init__(self) -> None:
        self.due = time.monotonic() + RETURN_SECONDS  # when it is tried next
        self.tries = 0
        self.program: int | None = None  # of the last one
        self.given_up = False


def _announced(programs: Programs, first: int, file: str) -> str | None:
    """`HOST:PORT` of the first agent; None when it has ended instead."""
    end = time.monotonic() + ANNOUNCE_SECONDS
    while not programs.has_ended(first, POLL_SECONDS):
        try:
            with open(file, encoding="utf-8") as opened:
                where = json.load(opened)
            return f"{where['host']}:{where['port']}"
        except (OSError, ValueError):  # not there, or not whole yet
            pass
        if time.monotonic() > end:
            programs.end(first)
            raise CarmeError(
                f"The agent on the first node did not listen within {ANNOUNCE_SECONDS:.0f} seconds.",
                "See the lines above, and try again.",
            )
    return None


def step(spec: JobSpec, nodes: int, only: str = "") -> list[str]:
    """The beginning of the command line that runs something once on each of the job's nodes but the first.

    Args:
        spec: The job's.
        nodes: How many the job has.
        only: A node on which alone it is to run.
    """
    where = [f"--nodes={nodes - 1}", f"--ntasks={nodes - 1}", "--relative=1"]
    if only:
        where = ["--nodes=1", "--ntasks=1", f"--nodelist={only}"]
    arguments = [
        *["srun", *where, "--ntasks-per-node=1", "--overlap", f"--cpus-per-task={spec.cpus}"],
        # A node that fails takes no other one with it.
        *["--cpu-bind=none", "--kill-on-bad-exit=1", "--no-kill", "--export=ALL", "--input=none"],
    ]
    if spec.gpus:
        kind = f":{spec.gpu_type}" if spec.gpu_type else ""
        arguments.append(f"--gres=gpu{kind}:{spec.gpus}")
    return arguments
