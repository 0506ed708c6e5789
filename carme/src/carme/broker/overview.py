"""The whole site in one answer, for those who watch it.

Figures of all users' jobs, but no words of their own choosing, no keys, and nothing that lets one act.
"""

from datetime import datetime

from pydantic import BaseModel, ConfigDict

from carme.jobs import Cluster, Job, JobState, Licence, Reservation
from carme.sessions import Ending, Session, SessionState, Step

__all__ = ["JobFigures", "Overview", "RunningJob", "SessionFigures"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class JobFigures(_Model):
    """One job in Slurm's queue; fields as in `Job`."""

    id: int
    user: str
    account: str
    partition: str
    state: JobState
    reason: str
    kind: str
    nodes: int
    cpus: int
    memory_mb: int
    gpus: int
    gpu_type: str | None
    submitted: datetime | None
    started: datetime | None

    @classmethod
    def of(cls, job: Job) -> "JobFigures":
        """What may be published of a job."""
        return cls(**{name: getattr(job, name) for name in cls.model_fields})


class RunningJob(_Model):
    """A job that has nodes now, with what a calendar shows of it; fields as in `Job`."""

    id: int
    user: str
    reservation: str
    node_list: str
    started: datetime | None
    ends: datetime | None

    @classmethod
    def of(cls, job: Job) -> "RunningJob":
        """What a calendar shows of a job."""
        return cls(**{name: getattr(job, name) for name in cls.model_fields})


class SessionFigures(_Model):
    """One session that is active or ended within the last day; `marks` are the steps of its start."""

    job_id: int
    image: str | None
    state: SessionState
    ending: Ending | None
    marks: dict[Step, datetime]

    @classmethod
    def of(cls, session: Session) -> "SessionFigures":
        """What may be published of a session."""
        return cls(
            job_id=session.job_id,
            image=session.image,
            state=session.state,
            ending=session.ending,
            marks={mark.step: mark.at for mark in session.marks},
        )


class Overview(_Model):
    """What the broker knows about the site. Slurm is not queried for this answer.

    Attributes:
        answered: When Slurm answered last; while it is away the last snapshot stays.
        failure: Why Slurm does not answer; empty while it does.
        reservations, licences: None until they have been seen: the broker looks for them, every half minute,
            only while somebody asks for overviews.
    """

    answered: datetime | None
    failure: str = ""
    jobs: list[JobFigures] = []
    cluster: Cluster | None = None
    reservations: list[Reservation] | None = None
    licences: list[Licence] | None = None
    sessions: list[SessionFigures] = []
