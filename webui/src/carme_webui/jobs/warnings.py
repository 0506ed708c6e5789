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
    owners = User.objects.in_bulk({each.user for each in warnings}, field_name="username")
    for warning in warnings:
        owner = owners.get(warning.user)
        if owner is None:
            continue
        job, link = f"{warning.job_id}:{warning.started:%Y%m%d%H%M%S}", reverse("job", args=[warning.job_id])
        if warning.stopped is not None:
            # Nobody can do without that: it is what the site did to the job.
            notify(
                owner,
                lambda warning=warning: _stopped(warning),
                Kind.ACCOUNT,
                key=f"stopped:{job}",
                link=link,
            )
        else:
            key = f"warned:{job}:{warning.count}"
            notify(owner, lambda warning=warning: _warned(warning), Kind.JOB_WARNED, key=key, link=link)


def _stopped(job_warning: JobWarning) -> str:
    return _("Your job %(number)s was stopped after %(count)s warnings: %(what)s") % {
        "number": job_warning.job_id,
        "count": job_warning.count,
        "what": _text(job_warning),
    }


def _warned(warning: JobWarning) -> str:
    words = {
        "what": _text(warning),
        "change": warning.what[0].change,
        "count": warning.count,
        "most": warning.most,
    }
    if warning.ends is None:
        return _("%(what)s %(change)s This is warning %(count)s of %(most)s.") % words
    words["when"] = f"{warning.ends:%Y-%m-%d %H:%M} UTC"
    return (
        _(
            "%(what)s %(change)s This is warning %(count)s of %(most)s: unless that changes, the job is "
            "stopped at %(when)s."
        )
        % words
    )


def _text(warning: JobWarning) -> str:
    """The rules' own sentences, in the language in which they are written."""
    return " ".join(advice.text for advice in warning.what[:3])
