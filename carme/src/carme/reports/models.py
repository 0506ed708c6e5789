"""A report and its parts. Ratios are 0 to 1, memory is in bytes, energy in joules."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from carme.jobs import Job
from carme.translation.models import Sentence, WithMessages

__all__ = [
    "Advice",
    "Curve",
    "GpuUse",
    "JobWarning",
    "NodeUse",
    "Peers",
    "RankUse",
    "Report",
    "TrainingUse",
    "Usage",
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class GpuUse(_Model):
    """What one GPU did over the job's time.

    Attributes:
        busy: The mean of the share of time in which it ran a kernel.
        active: The share of the job's time in which it worked at all.
        memory_bytes, memory_total_bytes: The most memory in use, and what it has.
        energy_joules: What it drew.
    """

    node: str
    gpu: str
    busy: float
    active: float
    memory_bytes: float | None = None
    memory_total_bytes: float | None = None
    energy_joules: float | None = None


class NodeUse(_Model):
    """What the job did on one node.

    Attributes:
        cpus: Processors that it was given there; None if not known.
        cpus_used: The mean of those that worked.
        memory_bytes: The most that it held at once, page cache included; `memory_limit_bytes`: what it might.
        read_bytes, written_bytes: From disks and to them, over all its time.
    """

    node: str
    cpus: float | None = None
    cpus_used: float | None = None
    memory_bytes: float | None = None
    memory_limit_bytes: float | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None


class RankUse(_Model):
    """How training went on one rank, since its first step; fields as in `TrainingUse`."""

    node: str
    rank: int
    step_seconds: float | None = None
    samples_per_second: float | None = None
    data_wait: float | None = None
    rank_wait: float | None = None
    loss: float | None = None


class TrainingUse(_Model):
    """How training went, as its ranks reported; None: nobody measured that.

    Attributes:
        ranks: How many reported.
        step_seconds: The mean time of a step.
        samples_per_second: Of all ranks together.
        data_wait, rank_wait: The share of their time for which ranks waited for data, and for each other.
        loss: The last one, the mean over ranks.
        each: The same of each rank; of a record those for which was room.
    """

    ranks: int
    step_seconds: float | None = None
    samples_per_second: float | None = None
    data_wait: float | None = None
    rank_wait: float | None = None
    loss: float | None = None
    each: list[RankUse] = []


class Usage(_Model):
    """All of it; `seconds`: the time that it covers; `nodes_left_out`: those that there was no room for."""

    seconds: float
    nodes: list[NodeUse] = []
    gpus: list[GpuUse] = []
    nodes_left_out: int = 0
    training: TrainingUse | None = None


class Curve(_Model):
    """One line over the job's time: ratios every `step` seconds from `start` (seconds since 1970).

    Attributes:
        top: What 1 stands for, where that is not the whole of something; of `io` and `network` in bytes per
            second.
        whole: How much the whole is that 1 stands for: processors, or bytes of memory; None: a share alone.
        part: Of `rank_wait`, what the rank waited for: `data` or `ranks`.
    """

    what: str  # gpu, gpu_memory, cpu, memory, io, network, wait, steps, samples, loss, rank_wait
    name: str
    start: float
    step: float
    values: list[float | None]
    top: float | None = None
    whole: float | None = None
    part: str = ""


class Advice(WithMessages, _Model):
    """What to change: a sentence for why, and what to write instead; show both by `translated`."""

    topic: str
    text: Sentence
    change: Sentence = ""


class JobWarning(_Model):
    """What the site's policy about alerts did last to a job.

    Attributes:
        started: Since when the job runs: Slurm uses numbers again.
        count, most: Which warning it is, and how many there are.
        what: The rules' own sentences, each with its advice.
        ends: When the job is stopped unless that changes; None: it is not.
        stopped: When it was stopped; None: it was not.
    """

    job_id: int
    user: str
    started: datetime
    count: int
    most: int
    what: list[Advice]
    ends: datetime | None = None
    stopped: datetime | None = None


class Peers(_Model):
    """The owner's earlier jobs of the same name and size: how many, and the medians of their efficiency."""

    jobs: int = 0
    gpu_busy: float | None = None
    cpu: float | None = None
    memory: float | None = None


class Report(_Model):
    """What `carme report` reports.

    Attributes:
        source: Where `usage` is from: metrics (`live`), nodes' exporters since somebody looks (`exporters`),
            the record in the accounting (`record`), or nowhere (`none`).
        trouble: Why the site's metrics could not be queried; empty: they were, or there are none.
        monitored: Whether the site has metrics at all.
        seen_enough: Whether so much of the run was seen that advice about its use can be given.
        waited_seconds: In the queue.
    """

    job: Job
    source: str = "none"
    trouble: str = ""
    monitored: bool = True
    seen_enough: bool = True
    usage: Usage | None = None
    curves: list[Curve] = []
    waited_seconds: float | None = None
    ran_seconds: float | None = None
    energy_joules: float | None = None
    efficiency: dict[str, float] = Field(default_factory=dict)
    peers: Peers = Peers()
    advice: list[Advice] = []
