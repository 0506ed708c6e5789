"""News, and times at which nodes are maintained."""

import secrets
from datetime import datetime, timedelta

from django.db import models
from django.urls import reverse
from django.utils import timezone

from carme.bookings import Window
from carme_webui.accounts.models import User
from carme_webui.caches import shared
from carme_webui.clocks import reader_zone, site_zone, span_words
from carme_webui.sentences import SentenceField

__all__ = ["Maintenance", "News", "latest_news", "upcoming_maintenance"]

#: How long before its start a maintenance is on every page.
AHEAD = timedelta(days=7)
LATEST = 3  # news on the dashboard


class News(models.Model):
    """Something that administrators publish for everybody."""

    title = models.CharField(max_length=120)
    text = models.TextField(max_length=4000, blank=True)
    by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    created = models.DateTimeField(default=timezone.now, db_index=True)
    # The last day on which it is on the dashboard; without it, as long as it is among the latest.
    until = models.DateField(null=True, blank=True)

    class Meta:
        ordering = ("-created", "-pk")

    def __str__(self) -> str:
        return self.title

    @classmethod
    def latest(cls) -> "models.QuerySet[News]":
        """What the dashboard shows."""
        today = timezone.now().astimezone(site_zone()).date()
        return cls.objects.filter(models.Q(until=None) | models.Q(until__gte=today))[:LATEST]


def new_name() -> str:
    """A fresh name: `carme-maintenance-` and 12 hexadecimal digits."""
    return f"carme-maintenance-{secrets.token_hex(6)}"


class Maintenance(models.Model):
    """A time at which administrators have nodes for themselves; `name` is also the reservation's in Slurm.

    Anyone who changes it asks the broker at once, and the reconciler asks again until both agree.
    """

    name = models.CharField(max_length=32, unique=True, default=new_name)
    title = models.CharField(max_length=120)
    text = models.TextField(max_length=4000, blank=True)
    by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    start = models.DateTimeField()
    end = models.DateTimeField(db_index=True)
    node_names = models.JSONField()
    # It is of all nodes that there were.
    whole = models.BooleanField(default=False)
    cancelled = models.DateTimeField(null=True, blank=True)
    # Since when Slurm keeps it; null while it does not, and why not.
    reserved = models.DateTimeField(null=True, blank=True)
    problem = SentenceField(blank=True)

    class Meta:
        ordering = ("start", "pk")

    def __str__(self) -> str:
        return self.title

    @classmethod
    def planned(cls, now: datetime) -> "models.QuerySet[Maintenance]":
        """Those that are not over."""
        return cls.objects.filter(cancelled=None, end__gt=now)

    @classmethod
    def upcoming(cls, now: datetime) -> "models.QuerySet[Maintenance]":
        """Those that every page shows."""
        return cls.planned(now).filter(start__lt=now + AHEAD)

    @property
    def window(self) -> Window:
        """What Slurm is to keep."""
        return Window(name=self.name, node_names=self.node_names, start=self.start, end=self.end)

    @property
    def span(self) -> str:
        """From when to when, by the reader's clocks."""
        return span_words(self.start, self.end, reader_zone())

    @property
    def begun(self) -> bool:
        """It is going on, or is over."""
        return self.start <= timezone.now()

    def get_absolute_url(self) -> str:
        return f"{reverse('maintenance')}#{self.name}"


def latest_news() -> list[News]:
    """What the dashboard shows of the announcements."""
    return shared("news", lambda: list(News.latest()))


def upcoming_maintenance() -> list[Maintenance]:
    """The maintenance that every page shows."""
    return shared("maintenance", lambda: list(Maintenance.upcoming(timezone.now())))
