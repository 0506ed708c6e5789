"""Background tasks of sessions."""

import logging
from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from carme_webui.alone import alone
from carme_webui.celery import app
from carme_webui.cluster import broker
from carme_webui.sessions import lifecycle
from carme_webui.sessions.hub import Hub, HubError
from carme_webui.sessions.models import OVER, Session, State

__all__ = ["reconcile_sessions", "start_session", "stop_session"]

logger = logging.getLogger(__name__)

# A request that no worker took in this time was lost with the queue.
REQUEUE_AFTER = timedelta(seconds=20)


@app.task
def start_session(name: str) -> None:
    """Ask the hub to start a session."""
    with Hub(settings.SITE) as hub:
        lifecycle.begin(Session.objects.select_related("owner").get(name=name), hub)


@app.task
def stop_session(name: str) -> None:
    """Ask the hub to stop a session."""
    with Hub(settings.SITE) as hub:
        try:
            lifecycle.end(Session.objects.select_related("owner").get(name=name), hub)
        except HubError as error:
            logger.warning("Session %s: %s", name, error)  # `reconcile_sessions` tries again


@app.task
def reconcile_sessions() -> None:
    """Bring all sessions that are not over into agreement with the hub and Slurm."""
    with alone("reconcile-sessions", seconds=120) as mine, Hub(settings.SITE) as hub:
        if not mine:
            return
        for session in Session.objects.select_related("owner").exclude(state__in=OVER):
            if session.state == State.REQUESTED:
                if timezone.now() - session.created > REQUEUE_AFTER:
                    start_session.delay(session.name)  # pyright: ignore[reportFunctionMemberAccess]
                continue
            try:
                lifecycle.reconcile(session, hub, broker())
            except HubError as error:
                logger.warning("Session %s: %s", session.name, error)
            except Exception:
                # One broken row must not hold up all the others.
                logger.exception("Session %s could not be brought up to date", session.name)
