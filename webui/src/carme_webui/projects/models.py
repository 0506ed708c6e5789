"""A project, who is in it, and who is invited to join."""

from typing import Any

from django.conf import settings
from django.core.validators import RegexValidator
from django.db import models
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from carme.bookings import BookingState
from carme.jobs import Access, Cluster, usable_partitions
from carme.projects import NAME_PATTERN, Grant, Use, account_of
from carme_webui.accounts.models import User
from carme_webui.caches import derived
from carme_webui.clocks import minutes_words
from carme_webui.cluster import access_of
from carme_webui.sentences import SentenceField

__all__ = [
    *("Invitation", "Membership", "Project", "access_for", "accounts_of", "own_projects", "payers"),
    *("projects_of", "usable_by"),
]


class Project(models.Model):
    """People who share an account of Slurm; what that may use follows from the row.

    Who changes it asks the broker at once, and the reconciler asks again until both agree. A limit that
    is null is none; no partition chosen means all of them.
    """

    name = models.CharField(
        _("name"),
        max_length=32,
        unique=True,
        validators=[
            RegexValidator(
                rf"^{NAME_PATTERN}\Z",
                _(
                    "A project's name has up to 32 lower-case letters, digits and hyphens and begins with a "
                    "letter."
                ),
            )
        ],
        error_messages={"unique": _("There is already a project of that name.")},
    )
    title = models.CharField(_("title"), max_length=80)
    partitions = models.JSONField(default=list, blank=True)
    # Type to number; a type that is not named has no limit.
    gpu_types = models.JSONField(default=dict, blank=True)
    gpus = models.IntegerField(null=True, blank=True)
    nodes = models.IntegerField(null=True, blank=True)
    jobs = models.IntegerField(null=True, blank=True)
    minutes = models.IntegerField(null=True, blank=True)
    gpu_hours = models.IntegerField(null=True, blank=True)
    created = models.DateTimeField(default=timezone.now)
    closed = models.DateTimeField(null=True, blank=True)
    # Since when Slurm grants what the row says; null while it does not, and why not.
    granted = models.DateTimeField(null=True, blank=True)
    problem = SentenceField(blank=True)
    # What Slurm had counted at the last check.
    used = models.JSONField(default=dict, blank=True)

    memberships: "models.QuerySet[Membership]"
    bookings: "models.QuerySet[Any]"
    invitations: "models.QuerySet[Invitation]"

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of(cls, user: User) -> "models.QuerySet[Project]":
        """Those in which a user may run jobs."""
        return cls.objects.filter(closed=None, memberships__user=user)

    @property
    def account(self) -> str:
        """Its account in Slurm."""
        return account_of(self.name)

    @property
    def grant(self) -> Grant:
        """What Slurm is to grant it; asks the database for members unless they were fetched."""
        users = [] if self.closed else [membership.user for membership in self.memberships.all()]
        members = sorted(user.username for user in users if user.is_active)
        return Grant(
            account=self.account,
            members=members,
            partitions=self.partitions,
            gpu_types=self.gpu_types,
            gpus=self.gpus,
            nodes=self.nodes,
            jobs=self.jobs,
            minutes=self.minutes,
            gpu_hours=self.gpu_hours,
        )

    @property
    def use(self) -> Use:
        """What its jobs use now, and have used."""
        return Use(**self.used)

    @property
    def booked(self) -> float:
        """GPU-hours of its bookings that are still to come."""
        rows = self.bookings.exclude(state=BookingState.ENDED)
        return round(sum(row.gpu_hours_left for row in rows), 1)

    @property
    def meters(self) -> list[tuple[str, float, int | None]]:
        """What is used of what may be used, with names: (name, used, limit)."""
        return [
            (str(_("GPUs now")), self.use.gpus, self.gpus),
            (str(_("Nodes now")), self.use.nodes, self.nodes),
            (str(_("Jobs now")), self.use.jobs, self.jobs),
            (str(_("GPU-hours")), round(self.use.gpu_hours, 1), self.gpu_hours),
            (
                str(_("GPU-hours, including future bookings")),
                self.use.gpu_hours + self.booked,
                self.gpu_hours,
            ),
        ]

    def refused_by(self, cluster: Cluster) -> list[str]:
        """Those of its partitions, or of all that show, that take no jobs of its account."""
        requested = [partition for partition in cluster.partitions if partition.name in self.partitions]
        if not self.partitions:
            requested = [partition for partition in cluster.partitions if not partition.hidden]
        return [each.name for each in requested if each.refuses_account(self.account)]

    @property
    def rules(self) -> list[tuple[str, str]]:
        """Its other limits in words."""
        found = [(str(_("Partitions")), ", ".join(self.partitions) or str(_("all")))]
        for kind, most in sorted(self.gpu_types.items()):
            words = str(_("none")) if most == 0 else str(_("at most %d at a time") % most)
            found.append((str(_("GPUs of type %s") % kind), words))
        longest = minutes_words(self.minutes) if self.minutes else str(_("as the site allows"))
        return [*found, (str(_("Longest job")), longest)]

    def get_absolute_url(self) -> str:
        return reverse("project", args=[self.name])


def own_projects(user: User) -> list[Project]:
    """The projects in which a user may run jobs; queried once for each user of a request."""
    found: list[Project] | None = getattr(user, "_projects", None)
    if found is None:
        found = list(Project.of(user))
        user._projects = found  # type: ignore[attr-defined]
    return found


def accounts_of(user: User) -> list[str]:
    """The site's default account and those of the user's projects; none if the site names no default one."""
    default = settings.SITE.slurm.default_account
    return [default, *(project.account for project in own_projects(user))] if default else []


def access_for(user: User, *, anew: bool = False) -> Access:
    """What Slurm lets a user use; it knows of the user's projects, even of one that was joined just now.

    Args:
        anew: Only what the broker says from now on, for decisions.
    """
    access = access_of(user.username, anew=anew)
    if anew:
        return access
    known = {association.account for association in access.associations}
    joined = {project.account for project in own_projects(user) if project.granted}
    return access_of(user.username, anew=True) if known and joined - known else access


def usable_by(user: User, cluster: Cluster | None) -> Cluster | None:
    """The cluster as far as Slurm lets a user use it."""
    if cluster is None:
        return None
    partitions = usable_partitions(cluster, access_for(user), accounts_of(user))
    if len(partitions) == len(cluster.partitions):
        return cluster
    # The same for all who may use the same partitions.
    names = tuple(partition.name for partition in partitions)
    return derived.get(cluster, ("limited", names), lambda whole: _limited(whole, names))


def _limited(whole: Cluster, names: tuple[str, ...]) -> Cluster:
    found = whole.limited_to([partition for partition in whole.partitions if partition.name in names])
    return whole.model_copy() if found is whole else found  # what is derived may not keep its source


def payers(user: User) -> list[tuple[str, str]]:
    """The accounts that a user can choose, with their titles: of projects, and others that Slurm knows."""
    projects = {project.account: project.title for project in own_projects(user)}
    access = access_for(user)
    default = settings.SITE.slurm.default_account or access.default_account
    further = [account for account in access.accounts if account not in projects and account != default]
    return [*projects.items(), *((name, name) for name in further)]


def projects_of(user: User) -> frozenset[int]:
    """Their numbers."""
    return frozenset(project.pk for project in own_projects(user))


class _WithUsers(models.Manager["Membership"]):
    """Members are always read with their names."""

    def get_queryset(self) -> "models.QuerySet[Membership]":
        return super().get_queryset().select_related("user")


class Membership(models.Model):
    """Somebody in a project. Managers say who is in it; what may be used is set by admins."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    manager = models.BooleanField(default=False)
    since = models.DateTimeField(default=timezone.now)

    objects = _WithUsers()

    class Meta:
        ordering = ("-manager", "user__username")
        constraints = (models.UniqueConstraint(fields=["project", "user"], name="once_in_a_project"),)

    def __str__(self) -> str:
        return f"{self.user} in {self.project}"


class Invitation(models.Model):
    """Somebody who is invited to join; the row goes with the answer."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="invitations")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="invitations")
    by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("created", "pk")
        constraints = (models.UniqueConstraint(fields=["project", "user"], name="asked_once"),)

    def __str__(self) -> str:
        return f"{self.user} to {self.project}"
