"""How a session is requested and stopped.

What happens between, the broker reports (see `mirror`). JupyterHub is called only to start, to stop, and for
why a start failed before there was a job. Everything may run twice or after a crash: before the hub is called
again to start a session, hub and broker must both say that they know nothing of the first request.
"""

import logging
from contextlib import suppress
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from carme.broker import BrokerClient
from carme.errors import BrokerUnavailable, CarmeError, InvalidRequest
from carme.sessions import Ending, SessionState
from carme.translation import joined, message
from carme_webui.cluster import broker as site_broker
from carme_webui.images.catalogue import resolved
from carme_webui.notifier import notifier
from carme_webui.sessions.hub import Hub, HubError, HubSilent, HubUnavailable, Removal
from carme_webui.sessions.mirror import find
from carme_webui.sessions.models import Session

__all__ = ["begin", "due_sessions", "end", "tend", "tend_named", "tend_soon"]

logger = logging.getLogger(__name__)

# A start that has no job after this time is given up.
PATIENCE = timedelta(seconds=60)
# The hub answers a start within a second; if no job is known after this time, it is queried.
POLL_AFTER = timedelta(seconds=2)
# Two requests at once to stop one server disturb each other, and a hub that finds a dead job by itself may
# still want to say why.
ASK_AGAIN_AFTER = timedelta(seconds=10)


def tend_soon() -> None:
    """Wake `carme-portal sync`, which does at once what sessions need."""
    notifier.wake_sync()


def due_sessions() -> list[str]:
    """The names of sessions that need something; those that run undisturbed do not."""
    now = timezone.now()
    to_do = (
        Q(state=SessionState.REQUESTED)
        | Q(state=SessionState.STOPPING)
        | Q(state=SessionState.ENDED, settled=False, changed__lt=now - ASK_AGAIN_AFTER)
    )

    def is_due(session: Session) -> bool:
        wait = POLL_AFTER if session.state == SessionState.REQUESTED else ASK_AGAIN_AFTER
        return session.requested_at is None or now - session.requested_at > wait

    return [session.name for session in Session.objects.filter(to_do) if is_due(session)]


def tend_named(name: str) -> None:
    """Do what the session of this name needs."""
    tend(Session.objects.select_related("owner").get(name=name), Hub(settings.SITE), site_broker())


def tend(session: Session, hub: Hub, broker: BrokerClient, now: datetime | None = None) -> None:
    """Do what one session needs.

    Args:
        session: The session, with its owner.
        hub: The site's JupyterHub.
        broker: The site's broker.
        now: The time; the present one by default.
    """
    now = now or timezone.now()
    before = (session.state, session.sentence)
    if session.state == SessionState.REQUESTED:
        begin(session, hub, broker, now)
        session.refresh_from_db()
        if session.state == SessionState.STOPPING:
            end(session, hub, broker, now)  # stopped while the start was on its way
    elif session.state == SessionState.STOPPING or session.is_over:
        end(session, hub, broker, now)
    if (session.state, session.sentence) != before:
        notifier.notify([session.owner.username])


def begin(session: Session, hub: Hub, broker: BrokerClient, now: datetime) -> None:
    """Ask the hub to start the session's server, unless hub or broker know of it already."""
    user, name = session.owner.username, session.name
    try:
        if session.requested_at is not None and _is_known(session, hub, broker, now):
            return
        if now - session.created > PATIENCE:
            _refuse(
                session, message("The start was interrupted and no job came of it. Start the session again.")
            )
            return
        _note(session, now)
        options = resolved(session.requested_options, session.owner)
        hub.start(user, name, options, session.language)
    except HubSilent:
        pass  # it may have begun: the next poll finds out
    except (HubUnavailable, BrokerUnavailable) as error:
        if now - session.created > PATIENCE:
            _refuse(session, error.text)
        else:
            trying = message("The portal retries for a minute.")
            Session.objects.filter(pk=session.pk, state=SessionState.REQUESTED).update(
                sentence=joined([error.message, trying])
            )
    except InvalidRequest as error:
        _refuse(session, error.text)  # the image is gone, or not shared any more
    except HubError as error:
        with suppress(CarmeError):
            if find(session, broker) is not None:
                return  # there is a job, so the broker reports how it ends
        # When a start fails at once, the hub keeps the cause for anyone who asks for the progress.
        _refuse(session, hub.failure(user, name) or error.text)


def _is_known(session: Session, hub: Hub, broker: BrokerClient, now: datetime) -> bool:
    """Whether an earlier request to start it has arrived; what is known about that is stored."""
    server = hub.server(session.owner.username, session.name)
    if find(session, broker) is not None:
        return True
    if server is None:
        return False
    if not server.stopped:
        # The hub is at it. If it comes to nothing, it is better to say so than to wait for ever.
        return now - session.created <= PATIENCE
    why = hub.failure(session.owner.username, session.name)
    return bool(why) and _refuse(session, why)


def _refuse(session: Session, sentence: str) -> bool:
    """The session ends before it has a job."""
    return session.move(SessionState.ENDED, ending=Ending.REFUSED, sentence=sentence)


def _note(session: Session, now: datetime) -> None:
    """Remember that the hub is called now."""
    Session.objects.filter(pk=session.pk).update(requested_at=now)
    session.requested_at = now


def end(session: Session, hub: Hub, broker: BrokerClient, now: datetime) -> None:
    """Stop a session that is stopping, or clear away what is left of one that is over."""
    user, name = session.owner.username, session.name
    _note(session, now)
    try:
        removal = hub.remove(user, name)
        reported = find(session, broker)
        if reported is not None and not reported.is_over and removal is Removal.UNKNOWN:
            broker.cancel(reported.job_id, user=user, session=name)  # nobody else knows of the job
    except CarmeError as error:
        logger.warning("Session %s cannot be stopped now: %s", name, error)
        return  # tried again
    if removal is Removal.IN_PROGRESS or not (reported is None or reported.is_over):
        return  # the broker reports when it is over
    if reported is None:
        stopped = message("You stopped this session before it had begun.")
        session.move(SessionState.ENDED, ending=Ending.STOPPED, sentence=stopped)
    Session.objects.filter(pk=session.pk, state=SessionState.ENDED).update(settled=True)
