"""Notifications to owners of what the site's policy about alerts does to their jobs."""

from django.urls import reverse
from django.utils.translation import gettext as _

from carme.broker import BrokerClient
from carme.reports import JobWarning
from carme_webui.accounts.models import User
from carme_webui.profile.kinds import Kind
from carme_webui.profile.notices import notify

__all__ = ["send_warnings"]


def send_warnings(broker: BrokerClient) -> None:
    """Send a notice of each warning and each stop once.

    Raises:
        CarmeError: The broker does not answer; it says the same when it is queried again.
    """
    warnings = broker.warnings()
    owners = User.objects.in_bulk({one.user for one in warnings}, field_name="username")
    for one in warnings:
        owner = owners.get(one.user)
        if owner is None:
            continue
        job, link = f"{one.job_id}:{one.started:%Y%m%d%H%M%S}", reverse("job", args=[one.job_id])
        if one.stopped is not None:
            # Nobody can do without that: it is what the site did to the job.
            notify(owner, lambda one=one: _stopped(one), Kind.ACCOUNT, key=f"stopped:{job}", link=link)
        else:
            key = f"warned:{job}:{one.count}"
            notify(owner, lambda one=one: _warned(one), Kind.JOB_WARNED, key=key, link=link)


def _stopped(one: JobWarning) -> str:
    return _("Your job %(number)s was stopped after %(count)s warnings: %(what)s") % {
        "number": one.job_id,
        "count": one.count,
        "what": _text(one),
    }


def _warned(one: JobWarning) -> str:
    words = {"what": _text(one), "change": one.what[0].change, "count": one.count, "most": one.most}
    if one.ends is None:
        return _("%(what)s %(change)s This is warning %(count)s of %(most)s.") % words
    words["when"] = f"{one.ends:%Y-%m-%d %H:%M} UTC"
    return (
        _(
            "%(what)s %(change)s This is warning %(count)s of %(most)s: unless that changes, the job is "
            "stopped at %(when)s."
        )
        % words
    )


def _text(one: JobWarning) -> str:
    """The rules' own sentences, in the language in which they are written."""
    return " ".join(advice.text for advice in one.what[:3])
