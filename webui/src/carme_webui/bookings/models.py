"""A booking as its owner made it, and what became of it."""

import secrets
from datetime import datetime, timedelta
from typing import Any

from django.db import models, transaction
from django.db.models.functions import Cast, StrIndex
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from carme.bookings import CAUSES, STATES, TRANSITIONS, BookingRequest, BookingState, Cause, ReservationSpec
from carme.config import BookingSettings, Settings
from carme_webui.accounts.models import User
from carme_webui.clocks import reader_zone, span_words
from carme_webui.projects.models import Project, own_projects, projects_of
from carme_webui.sentences import SentenceField

__all__ = ["Booking", "Calendar", "Feed", "new_name"]


def new_name() -> str:
    """A fresh name: `carme-` and 12 hexadecimal digits."""
    return f"carme-{secrets.token_hex(6)}"


class Calendar(models.Model):
    """One row, locked by anyone who looks for free nodes and takes them."""

    @classmethod
    def lock(cls) -> None:
        """Wait for one's turn; it lasts until the transaction ends."""
        cls.objects.get_or_create(pk=1)
        cls.objects.select_for_update().get(pk=1)


#: As the indexes have it, which serve only queries that say the same.
_OPEN = ~models.Q(state=BookingState.ENDED.value)
_SHARED = ~models.Q(users=[])


class Booking(models.Model):
    """Nodes that somebody has for a time; `name` is also that of the reservation in Slurm.

    The states are those of `carme.bookings`. What Slurm keeps follows from the row: who changes it asks
    the broker at once, and the reconciler asks again until both agree.
    """

    name = models.CharField(max_length=18, unique=True, default=new_name)
    owner_id: int
    owner = models.ForeignKey(User, on_delete=models.CASCADE)
    title = models.CharField(max_length=80, blank=True)
    partition = models.CharField(max_length=64)
    gpu_type = models.CharField(max_length=64)
    gpus_per_node = models.IntegerField()
    node_names = models.JSONField()
    # Whose members may all use it, with jobs that the project pays; it counts as the project's then.
    project_id: "int | None"
    project = models.ForeignKey(
        Project, null=True, blank=True, on_delete=models.CASCADE, related_name="bookings"
    )
    # Who may use it besides the owner, unless it is a project's.
    users = models.JSONField(default=list)
    start = models.DateTimeField()
    end = models.DateTimeField()
    state = models.CharField(max_length=16, db_index=True)
    cause = models.CharField(max_length=16, blank=True)
    # When it really was over: earlier than its end when it was deleted or given back.
    ended = models.DateTimeField(null=True)
    # Since when Slurm keeps it; null while it does not, and why not.
    reserved = models.DateTimeField(null=True)
    problem = SentenceField(blank=True)
    # When a job was seen in it last.
    used = models.DateTimeField(null=True)
    # The image of the session that is started in its first minute, and that session's name once it is to be.
    session_image = models.CharField(max_length=128, blank=True)
    session_name = models.CharField(max_length=9, blank=True)
    # What that session's data is (`carme.jobs.Stage`), and where its results go.
    session_stage = models.JSONField(default=list)
    session_results = models.CharField(max_length=4096, blank=True)
    # The job that brings the data before the booking begins: its name, when it was requested last, its
    # number, when it was done, or why it was not.
    stage_name = models.CharField(max_length=56, blank=True)
    stage_requested = models.DateTimeField(null=True)
    stage_job = models.BigIntegerField(null=True)
    staged = models.DateTimeField(null=True)
    stage_problem = SentenceField(blank=True)
    # Who may take it over.
    offered_to_id: "int | None"
    offered_to = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("start", "name")
        indexes = (
            models.Index(fields=["state", "start"]),
            models.Index(fields=["owner", "end"]),
            # Most bookings of a year are over, and few are shared.
            models.Index(fields=["start"], name="open_bookings", condition=_OPEN),
            models.Index(fields=["start"], name="shared_bookings", condition=_OPEN & _SHARED),
        )

    def __str__(self) -> str:
        return self.name

    @classmethod
    def open(cls) -> "models.QuerySet[Booking]":
        """Those that are not over."""
        return cls.objects.filter(_OPEN).select_related("owner", "offered_to", "project")

    @classmethod
    def usable(cls, user: User, now: datetime) -> "list[Booking]":
        """Those in which this user may run jobs, the next one first."""
        states = (BookingState.APPROVED, BookingState.ACTIVE)
        rows = [row for row in cls.related_to(user) if row.state in states and row.end > now]
        return [row for row in rows if row.may_be_used_by(user)]

    @classmethod
    def related_to(cls, user: User) -> "list[Booking]":
        """Those that are not over and that a user owns, may use or may take over; or maybe a few more."""
        # Databases search in JSON in different ways; all can search its text.
        named = StrIndex(Cast("users", models.TextField()), models.Value(f'"{user.username}"'))
        own = models.Q(owner=user) | models.Q(offered_to=user) | models.Q(project__in=projects_of(user))
        found = cls.objects.filter(_OPEN).alias(named=named)
        # Each of these has an index: those who have no booking do not wait until all of a year are read.
        rows = list(found.filter(own | _SHARED & models.Q(named__gt=0)))
        # The columns of three more tables would cost most readers more than the rest of the question.
        projects = {project.pk: project for project in own_projects(user)}
        for row in rows:
            if row.owner_id == user.pk:
                row.owner = user
            if row.project_id in projects:
                row.project = projects[row.project_id]
        known = {None, *projects}
        incomplete = [
            row for row in rows if row.owner_id != user.pk or row.offered_to_id or row.project_id not in known
        ]
        models.prefetch_related_objects(incomplete, "owner", "offered_to", "project")
        return rows

    def may_be_used_by(self, user: User) -> bool:
        """Whether this user may run jobs in it."""
        if self.project_id is not None:
            return self.project_id in projects_of(user)
        return user.pk == self.owner_id or user.username in self.users

    def may_be_seen_by(self, user: User) -> bool:
        """Whether this user may open its page: who may use it or take it over, and managers."""
        return user.is_staff or user in (self.owner, self.offered_to) or self.may_be_used_by(user)

    def people(self) -> "list[User]":
        """The owner and who else may use it."""
        if self.project is not None:
            return [
                membership.user for membership in self.project.memberships.all() if membership.user.is_active
            ]
        return [self.owner, *User.objects.filter(username__in=self.users, is_active=True)]

    def take(self, proposed: BookingRequest, node_names: list[str]) -> None:
        """Be what is requested, on these nodes."""
        self.title, self.users = (
            proposed.title,
            [name for name in proposed.users if name != self.owner.username],
        )
        if self.project is not None:
            self.users = []
        self.partition, self.gpu_type = proposed.partition, proposed.gpu_type
        self.gpus_per_node, self.node_names = proposed.gpus_per_node, node_names
        self.start, self.end = proposed.start, proposed.end

    def move(self, to: BookingState | Cause, **fields: Any) -> bool:
        """Go to another state, or end for this cause, if the table allows it from the state in the database.

        Returns:
            Whether it did; this object then has the row's values, no matter who changed it.
        """
        sources = [state for state in BookingState if to in TRANSITIONS[state]]
        values: dict[str, Any] = {"state": to}
        if isinstance(to, Cause):
            values = {"state": BookingState.ENDED, "cause": to, "ended": timezone.now(), "problem": ""}
        return self.alter(Booking.objects.filter(state__in=sources), **(values | fields))

    def alter(self, among: "models.QuerySet[Booking]", **values: Any) -> bool:
        """Set these fields if the row is `among` these now, and have the audit log hold it.

        Returns:
            Whether it was; this object then has the row's values, no matter who changed it.
        """
        with transaction.atomic():
            row = among.select_related(None).select_for_update().filter(pk=self.pk).first()
            if row is not None:
                for name, value in values.items():
                    setattr(row, name, value)
                row.save(update_fields=list(values))
        self.refresh_from_db()
        return row is not None

    @property
    def reservation_spec(self) -> ReservationSpec:
        """What Slurm is to keep for it."""
        return ReservationSpec(
            name=self.name,
            partition=self.partition,
            node_names=self.node_names,
            users=[] if self.project else [self.owner.username, *self.users],
            accounts=[self.project.account] if self.project else [],
            start=self.start,
            end=self.end,
        )

    @property
    def proposed(self) -> BookingRequest:
        """What was requested."""
        return BookingRequest(
            partition=self.partition,
            gpu_type=self.gpu_type,
            gpus_per_node=self.gpus_per_node,
            nodes=len(self.node_names),
            start=self.start,
            minutes=self.minutes,
            title=self.title,
            users=self.users,
            project=self.project.name if self.project else "",
        )

    def policy(self, site: Settings) -> BookingSettings:
        """The site's rules for it."""
        return site.booking_policy(self.partition, self.project.name if self.project else "")

    @property
    def minutes(self) -> int:
        """How long it lasts."""
        return (self.end - self.start) // timedelta(minutes=1)

    @property
    def gpus(self) -> int:
        """GPUs on all its nodes."""
        return len(self.node_names) * self.gpus_per_node

    @property
    def gpu_hours(self) -> float:
        """What it costs; the time after it was given back is not counted."""
        end = min(self.end, self.ended) if self.ended else self.end
        return max(0.0, (end - self.start) / timedelta(hours=1)) * self.gpus

    @property
    def gpu_hours_left(self) -> float:
        """What the rest of it costs: up to now its jobs are counted."""
        left = self.end - max(self.start, timezone.now())
        return 0.0 if self.is_over else max(0.0, left / timedelta(hours=1)) * self.gpus

    @property
    def is_over(self) -> bool:
        """It has ended."""
        return self.state == BookingState.ENDED

    @property
    def label(self) -> str:
        """The state in users' words; of one that is over, why."""
        return _(CAUSES[Cause(self.cause)] if self.cause else STATES[BookingState(self.state)])

    @property
    def tone(self) -> str:
        """The look of the state."""
        if self.problem:
            return "failed"
        tones = {BookingState.REQUESTED: "pending", BookingState.APPROVED: "booked"}
        return tones.get(BookingState(self.state), "running" if not self.is_over else "ended")

    @property
    def heading(self) -> str:
        """Its title, else what it keeps."""
        return self.title or f"{self.gpus} x {self.gpu_type}"

    @property
    def span(self) -> str:
        """From when to when, by the reader's clocks."""
        return span_words(self.start, self.end, reader_zone())

    def get_absolute_url(self) -> str:
        return reverse("booking", args=[self.name])


class Feed(models.Model):
    """A user's calendar feed; another number makes another secret address."""

    owner = models.OneToOneField(User, on_delete=models.CASCADE, related_name="+")
    number = models.IntegerField(default=1)
