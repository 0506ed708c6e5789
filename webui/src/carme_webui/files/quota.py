"""The quotas and free space of a user's folders, and a warning before a job fails for lack of space."""

from dataclasses import dataclass

from django.core.cache import cache
from django.utils.translation import gettext as _

from carme.errors import CarmeError, InvalidRequest
from carme.files.client import Files
from carme.storage import Space
from carme.storage.space import FEW
from carme_webui.accounts.models import User
from carme_webui.cluster import broker
from carme_webui.files.places import Place, places_of
from carme_webui.sizes import size_words

__all__ = ["FolderQuota", "check_quota", "folder_quotas", "refusal"]

#: Seconds for which a file system may be silent: one that hangs must not hold up the page for longer.
PATIENCE = 5.0
REMEMBERED_SECONDS = 600  # seconds for which it is remembered that somebody's home was full


@dataclass(frozen=True)
class FolderQuota:
    """One of my folders, with its quota and free space."""

    name: str
    space: Space

    @property
    def level(self) -> str:
        """`near`, `full`, or nothing."""
        return self.space.level

    @property
    def percent(self) -> int | None:
        """How much of my quota is used up; None without one."""
        share = self.space.quota.share if self.space.quota else None
        return None if share is None else min(100, int(share * 100))

    @property
    def words(self) -> str:
        """What is used and what is left."""
        free = _("%(size)s free") % {"size": size_words(self.space.free)}
        quota = self.space.quota
        if quota is None or quota.share is None:
            return free
        most = min((limit for limit in (quota.soft, quota.limit) if limit), default=None)
        parts = []
        if most:
            sizes = {"used": size_words(quota.used), "most": size_words(most)}
            parts.append(_("%(used)s of %(most)s used") % sizes)
        files = min((limit for limit in (quota.files_soft, quota.files_limit) if limit), default=None)
        if files:
            parts.append(_("%(used)s of %(most)s files") % {"used": quota.files, "most": files})
        if self.space.free < FEW:
            parts.append(free)
        return ", ".join(parts)

    @property
    def warning(self) -> str:
        """What may happen and what to do; empty while there is enough space."""
        words = {"name": self.name, "words": self.words}
        if self.level == "full":
            return (
                _("%(name)s is full (%(words)s): nothing can be written there. Delete what you do not need.")
                % words
            )
        if self.level == "near":
            return (
                _("%(name)s is nearly full (%(words)s). Jobs fail when nothing can be written any more.")
                % words
            )
        return ""


def folder_quotas(user: User) -> list[FolderQuota]:
    """The quotas of all the folders that the portal shows, queried now. Raises CarmeError."""
    files = Files(broker(), user.username, PATIENCE)
    shown: dict[str, Place] = {place.path: place for place in places_of(files)}
    found = [FolderQuota(shown[space.path].name, space) for space in files.space(list(shown))]
    home = next(iter(shown))
    if any(folder.space.path == home and folder.level == "full" for folder in found):
        cache.set(_key(user), True, REMEMBERED_SECONDS)
    else:
        cache.delete(_key(user))
    return found


def refusal(user: User) -> str:
    """Why nothing of mine can start: my home is full, so a job could not even write its log. Else nothing.

    Only where the last check found a full home it is checked again: nobody else waits for the check.
    """
    if not cache.get(_key(user)):
        return ""
    try:
        found = folder_quotas(user)
    except CarmeError:
        return ""
    full = cache.get(_key(user))
    return found[0].warning if full and found else ""


def check_quota(user: User) -> None:
    """Refuse to start what would die of a full home. Raises InvalidRequest."""
    if full := refusal(user):
        raise InvalidRequest(full)


def _key(user: User) -> str:
    return f"full-{user.pk}"
