"""What Slurm knows about a job."""

from datetime import datetime, timedelta
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, computed_field

from carme.jobs.arrays import count, includes, task_name
from carme.jobs.cluster import Cluster
from carme.jobs.explanations import BY_SLURM, suspended, waiting_for
from carme.jobs.nodes import expand
from carme.jobs.outcome import ending_of
from carme.jobs.states import Canceller, JobState, Phase
from carme.scaling.predictions import Prediction
from carme.translation.models import Sentence, WithMessages


class Job(WithMessages):
    """One job. Times are in UTC, memory in MiB over all nodes, GPUs and processors over all nodes.

    `reason` is Slurm's word for why it waits, `explanation` the same, or how it ended, in plain words.

    Attributes:
        detail: What is known about the reason for which it waits: the limit and its use, the booking's begin;
            of a suspended job `BY_SLURM` where Slurm itself suspends jobs.
        priority: Slurm's number; jobs with a higher one are looked at first, 0 is on hold.
        planned_start, planned_nodes: Where and when Slurm's scheduler means to start it while it waits.
        planned_end: When Slurm ends it as things stand, while it runs and has a limit.
        seconds_left: What is left of its time while it is suspended: that stands still.
        whole_nodes: It gets all of its nodes, however little it asks for.
        reservation, qos: The reservation and the quality of service that it belongs to.
        cancelled_by: Who cancelled it; None when it was not, or that is not known (yet).
        peak_memory_mb: The most memory (MiB) that it had on one node, known for jobs that ran out of it.
        failed_node: The node whose failure ended it.
        array_id: The array that it is a task of: Slurm's number of all of them together.
        task: Which task of it; None for what stands for several that wait.
        tasks: Those several, like `5-9%2`.
        restarts: How often Slurm has put it back into the queue.
        preempted_by: What took its place when Slurm preempted it, in words; empty when that is not known, or
            not its owner's to know.
        prediction: The probe's prediction for its nodes and GPUs; None: there is none, or the broker forgot.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: int
    key: str | None = None
    kind: Literal["session", "batch", "other"] = "other"
    image: str | None = None
    name: str
    user: str
    account: str = ""
    partition: str = ""
    state: JobState
    reason: str = ""
    detail: Sentence = ""
    priority: int | None = None
    planned_start: datetime | None = None
    planned_nodes: str = ""
    planned_end: datetime | None = None
    seconds_left: int | None = None
    reservation: str = ""
    qos: str = ""
    nodes: int = 0
    node_list: str = ""
    gpus: int = 0
    gpu_type: str | None = None
    whole_nodes: bool = False
    cpus: int = 0
    memory_mb: int = 0
    minutes_limit: int | None = None
    submitted: datetime | None = None
    restarts: int = 0
    started: datetime | None = None
    ended: datetime | None = None
    exit_code: int | None = None
    signal: int | None = None
    cancelled_by: Canceller | None = None
    peak_memory_mb: int | None = None
    failed_node: str = ""
    preempted_by: Sentence = ""
    array_id: int | None = None
    task: int | None = None
    tasks: str = ""
    prediction: Prediction | None = None

    @computed_field
    @property
    def explanation(self) -> str:
        """One sentence for a job that waits, is suspended or has ended; empty while it runs."""
        if self.is_over:
            return ending_of(self, None, was_ready=True)[1]
        if self.state is JobState.CONFIGURING:
            return waiting_for("Prolog")
        if self.is_suspended:
            return suspended(self.kind == "session", self.detail == BY_SLURM, self.seconds_left)
        # Ours depend on nothing but the job that brings their data.
        staging = self.reason == "Dependency" and self.kind != "other"
        reason = "BurstBufferStageIn" if staging else self.reason
        return waiting_for(reason, self.detail) if self.is_pending else ""

    def on(self, cluster: Cluster) -> Self:
        """The same with all that its nodes have, where it gets them whole but Slurm does not count that.

        While such a job waits Slurm counts what it asks for alone; then its planned nodes count, or the least
        that nodes of its partition have.
        """
        if not self.whole_nodes or self.is_over:
            return self
        names = expand(self.planned_nodes if self.is_pending else self.node_list)
        nodes = [node for node in cluster.nodes if node.name in names]
        times = 1
        if not nodes:
            members = cluster.members(self.partition)
            nodes, times = (
                sorted(members, key=lambda node: (sum(node.gpus.values()), node.cpus))[:1],
                self.nodes,
            )
        gpus = max(self.gpus, times * sum(sum(node.gpus.values()) for node in nodes))
        kinds = {kind for node in nodes for kind in node.gpus}
        kind = kinds.pop() if len(kinds) == 1 and kinds != {"gpu"} else None
        cpus = max(self.cpus, times * sum(node.cpus for node in nodes))
        return self.model_copy(update={"gpus": gpus, "gpu_type": self.gpu_type or kind, "cpus": cpus})

    @property
    def ends(self) -> datetime | None:
        """When Slurm ends it as things stand: its own word, else by its limit.

        None for a job that holds no nodes, has no limit, or is suspended: its time stands still.
        """
        if self.is_pending or self.is_over or self.is_suspended or self.minutes_limit is None:
            return None
        if self.planned_end is not None or self.started is None:
            return self.planned_end
        return self.started + timedelta(minutes=self.minutes_limit)

    @property
    def slurm_name(self) -> str:
        """What Slurm's programs call it, and nothing else: an array's number would mean all of its tasks."""
        if self.array_id is None or not (self.task is not None or self.tasks):
            return str(self.id)
        return task_name(self.array_id, self.tasks.partition("%")[0] if self.task is None else self.task)

    @property
    def count(self) -> int:
        """How many jobs it stands for: those of an array that wait are one until they start."""
        try:
            return count(self.tasks) if self.tasks else 1
        except ValueError:
            return 1

    def has_task(self, array_id: int, task: int) -> bool:
        """Whether it is this task of an array, or that one waits in it."""
        if self.array_id != array_id:
            return False
        return self.task == task if self.task is not None else includes(self.tasks, task)

    @property
    def is_pending(self) -> bool:
        """It waits for its nodes."""
        return self.state.phase is Phase.PENDING

    @property
    def is_running(self) -> bool:
        """Its processes run."""
        return self.state.phase is Phase.RUNNING

    @property
    def is_suspended(self) -> bool:
        """Its processes are stopped until somebody has them go on; it keeps its memory and its GPUs."""
        return self.state is JobState.SUSPENDED

    @property
    def is_over(self) -> bool:
        """It has ended and its nodes are free."""
        return self.state.phase is Phase.OVER

    @property
    def is_active(self) -> bool:
        """It is not over: it waits, runs, or its nodes are still being freed."""
        return not self.is_over


class StartEstimate(BaseModel):
    """What Slurm thinks of a request.

    Attributes:
        start: The expected start (UTC), where all jobs before it use up their time limits: the latest one.
        earliest: The start where they use as much of their limits as jobs lately did.
        nodes: Where it would run.
        message: Slurm's own words.
    """

    model_config = ConfigDict(frozen=True)

    start: datetime | None = None
    earliest: datetime | None = None
    nodes: str = ""
    message: str = ""
