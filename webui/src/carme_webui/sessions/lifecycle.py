"""How a session starts, is followed and ends.

JupyterHub and Slurm say what is; these functions bring the session's row into agreement with both. Each may
run twice, at once or after a crash: a change of state happens once, and asking the hub again does no harm.
"""

from contextlib import suppress
from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from carme.broker import BrokerClient
from carme.errors import CarmeError, NotFound
from carme.jobs import JobState, Phase
from carme_webui.jobs.models import Job
from carme_webui.sessions.hub import Hub, HubError, HubSilent, HubUnavailable, Server
from carme_webui.sessions.models import Session, State

__all__ = ["begin", "end", "reconcile"]

# The hub is asked about a session that runs undisturbed only so often; Slurm's news come at once.
ASK_RUNNING_EVERY = timedelta(seconds=15)
# The hub notices by itself why a start failed, and says it better than Slurm: give it this time.
HUB_SPEAKS_WITHIN = timedelta(seconds=15)
# A start of which the hub knows nothing after this time was lost.
LOST_AFTER = timedelta(seconds=60)
# A job that still runs when its server has been gone for this time serves nobody.
ORPHAN_AFTER = timedelta(seconds=30)

# The hub takes its time to interrupt a start; two requests at once disturb each other.
STOP_AGAIN_AFTER = timedelta(seconds=10)

ENDINGS = {JobState.COMPLETED, JobState.CANCELLED, JobState.TIMEOUT}


def begin(session: Session, hub: Hub) -> None:
    """Ask the hub to start the session's server."""
    session.move(State.STARTING)
    if session.state != State.STARTING:
        return
    user, name = session.owner.username, session.name
    try:
        server = hub.server(user, name)
        if server is not None and not server.stopped:
            return  # asked before; `reconcile` follows it
        ready = hub.start(user, name, session.asked_for)
    except HubSilent:
        return  # it may have started: `reconcile` finds out
    except HubUnavailable as error:
        session.move(State.FAILED, str(error))
        return
    except HubError as error:
        # When a start fails at once, the hub keeps the cause for whoever asks for the progress.
        session.move(State.FAILED, hub.failure(user, name) or str(error))
        with suppress(HubError):
            hub.remove(user, name)
        return
    if ready:
        session.move(State.RUNNING)
    session.refresh_from_db()
    if session.state == State.STOPPING or session.is_over:
        hub.remove(user, name)  # stopped while the start was on its way


def end(session: Session, hub: Hub) -> None:
    """Ask the hub to stop a session that is stopping; `reconcile` sees it end."""
    if session.state == State.STOPPING:
        hub.remove(session.owner.username, session.name)


def reconcile(session: Session, hub: Hub, broker: BrokerClient, now: datetime | None = None) -> None:
    """Bring the session into agreement with the hub and Slurm.

    Args:
        session: A session that is not over and that the hub was asked to start.
        hub: The site's JupyterHub.
        broker: The site's broker.
        now: The time; the present one by default.
    """
    now = now or timezone.now()
    job = _find_job(session)
    over = job is not None and job.phase is Phase.OVER
    undisturbed = session.state == State.RUNNING and not over
    if undisturbed and session.asked and now - session.asked < ASK_RUNNING_EVERY:
        return
    user, name = session.owner.username, session.name
    try:
        server = hub.server(user, name)
    except HubError:
        if job is not None and over and session.state != State.STARTING:
            _finish(session, job)
        return
    alive = server is not None and not server.stopped
    Session.objects.filter(pk=session.pk).update(asked=now, gone=None if alive else session.gone or now)
    session.refresh_from_db()
    if job is not None and over:
        waiting = session.state == State.STARTING and alive
        if waiting and job.ended is not None and now - job.ended < HUB_SPEAKS_WITHIN:
            return
        _finish(session, job, _said(session, server, hub))
        if server is not None:
            hub.remove(user, name)
    elif alive:
        assert server is not None
        if session.state == State.STOPPING:
            if server.pending != "stop" and now - session.changed > STOP_AGAIN_AFTER:
                hub.remove(user, name)
        elif server.ready:
            session.move(State.RUNNING)
    elif session.state == State.STARTING:
        _start_failed(session, server, hub, broker, now)
    else:
        _server_gone(session, job, server, hub, broker, now)


def _find_job(session: Session) -> Job | None:
    """The session's job, remembered once it was seen."""
    if session.job_id is None:
        job = Job.objects.filter(user=session.owner.username, name=session.job_name).first()
        if job is not None:
            Session.objects.filter(pk=session.pk).update(job_id=job.id)
            session.job_id = job.id
        return job
    return session.job


def _said(session: Session, server: Server | None, hub: Hub) -> str:
    """The hub's words on a start that failed."""
    if session.state != State.STARTING or server is None or not server.stopped:
        return ""
    return hub.failure(session.owner.username, session.name)


def _finish(session: Session, job: Job, said: str = "") -> None:
    """The job is over: so is the session."""
    if session.state == State.STOPPING:
        session.move(State.ENDED, _("You stopped this session."))
    elif session.state == State.STARTING:
        session.move(State.FAILED, said or job.explanation)
    elif JobState(job.state) in ENDINGS:
        session.move(State.ENDED, job.explanation)
    else:
        session.move(State.FAILED, job.explanation)


def _start_failed(
    session: Session, server: Server | None, hub: Hub, broker: BrokerClient, now: datetime
) -> None:
    """The hub has no living server for a session that should be starting."""
    if server is None:
        # The request may still be on its way.
        if now - session.changed > LOST_AFTER:
            session.move(
                State.FAILED,
                _("The start was interrupted and JupyterHub knows nothing of it. Start the session again."),
            )
        return
    said = _said(session, server, hub)
    if not said and session.gone and now - session.gone < HUB_SPEAKS_WITHIN:
        return
    if session.move(
        State.FAILED, said or _("JupyterHub gave the start up without saying why. Start it again.")
    ):
        _cancel(session, broker)
        hub.remove(session.owner.username, session.name)


def _server_gone(
    session: Session, job: Job | None, server: Server | None, hub: Hub, broker: BrokerClient, now: datetime
) -> None:
    """The hub says that the server has stopped; Slurm has not yet said that the job is over."""
    if job is None:
        if session.state == State.STOPPING:
            session.move(State.ENDED, _("You stopped this session."))
        else:
            session.move(State.ENDED, _("JupyterHub stopped this session."))
    else:
        try:
            Job.store([broker.job(job.id, user=session.owner.username)])
        except NotFound:
            session.move(State.ENDED, _("The session ended and Slurm no longer knows its job."))
        except CarmeError:
            return
        job.refresh_from_db()
        if job.phase is Phase.OVER:
            _finish(session, job)
        elif session.gone and now - session.gone > ORPHAN_AFTER:
            _cancel(session, broker)
    if server is not None and session.is_over:
        hub.remove(session.owner.username, session.name)


def _cancel(session: Session, broker: BrokerClient) -> None:
    """End a job that no server answers for."""
    if session.job_id is None:
        return
    with suppress(CarmeError):  # it is over, or the next round tries again
        broker.cancel(session.job_id, user=session.owner.username)
