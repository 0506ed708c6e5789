"""A booking as its owner made it, and what became of it."""

import secrets
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import models
from django.urls import reverse
from django.utils import timezone

from carme.bookings import CAUSES, STATES, TRANSITIONS, BookingState, Cause, Hold, Wish
from carme.bookings.clock import span_text
from carme_webui.accounts.models import User

__all__ = ["Booking", "Calendar", "Feed", "new_name", "site_zone"]


def new_name() -> str:
    """A fresh name: `carme-` and 12 hexadecimal digits."""
    return f"carme-{secrets.token_hex(6)}"


def site_zone() -> ZoneInfo:
    """The zone of the site's clocks."""
    return ZoneInfo(settings.SITE.site.time_zone)


class Calendar(models.Model):
    """One row, locked by whoever looks for free nodes and takes them."""

    @classmethod
    def lock(cls) -> None:
        """Wait for one's turn; it lasts until the transaction ends."""
        cls.objects.get_or_create(pk=1)
        cls.objects.select_for_update().get(pk=1)


class Booking(models.Model):
    """Nodes that somebody has for a time; `name` is also that of the reservation in Slurm.

    The states are those of `carme.bookings`. What Slurm keeps follows from the row: whoever changes it asks
    the broker at once, and the reconciler asks again until both agree.
    """

    name = models.CharField(max_length=18, unique=True, default=new_name)
    owner = models.ForeignKey(User, on_delete=models.CASCADE)
    title = models.CharField(max_length=80, blank=True)
    partition = models.CharField(max_length=64)
    gpu_type = models.CharField(max_length=64)
    gpus_per_node = models.IntegerField()
    node_names = models.JSONField()
    # Who may use it besides the owner.
    users = models.JSONField(default=list)
    start = models.DateTimeField()
    end = models.DateTimeField()
    state = models.CharField(max_length=16, db_index=True)
    cause = models.CharField(max_length=16, blank=True)
    # When it really was over: earlier than its end when it was deleted or given back.
    ended = models.DateTimeField(null=True)
    # Since when Slurm keeps it; null while it does not, and why not.
    kept = models.DateTimeField(null=True)
    problem = models.TextField(blank=True)
    # When a job was seen in it last.
    used = models.DateTimeField(null=True)
    # The image of the session that is started in its first minute, and that session's name once it is to be.
    session_image = models.CharField(max_length=64, blank=True)
    session_name = models.CharField(max_length=9, blank=True)
    # Who may take it over.
    offered_to = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("start", "name")
        indexes = (models.Index(fields=["state", "start"]), models.Index(fields=["owner", "end"]))

    def __str__(self) -> str:
        return self.name

    @classmethod
    def open(cls) -> "models.QuerySet[Booking]":
        """Those that are not over."""
        return cls.objects.exclude(state=BookingState.ENDED).select_related("owner", "offered_to")

    @classmethod
    def usable(cls, user: User, now: datetime) -> "list[Booking]":
        """Those in which this user may run jobs, the next one first."""
        rows = cls.open().filter(state__in=[BookingState.APPROVED, BookingState.ACTIVE], end__gt=now)
        # Databases search in JSON in different ways; few bookings are open at a time.
        return [row for row in rows if row.may_be_used_by(user)]

    def may_be_used_by(self, user: User) -> bool:
        """Whether this user may run jobs in it."""
        return user == self.owner or user.username in self.users

    def may_be_seen_by(self, user: User) -> bool:
        """Whether this user may open its page: who may use it or take it over, and managers."""
        return user.is_staff or user == self.offered_to or self.may_be_used_by(user)

    def take(self, wish: Wish, node_names: list[str]) -> None:
        """Be what is wished for, on these nodes."""
        self.title, self.users = wish.title, [name for name in wish.users if name != self.owner.username]
        self.partition, self.gpu_type = wish.partition, wish.gpu_type
        self.gpus_per_node, self.node_names = wish.gpus_per_node, node_names
        self.start, self.end = wish.start, wish.end

    def move(self, to: BookingState | Cause, **fields: Any) -> bool:
        """Go to another state, or end for this cause, if the table allows it from the state in the database.

        Returns:
            Whether it did; this object then has the row's values, whoever changed it.
        """
        sources = [state for state in BookingState if to in TRANSITIONS[state]]
        values: dict[str, Any] = {"state": to}
        if isinstance(to, Cause):
            values = {"state": BookingState.ENDED, "cause": to, "ended": timezone.now(), "problem": ""}
        rows = Booking.objects.filter(pk=self.pk, state__in=sources)
        moved = rows.update(**(values | fields))
        self.refresh_from_db()
        return bool(moved)

    @property
    def hold(self) -> Hold:
        """What Slurm is to keep for it."""
        return Hold(
            name=self.name,
            partition=self.partition,
            node_names=self.node_names,
            users=[self.owner.username, *self.users],
            start=self.start,
            end=self.end,
        )

    @property
    def wish(self) -> Wish:
        """What was wished for."""
        return Wish(
            partition=self.partition,
            gpu_type=self.gpu_type,
            gpus_per_node=self.gpus_per_node,
            nodes=len(self.node_names),
            start=self.start,
            minutes=self.minutes,
            title=self.title,
            users=self.users,
        )

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
    def is_over(self) -> bool:
        """It has ended."""
        return self.state == BookingState.ENDED

    @property
    def label(self) -> str:
        """The state in users' words; of one that is over, why."""
        return CAUSES[Cause(self.cause)] if self.cause else STATES[BookingState(self.state)]

    @property
    def tone(self) -> str:
        """The look of the state."""
        if self.problem:
            return "failed"
        looks = {BookingState.REQUESTED: "pending", BookingState.APPROVED: "booked"}
        return looks.get(BookingState(self.state), "running" if not self.is_over else "ended")

    @property
    def heading(self) -> str:
        """Its title, else what it keeps."""
        return self.title or f"{self.gpus} x {self.gpu_type}"

    @property
    def span(self) -> str:
        """From when to when, by the site's clocks."""
        return span_text(self.start, self.end, site_zone())

    def get_absolute_url(self) -> str:
        return reverse("booking", args=[self.name])


class Feed(models.Model):
    """A user's calendar feed; another number makes another secret address."""

    owner = models.OneToOneField(User, on_delete=models.CASCADE, related_name="+")
    number = models.IntegerField(default=1)
