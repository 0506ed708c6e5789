"""Jobs as Slurm reported them last, and how far the mirror has read."""

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from carme import jobs
from carme.jobs import arrays
from carme_webui.caches import shared
from carme_webui.jobs.waiting import Waiting, waiting
from carme_webui.sentences import SentenceField
from carme_webui.sessions.clock import Remaining

if TYPE_CHECKING:
    from carme_webui.jobs.progress import Progress

__all__ = ["Job", "Mirror", "silence"]

#: The mirror is read more often than that, as the broker answers within seconds also if nothing has changed.
OLD_AFTER = timedelta(minutes=1)


class Job(models.Model):
    """One job; the fields are those of `carme.jobs.Job` that pages show. The id is Slurm's."""

    id = models.BigIntegerField(primary_key=True)
    key = models.CharField(max_length=64, null=True)
    kind = models.CharField(max_length=16)
    image = models.CharField(max_length=128, null=True)
    name = models.TextField()
    user = models.CharField(max_length=256)
    account = models.CharField(max_length=256)
    partition = models.CharField(max_length=256)
    state = models.CharField(max_length=32)
    reason = models.TextField()
    explanation = SentenceField()
    nodes = models.IntegerField()
    node_list = models.TextField()
    gpus = models.IntegerField()
    gpu_type = models.CharField(max_length=256, null=True)
    cpus = models.IntegerField()
    memory_mb = models.BigIntegerField()
    minutes_limit = models.IntegerField(null=True)
    submitted = models.DateTimeField(null=True)
    started = models.DateTimeField(null=True)
    planned_end = models.DateTimeField(null=True)
    ended = models.DateTimeField(null=True)
    exit_code = models.IntegerField(null=True)
    signal = models.IntegerField(null=True)
    # Of an array: its number, and which task this is, or those that wait together.
    array_id = models.BigIntegerField(null=True)
    task = models.IntegerField(null=True)
    tasks = models.TextField(default="")
    #: How far the tasks are of the array for which this row is shown (`carme_webui.jobs.arrays`): the
    #: state and the title are those of the array then. The same row is that of its last task.
    progress: "Progress | None" = None
    # Waits, runs or is being cleaned up. False also for a job whose end Slurm never reported.
    active = models.BooleanField()

    class Meta:
        ordering = ("-id",)
        # A user's jobs, newest first, all of them or those of a state, a kind or a time.
        indexes = (
            models.Index(fields=["user", "-id"]),
            models.Index(fields=["user", "state", "-id"]),
            models.Index(fields=["user", "kind", "-id"]),
            models.Index(fields=["user", "submitted"]),
            # What a project used, by month.
            models.Index(fields=["account", "submitted"], name="jobs_of_account"),
            # Few jobs are active, and few are tasks; the first one finds those of all users as well.
            models.Index(fields=["user"], name="active_jobs_of_user", condition=Q(active=True)),
            models.Index(fields=["array_id"], name="jobs_of_array", condition=Q(array_id__isnull=False)),
        )

    def __str__(self) -> str:
        return f"{self.id} {self.name}"

    @classmethod
    def of(cls, job: jobs.Job) -> "Job":
        """The unsaved row of what Slurm knows."""
        return cls(**job.model_dump(include={field.name for field in cls._meta.fields}), active=job.is_active)

    @classmethod
    def store(cls, known: Iterable[jobs.Job]) -> None:
        """Write what Slurm knows about these jobs, whether they have a row or not."""
        rows = {job.id: cls.of(job) for job in known}
        if rows:
            cls.objects.bulk_create(
                rows.values(),
                update_conflicts=True,
                unique_fields=["id"],
                update_fields=[field.name for field in cls._meta.fields if not field.primary_key],
                batch_size=200,
            )

    def get_absolute_url(self) -> str:
        return reverse("job", args=[self.id])

    @classmethod
    def of_array(cls, user: str, array_id: int, task: int | None = None) -> "Job | None":
        """The row of a job, or of a task of the array of that number, or of those that wait in it."""
        if task is None:
            return cls.objects.filter(user=user, id=array_id).first()
        rows = cls.objects.filter(user=user, array_id=array_id).filter(Q(task=task) | Q(task=None))
        found = {row.task: row for row in rows if row.task == task or arrays.includes(row.tasks, task)}
        return found.get(task) or found.get(None)

    @property
    def title(self) -> str:
        """What it is called: its number, or `123_4` for task 4 of array 123."""
        if self.array_id is None or self.progress is not None:
            return str(self.id)
        return arrays.task_name(self.array_id, self.tasks if self.task is None else self.task)

    @property
    def is_array(self) -> bool:
        """Whether its number is that of an array, too."""
        return self.array_id == self.id

    @property
    def task_url(self) -> str:
        """The page of this row by itself: of an array's last task, not that of the array."""
        alone = self.is_array and self.task is not None
        return self.get_absolute_url() + (f"?task={self.task}" if alone else "")

    @property
    def shown_state(self) -> jobs.JobState:
        """The state that pages show."""
        return jobs.JobState(self.state) if self.progress is None else self.progress.state

    @property
    def is_unfinished(self) -> bool:
        """Whether something of it waits or runs."""
        return self.active if self.progress is None else not self.progress.is_over

    @property
    def phase(self) -> jobs.Phase:
        """Where in its life the job is."""
        return self.shown_state.phase

    @property
    def tone(self) -> str:
        """The look of the state: `pending`, `running`, `ended` or `failed`."""
        if self.phase is jobs.Phase.OVER or not self.is_unfinished:
            calm = (jobs.JobState.COMPLETED, jobs.JobState.CANCELLED)
            return "ended" if self.shown_state in calm else "failed"
        return "pending" if self.phase is jobs.Phase.PENDING else "running"

    @property
    def remaining(self) -> Remaining | None:
        """How long it may still run; None unless it runs, is not suspended, and has a limit."""
        if self.progress is not None:
            return None  # each task has its own
        running = self.phase is jobs.Phase.RUNNING and self.state != jobs.JobState.SUSPENDED
        if not running or self.started is None or not self.minutes_limit:
            return None
        whole = timedelta(minutes=self.minutes_limit)
        ends = self.planned_end or self.started + whole
        return Remaining(ends, max(ends - timezone.now(), timedelta()), whole)

    @property
    def waiting(self) -> Waiting | None:
        """What holds it up and until when, while it waits."""
        return waiting(self.explanation, None, None) if self.phase is jobs.Phase.PENDING else None

    @property
    def extensible(self) -> bool:
        """Whether its owner may ask for more time; each task of an array is requested by itself."""
        policy = settings.SITE.session_policy(self.partition)
        return self.remaining is not None and policy.extend

    @property
    def state_label(self) -> str:
        """The state as a word for people, e.g. `out of memory`."""
        return gettext(self.shown_state.replace("_", " ").lower())


class Mirror(models.Model):
    """How far the mirror has read the broker's events: one row."""

    cursor = models.CharField(max_length=128, blank=True)
    # When the mirror last agreed with the broker, and when it last looked for jobs that left unseen.
    updated = models.DateTimeField(null=True)
    swept = models.DateTimeField(null=True)
    failure = SentenceField(blank=True, help_text=_("why the last round failed"))
    # Back to when the accounting has been read.
    past = models.DateTimeField(null=True)

    @classmethod
    def load(cls) -> "Mirror":
        """The row."""
        return cls.objects.get_or_create(pk=1)[0]

    @property
    def silence(self) -> str:
        """Why what pages show may be old; empty if it is not."""
        if self.failure or self.updated is None or timezone.now() - self.updated < OLD_AFTER:
            return self.failure
        return gettext(
            "The portal's link to the broker (carme-sync) is down. States of jobs and "
            "sessions may be out of date."
        )


def silence() -> str:
    """Why the last round of the mirror failed; empty if it did not."""
    return shared("silence", lambda: Mirror.load().silence)
