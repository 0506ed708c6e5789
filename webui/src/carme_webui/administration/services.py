"""What administrators do, from a page or through the API: the same rules, words and records."""

import re
from datetime import date
from typing import Any
from zoneinfo import ZoneInfo

from auditlog.models import LogEntry
from auditlog.registry import auditlog
from django.conf import settings
from django.db.models import Q, QuerySet
from django.urls import reverse
from django.utils.translation import gettext as _

from carme.bookings.clock import day_bounds
from carme.broker import BrokerClient
from carme.errors import Denied, InvalidRequest
from carme.jobs import Job
from carme.jobs.nodes import expand
from carme.translation import message
from carme.wording import listing
from carme_webui.accounts import second_factor
from carme_webui.accounts.models import User
from carme_webui.administration.models import AuditEntry
from carme_webui.profile.notices import notify

__all__ = [
    *(
        "action_name",
        "changed_kinds",
        "changed_values",
        "changes",
        "kind_key",
        "kind_name",
        "find_jobs",
        "find_users",
        "policies",
        "send_message",
        "set_active",
        "set_node",
        "stop_job",
    ),
    "remove_second_factor",
]


#: By which the days are where nobody says otherwise.
UTC = ZoneInfo("UTC")
#: What answers of the API call the kind of a changed object, in English for every reader: by model.
KIND_NAMES = {
    "auditentry": "audit entry",
    "authenticator": "authenticator",
    "booking": "booking",
    "invitation": "invitation",
    "maintenance": "maintenance",
    "membership": "membership",
    "news": "news",
    "ownimage": "own image",
    "project": "project",
    "user": "user",
}
_RELATION = re.compile(r"\w+\.\w+\.None")


def policies() -> list[tuple[str, list[tuple[str, Any]]]]:
    """The site's limits and policies as they hold: titles, and in each the keys of carme.toml with values."""
    site = settings.SITE
    parts = [
        (_("Sessions"), site.sessions),
        (_("Bookings"), site.bookings),
        *((_("Partition %s") % name, part) for name, part in sorted(site.partitions.items())),
        *((_("Project %s") % name, part) for name, part in sorted(site.projects.items())),
    ]
    return [(title, _flat(part.model_dump(mode="json", exclude_none=True))) for title, part in parts]


def _flat(values: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{before}{key}.") if isinstance(value, dict) else [(before + key, value)]
    return found


def changed_kinds() -> dict[str, str]:
    """What the record has changes of: the keys by which `changes` takes them, and what they are called."""
    titles = {
        "auditentry": _("action"),
        "authenticator": _("second factor"),
        "booking": _("booking"),
        "invitation": _("invitation"),
        "maintenance": _("maintenance"),
        "membership": _("membership"),
        "news": _("announcement"),
        "ownimage": _("own image"),
        "project": _("project"),
        "user": _("user"),
    }
    keys = [str(model._meta.model_name) for model in auditlog.get_models()]
    kinds = {key: titles.get(key, key) for key in keys}
    return dict(sorted(kinds.items(), key=lambda kind: kind[1].casefold()))


def kind_name(entry: LogEntry) -> str:
    """Of what a change is, as programs read it: in English."""
    model = str(entry.content_type.model)
    return KIND_NAMES.get(model, model)


def action_name(entry: LogEntry) -> str:
    """What was done, in the reader's language."""
    names = {
        LogEntry.Action.CREATE: _("Create"),
        LogEntry.Action.UPDATE: _("Update"),
        LogEntry.Action.DELETE: _("Delete"),
        LogEntry.Action.ACCESS: _("Access"),
    }
    return names.get(entry.action, str(entry.action))


def kind_key(name: str) -> str:
    """The key of `changed_kinds` that an answer calls so, or that this is; nothing for nothing.

    Raises:
        InvalidRequest: The record has changes of no such kind; the error lists those that there are.
    """
    key = name.replace(" ", "")
    kinds = changed_kinds()
    if name and key not in kinds:
        known = listing(sorted(KIND_NAMES.get(kind, kind) for kind in kinds))
        raise InvalidRequest(
            message(
                "The record has no changes of the kind {kind!r}; there are: {kinds}.", kind=name, kinds=known
            ),
            field="kind",
        )
    return key


def changes(
    words: str = "",
    who: str = "",
    since: date | None = None,
    until: date | None = None,
    *,
    kind: str = "",
    zone: ZoneInfo = UTC,
) -> "QuerySet[LogEntry]":
    """The audit log, the latest first: who, when, what, before and after.

    Args:
        words: Part of what was changed, or of its values.
        who: A user's name or address.
        since: The first day.
        until: The last day.
        kind: A key of `changed_kinds`.
        zone: By whose clocks the days are.
    """
    rows = LogEntry.objects.select_related("actor", "content_type").order_by("-timestamp", "-id")
    if words:
        rows = rows.filter(Q(object_repr__icontains=words) | Q(changes__icontains=words))
    if who:
        rows = rows.filter(Q(actor__username=who) | Q(actor_email=who))
    if kind:
        rows = rows.filter(content_type__model=kind)
    if since:
        rows = rows.filter(timestamp__gte=day_bounds(since, zone)[0])
    if until:
        rows = rows.filter(timestamp__lt=day_bounds(until, zone)[1])
    return rows


def changed_values(entry: LogEntry) -> str:
    """The values of a change in one line: of what is new those that were given, else before and after."""
    if entry.action == LogEntry.Action.DELETE:
        return ""  # what is gone says its name
    parts = []
    for name, change in (entry.changes_dict or {}).items():
        pair = change if isinstance(change, list) and len(change) == 2 else ["", change]
        before, after = ("" if value in (None, "None") else str(value) for value in pair)
        # What other rows have of this one, and numbers that say nothing to people, are left out.
        if before != after and name not in ("id", "by") and not _RELATION.fullmatch(after):
            parts.append(f"{name}: {after}" if not before else f"{name}: {before} → {after or '(empty)'}")
    return "; ".join(parts)


def set_node(by: User, name: str, drain: bool, reason: str, broker: BrokerClient) -> None:
    """Drain a node, with the reason, or resume it. Raises CarmeError when Slurm refuses."""
    reason = " ".join(reason.split())
    broker.node(name, drain, user=by.username, reason=f"{reason} ({by.username})" if reason else "")
    words = f"drained the node {name}: {reason}" if drain else f"resumed the node {name}"
    AuditEntry.objects.create(by=by, text=words[:400])


def find_jobs(wanted: str, broker: BrokerClient) -> list[Job]:
    """All jobs and sessions that wait or run, latest first; of a user, account, node, number or name."""
    found = broker.jobs()
    if wanted:
        found = [
            job
            for job in found
            if wanted in (job.user, job.account, str(job.id), *expand(job.node_list)) or wanted in job.name
        ]
    return sorted(found, key=lambda job: -job.id)


def stop_job(by: User, number: int, message: str, broker: BrokerClient) -> Job:
    """End somebody's job and notify its owner of the reason.

    Raises:
        NotFound: There is no such job.
        CarmeError: Slurm refuses, or cannot be queried.
    """
    job = broker.job(number)
    message = " ".join(message.split())[:300]
    broker.cancel(number)  # for nobody: not as its owner
    AuditEntry.objects.create(by=by, text=f"ended job {number} ({job.name}) of {job.user}: {message}"[:400])
    if owner := User.objects.filter(username=job.user).first():

        def text() -> str:
            words = _("An administrator ended your job %(number)s (%(name)s).")
            return f"{words % {'number': number, 'name': job.name}} {message}".strip()

        notify(owner, text, link=reverse("job", args=[number]))
    return job


def find_users(wanted: str) -> "QuerySet[User]":
    """All users by name; those whose name or address has the words."""
    rows = User.objects.order_by("username")
    return rows.filter(Q(username__icontains=wanted) | Q(email__icontains=wanted)) if wanted else rows


def set_active(by: User, user: User, active: bool) -> None:
    """Let a user sign in again, or no more. Raises Denied for one's own account."""
    if user == by and not active:
        raise Denied(_("This cannot be done with this account."))
    user.is_active = active
    user.save()


def remove_second_factor(user: User) -> None:
    """Take the second factor off an account whose owner has lost it; the owner is notified."""
    second_factor.remove_second_factor(user)
    notify(user, lambda: _("An administrator reset the second factor of your account."))


def send_message(by: User, user: User, message: str) -> None:
    """Send a user a message, on pages and by mail. Raises InvalidRequest when it is empty."""
    words = " ".join(message.split())[:400]
    if not words:
        raise InvalidRequest(_("This cannot be done with this account."), field="message")
    notify(user, lambda: _("Message from an administrator: %s") % words)
    AuditEntry.objects.create(by=by, text=f"sent {user.username} a message: {words}"[:400])
