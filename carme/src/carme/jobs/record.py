"""A job as Slurm reports it: the fields of `Job`, from which its outcome is derived."""

from datetime import datetime
from typing import Literal

from pydantic import ConfigDict

from carme.jobs.states import Canceller, JobState, Phase
from carme.scaling.predictions import Prediction
from carme.translation.models import Sentence, WithMessages

__all__ = ["JobRecord"]


class JobRecord(WithMessages):
    """One job. Times are in UTC, memory in MiB over all nodes, GPUs and processors over all nodes.

    `reason` is Slurm's word for why it waits.

    Attributes:
        detail: What is known about the reason for which it waits: the limit and its use, the booking's begin;
            of a suspended job `BY_SLURM` where Slurm itself suspends jobs.
        priority: Slurm's number; jobs with a higher one are considered first, 0 is on hold.
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
