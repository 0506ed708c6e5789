"""Telling a user something on all pages, until it has been read."""

from django.utils import timezone

from carme_webui.accounts.models import User
from carme_webui.news import news
from carme_webui.profile.models import Notice

__all__ = ["read_all", "tell", "unread"]


def tell(user: User, text: str) -> None:
    """Tell it."""
    Notice.objects.create(user=user, text=text[:600])
    news.tell([user.username])


def unread(user: User) -> int:
    """How many sentences wait for this user."""
    return Notice.objects.filter(user=user, read=None).count()


def read_all(user: User) -> None:
    """The user has seen them all."""
    Notice.objects.filter(user=user, read=None).update(read=timezone.now())
