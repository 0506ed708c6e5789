"""Background work of sessions."""

from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from carme.sessions import SessionState
from carme_webui.celery import app
from carme_webui.clocks import minutes_words
from carme_webui.profile.kinds import Kind
from carme_webui.profile.notices import notify
from carme_webui.sessions.models import Session

__all__ = ["warn", "warn_of_ends"]

#: How long before its end the owner of a session is notified.
BEFORE = timedelta(minutes=15)


@app.task
def warn() -> None:
    """Notify owners of sessions that are about to end."""
    warn_of_ends(timezone.now())


def warn_of_ends(now: datetime) -> None:
    """Notify each owner once; and once more when it was prolonged and is about to end again."""
    for row in Session.objects.select_related("owner").filter(state=SessionState.READY):
        shown = row.last_reported
        if shown is None:
            continue
        left = [(end - now, end) for end in (shown.ends, shown.stops_idle) if end is not None and end > now]
        if not left or min(left)[0] > BEFORE:
            continue
        minutes, end = max(1, min(left)[0] // timedelta(minutes=1)), min(left)[1]
        notify(
            row.owner,
            lambda row=row, minutes=minutes: (
                _("Your session “%(title)s” ends in %(time)s. Save your work.")
                % {"title": row.title, "time": minutes_words(minutes)}
            ),
            Kind.SESSION_ENDS,
            key=f"ends:{row.name}:{end:%Y%m%d%H%M}",
            link=row.get_absolute_url(),
        )
