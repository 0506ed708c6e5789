"""A user's own image."""

import re

from django.db import models
from django.db.models import Q
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from carme.accounts import ACCOUNT_PATTERN
from carme.images import OWN_NAME, ImageFile, reference
from carme_webui.accounts.models import User
from carme_webui.projects.models import Project, projects_of
from carme_webui.sentences import SentenceField

__all__ = ["ImageState", "OwnImage"]


class ImageState(models.TextChoices):
    """How far it is."""

    BUILDING = "building", _("being built")
    READY = "ready", _("ready")
    FAILED = "failed", _("failed")


class OwnImage(models.Model):
    """An image that a batch job of its owner builds; from then on its digest is kept here.

    `packages`, `entry_points` and `description` are the build's own words: the owner could have made them up.
    """

    owner = models.ForeignKey(User, on_delete=models.CASCADE, related_name="images")
    name = models.CharField(max_length=31)
    title = models.CharField(max_length=80, blank=True)
    kind = models.CharField(max_length=16)
    base = models.CharField(max_length=64, blank=True)
    text = models.TextField()
    # Whose members may start sessions in it too.
    project = models.ForeignKey(
        Project, on_delete=models.SET_NULL, null=True, blank=True, related_name="images"
    )
    file = models.CharField(max_length=4096)
    state = models.CharField(max_length=16, choices=ImageState.choices, default=ImageState.BUILDING)
    job_id = models.BigIntegerField(null=True)
    problem = SentenceField(blank=True)
    digest = models.CharField(max_length=80, blank=True)
    size = models.BigIntegerField(default=0)
    description = models.TextField(blank=True)
    entry_points = models.JSONField(default=dict)
    packages = models.JSONField(default=dict)
    created = models.DateTimeField(default=timezone.now)
    built = models.DateTimeField(null=True)

    class Meta:
        ordering = ("name", "pk")
        constraints = (models.UniqueConstraint(fields=["owner", "name"], name="one_image_of_a_name"),)

    def __str__(self) -> str:
        return self.reference

    @classmethod
    def visible(cls, user: User) -> "models.QuerySet[OwnImage]":
        """A user's own, and what others share with a project in which that user is."""
        shared = Q(project__in=projects_of(user), state=ImageState.READY)
        return cls.objects.filter(Q(owner=user) | shared).select_related("owner", "project")

    @classmethod
    def ready(cls, user: User) -> "list[OwnImage]":
        """Those of the visible ones in which something can be started."""
        if projects_of(user):
            return list(cls.visible(user).filter(state=ImageState.READY))
        found = list(cls.objects.filter(owner=user, state=ImageState.READY))
        for row in found:
            row.owner = user
        return found

    @classmethod
    def named(cls, user: User, name: str) -> "OwnImage | None":
        """One that this user may see: `mine`, or `theirs@owner`."""
        found = re.fullmatch(rf"({OWN_NAME})(?:@({ACCOUNT_PATTERN}))?", name)
        if found is None:
            return None
        return cls.visible(user).filter(name=found[1], owner__username=found[2] or user.username).first()

    @property
    def reference(self) -> str:
        """How requests name it."""
        return reference(self.name, self.owner.username)

    @property
    def heading(self) -> str:
        """Its title, else its name."""
        return self.title or self.name

    @property
    def image_file(self) -> ImageFile:
        """What a job gets that starts in it."""
        return ImageFile(file=self.file, digest=self.digest)

    def get_absolute_url(self) -> str:
        return reverse("image", args=[self.reference])
