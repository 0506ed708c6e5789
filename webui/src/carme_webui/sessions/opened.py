"""Which sessions a user may see, and what each can open; for pages and the API."""

from dataclasses import dataclass

from django.db.models import QuerySet

from carme.errors import CarmeError
from carme.sessions import SessionState
from carme_webui.accounts.models import User
from carme_webui.cluster import entry_points
from carme_webui.images.catalogue import images_of
from carme_webui.sessions.models import Session

__all__ = ["App", "apps_of", "own_sessions"]


@dataclass(frozen=True)
class App:
    """Something that a session can open."""

    name: str
    title: str
    url: str


def own_sessions(user: User) -> QuerySet[Session]:
    """The sessions that this user may see."""
    return Session.objects.filter(owner=user).select_related("owner")


def apps_of(row: Session) -> list[App]:
    """What can be opened in a session, the one that was requested first; nothing unless it is ready."""
    if row.state != SessionState.READY:
        return []
    options = row.requested_options
    titles = _titles(options.image, row.owner)
    names = sorted(titles, key=lambda name: (name != options.app, list(titles).index(name)))
    return [App(name, titles[name], row.address(name)) for name in names]


def _titles(image: str, owner: User) -> dict[str, str]:
    try:
        return entry_points(images_of(owner).get(image))
    except CarmeError:
        return {"lab": "JupyterLab"}  # the image was removed; the session goes on
