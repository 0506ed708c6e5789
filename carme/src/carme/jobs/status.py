"""What Slurm knows about a job."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

from carme.jobs.arrays import includes, task_name
from carme.jobs.endings import ending_of
from carme.jobs.explanations import waiting_for
from carme.jobs.states import JobState, Phase


class Job(BaseModel):
    """One job. Times are in UTC, memory in MiB over all nodes, GPUs and processors over all nodes.

    `reason` is Slurm's word for why it waits, `explanation` the same, or how it ended, in plain words.

    Attributes:
        detail: What is known about the reason for which it waits: the limit and its use, the booking's begin.
        priority: Slurm's number; jobs with a higher one are looked at first, 0 is on hold.
        planned_start, planned_nodes: Where and when Slurm's scheduler means to start it while it waits.
        reservation, qos: The reservation and the quality of service that it belongs to.
        cancelled_by: Who cancelled it; None when it was not, or that is not known (yet).
        peak_memory_mb: The most memory (MiB) that it had on one node, known for jobs that ran out of it.
        failed_node: The node whose failure ended it.
        array_id: The array that it is a task of: Slurm's number of all of them together.
        task: Which task of it; None for what stands for several that wait.
        tasks: Those several, like `5-9%2`.
        preempted_by: What took its place when Slurm preempted it, in words; empty when that is not known, or
            not its owner's to know.
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
    detail: str = ""
    priority: int | None = None
    planned_start: datetime | None = None
    planned_nodes: str = ""
    reservation: str = ""
    qos: str = ""
    nodes: int = 0
    node_list: str = ""
    gpus: int = 0
    gpu_type: str | None = None
    cpus: int = 0
    memory_mb: int = 0
    minutes_limit: int | None = None
    submitted: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    exit_code: int | None = None
    signal: int | None = None
    cancelled_by: Literal["owner", "other"] | None = None
    peak_memory_mb: int | None = None
    failed_node: str = ""
    preempted_by: str = ""
    array_id: int | None = None
    task: int | None = None
    tasks: str = ""

    @computed_field
    @property
    def explanation(self) -> str:
        """One sentence for a job that waits or has ended; empty while it runs."""
        if self.is_over:
            return ending_of(self, None, was_ready=True)[1]
        if self.state is JobState.CONFIGURING:
            return waiting_for("Prolog")
        # Ours depend on nothing but the job that brings their data.
        staging = self.reason == "Dependency" and self.kind != "other"
        reason = "BurstBufferStageIn" if staging else self.reason
        return waiting_for(reason, self.detail) if self.is_pending else ""

    @property
    def slurm_name(self) -> str:
        """What Slurm's programs call it, and nothing else: an array's number would mean all of its tasks."""
        if self.array_id is None or not (self.task is not None or self.tasks):
            return str(self.id)
        return task_name(self.array_id, self.tasks.partition("%")[0] if self.task is None else self.task)

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
    def is_over(self) -> bool:
        """It has ended and its nodes are free."""
        return self.state.phase is Phase.OVER

    @property
    def is_active(self) -> bool:
        """It is not over: it waits, runs, or its nodes are still being freed."""
        return not self.is_over


class StartEstimate(BaseModel):
    """What Slurm thinks of a request: the expected start (UTC), the nodes, and Slurm's own words."""

    model_config = ConfigDict(frozen=True)

    start: datetime | None = None
    nodes: str = ""
    message: str = ""
