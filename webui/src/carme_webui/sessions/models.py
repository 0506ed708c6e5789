"""A session, its states, and what happened to it."""

import secrets
import string
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.db import models, transaction
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from carme.jobs import JobState, Phase, SessionOptions
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job

__all__ = ["OVER", "TRANSITIONS", "Event", "Session", "State", "new_name"]

NAME_PATTERN = r"s[a-z0-9]{8}"


class State(models.TextChoices):
    """Where in its life a session is."""

    REQUESTED = "requested", _("Requested")
    STARTING = "starting", _("Starting")
    RUNNING = "running", _("Running")
    STOPPING = "stopping", _("Stopping")
    ENDED = "ended", _("Ended")
    FAILED = "failed", _("Failed")


TRANSITIONS: dict[State, frozenset[State]] = {
    State.REQUESTED: frozenset({State.STARTING, State.STOPPING, State.FAILED}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPING, State.FAILED}),
    State.RUNNING: frozenset({State.STOPPING, State.ENDED, State.FAILED}),
    State.STOPPING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
    State.FAILED: frozenset(),
}
OVER = [state for state, following in TRANSITIONS.items() if not following]


def new_name() -> str:
    """A fresh name of a session: `s` and 8 characters."""
    letters = string.ascii_lowercase + string.digits
    return "s" + "".join(secrets.choice(letters) for _ in range(8))


class Session(models.Model):
    """One interactive session: a named server of JupyterHub and its Slurm job `session-NAME`.

    `sentence` says how it ended; `job_id` is known as soon as the job is seen in Slurm.
    """

    name = models.CharField(max_length=9, unique=True)
    owner = models.ForeignKey(User, on_delete=models.CASCADE)
    options = models.JSONField()
    state = models.CharField(max_length=16, choices=State.choices, default=State.REQUESTED, db_index=True)
    sentence = models.TextField(blank=True)
    job_id = models.BigIntegerField(null=True)
    created = models.DateTimeField(default=timezone.now)
    changed = models.DateTimeField(default=timezone.now)
    # When the hub was asked last, and since when it has had no server for this session.
    asked = models.DateTimeField(null=True)
    gone = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-created",)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def request(cls, owner: User, options: SessionOptions, name: str) -> tuple["Session", bool]:
        """The session `name` of this owner, and whether it was made now.

        The name comes with the form, so that a form sent twice makes one session.
        """
        with transaction.atomic():
            session, created = cls.objects.get_or_create(
                name=name, defaults={"owner": owner, "options": options.model_dump()}
            )
            if created:
                Event.objects.create(session=session, state=State.REQUESTED)
        if session.owner != owner:
            return cls.request(owner, options, new_name())
        return session, created

    def move(self, to: State, sentence: str = "", **fields: Any) -> bool:
        """Go to another state if the table allows it from the state in the database.

        Args:
            to: The new state.
            sentence: What happened, for the owner.
            fields: Other fields to set with it.

        Returns:
            Whether it did; otherwise somebody else was faster, and this object has the state that holds.
        """
        sources = [state for state, following in TRANSITIONS.items() if to in following]
        now = timezone.now()
        with transaction.atomic():
            moved = Session.objects.filter(pk=self.pk, state__in=sources).update(
                state=to, sentence=sentence, changed=now, **fields
            )
            if moved:
                Event.objects.create(session=self, state=to, sentence=sentence, at=now)
        self.refresh_from_db()
        return bool(moved)

    @property
    def asked_for(self) -> SessionOptions:
        """What the owner asked for."""
        return SessionOptions.model_validate(self.options)

    @property
    def title(self) -> str:
        """The owner's title, else the image's name."""
        return self.options["title"] or self.options["image"]

    @property
    def job_name(self) -> str:
        """The name of its Slurm job."""
        return f"session-{self.name}"

    @property
    def job(self) -> Job | None:
        """Its Slurm job, once Slurm has it."""
        if self.job_id is None:
            return None
        return Job.objects.filter(id=self.job_id).first()

    @property
    def is_over(self) -> bool:
        """It has ended or failed."""
        return self.state in OVER

    @property
    def label(self) -> str:
        """The state in a word or two; a start whose job waits says so."""
        job = self.job if self.state == State.STARTING else None
        if job is not None and job.phase is Phase.PENDING:
            return str(_("Waiting in the queue"))
        return str(State(self.state).label)

    @property
    def explanation(self) -> str:
        """Why the session is in this state, in plain words."""
        if self.sentence or self.is_over:
            return self.sentence
        job = self.job
        if self.state == State.STARTING and job is not None and job.phase is Phase.PENDING:
            return job.explanation
        return {
            State.REQUESTED: str(_("The request is on its way to JupyterHub.")),
            State.STARTING: str(_("The container is being started on its node."))
            if job is not None
            else str(_("The job is being submitted.")),
            State.STOPPING: str(_("The session is being stopped.")),
        }.get(State(self.state), "")

    @property
    def ends(self) -> datetime | None:
        """When the time limit will end it, while it runs."""
        job = self.job
        if self.is_over or job is None or job.started is None or job.minutes_limit is None:
            return None
        return job.started + timedelta(minutes=job.minutes_limit)

    @property
    def wants_log(self) -> bool:
        """Whether its owner should see the end of its log."""
        job = self.job
        return self.state == State.FAILED or (
            self.is_over and job is not None and job.state not in (JobState.COMPLETED, JobState.CANCELLED)
        )

    @property
    def url(self) -> str:
        """Where the session itself is."""
        return f"{settings.SITE.hub.base_path}user/{quote(self.owner.username)}/{self.name}/"

    def get_absolute_url(self) -> str:
        return reverse("session", args=[self.name])


class Event(models.Model):
    """A state that a session reached, and what was said about it."""

    session = models.ForeignKey(Session, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(default=timezone.now)
    state = models.CharField(max_length=16, choices=State.choices)
    sentence = models.TextField(blank=True)

    class Meta:
        ordering = ("at", "id")

    def __str__(self) -> str:
        return f"{self.session} {self.state}"
