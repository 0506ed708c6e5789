"""Notifications of a user: on all pages until they are read, and by mail, as the user wants them."""

from collections.abc import Callable, Iterable

from django.conf import settings
from django.utils import timezone, translation

from carme_webui.accounts.language import language_of
from carme_webui.accounts.models import User
from carme_webui.accounts.zone import zone_of
from carme_webui.clocks import in_zone
from carme_webui.notifier import notifier
from carme_webui.profile.kinds import Kind, wants
from carme_webui.profile.models import Mailing, Notice

__all__ = ["notify", "notify_all", "read_all", "unread"]


def notify(
    user: User,
    text: str | Callable[[], str],
    kind: Kind = Kind.ACCOUNT,
    *,
    key: str | None = None,
    link: str = "",
) -> bool:
    """Send a notice, if the user wants such ones; a mail is sent by the worker.

    Args:
        text: The sentence, or what makes it: that is called with the user's language and clocks active.
        key: Names the event; what was sent under this key is not sent again.
        link: The path of the page that it is about.

    Returns:
        Whether something new was sent.
    """
    page, mail = wants(user, kind)
    mail = mail and bool(settings.SITE.mail.server and user.email and user.is_active)
    if not (page or mail):
        return False
    if callable(text):
        with translation.override(language_of(user)), in_zone(zone_of(user)):
            text = text()
    values = {
        "kind": kind,
        "text": text[:600],
        "link": link,
        "on_page": page,
        "mailing": Mailing.DUE if mail else Mailing.NONE,
        "due": timezone.now() if mail else None,
    }
    if key is None:
        Notice.objects.create(user=user, **values)
    elif not Notice.objects.get_or_create(user=user, key=key[:120], defaults=values)[1]:
        return False
    notifier.notify([user.username])
    return True


def notify_all(
    users: Iterable[User],
    text: str | Callable[[], str],
    kind: Kind,
    *,
    key: str | None = None,
    link: str = "",
) -> None:
    """Send a notice to several."""
    for user in users:
        notify(user, text, kind, key=key, link=link)


def unread(user: User) -> int:
    """How many sentences wait for this user."""
    return Notice.objects.filter(user=user, read=None, on_page=True).count()


def read_all(user: User) -> None:
    """The user has seen them all."""
    Notice.objects.filter(user=user, read=None).update(read=timezone.now())
