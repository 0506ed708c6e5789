"""What Slurm knows about a job."""

from datetime import datetime, timedelta
from typing import Self

from pydantic import BaseModel, ConfigDict, computed_field

from carme.jobs.arrays import count, includes, task_name
from carme.jobs.cluster import Cluster
from carme.jobs.explanations import BY_SLURM, suspended, waiting_for
from carme.jobs.nodes import expand
from carme.jobs.outcome import ending_of
from carme.jobs.record import JobRecord
from carme.jobs.states import JobState


class Job(JobRecord):
    """One job, with what follows from its record.

    `explanation` says in plain words why it waits, or how it ended.
    """

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

    def with_whole_nodes(self, cluster: Cluster) -> Self:
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
