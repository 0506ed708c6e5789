"""What JupyterHub's API and pages show of a start: how far it is, or why it was refused."""

from typing import Any

from jupyterhub.spawner import SpawnException

from carme.errors import BrokerUnavailable, CarmeError, Denied, InvalidRequest, NotFound
from carme.jobs import without_log
from carme.sessions import STATES, Session, SessionState
from carme.translation.markup import with_message

__all__ = ["progress_event", "refusal"]

#: How far each state is on JupyterHub's bar, in percent.
PROGRESS = {
    SessionState.REQUESTED: 5,
    SessionState.QUEUED: 20,
    SessionState.STARTING: 60,
    SessionState.READY: 95,
}

STATUS = {InvalidRequest: 400, Denied: 403, NotFound: 404, BrokerUnavailable: 503}


def progress_event(session: Session | None) -> dict[str, Any]:
    """Where a start stands, in the broker's words: one event of a spawner's `progress`."""
    if session is None:
        return {"progress": PROGRESS[SessionState.REQUESTED], "message": STATES[SessionState.REQUESTED]}
    message = session.label
    if session.estimate:
        message += f", place {session.estimate.place} of {session.estimate.waiting}"
    return {
        "progress": PROGRESS.get(session.state, 90),
        "message": f"{message}. {session.sentence}".strip(),
    }


def refusal(error: CarmeError) -> SpawnException:
    """The error as JupyterHub's API and pages show it: the same text, in HTML with its line ends."""
    refused = SpawnException(
        str(error),
        reason=error.code,
        # The end of a job's log is its owner's; the hub's journal has others as readers.
        log_message=" ".join(without_log(error.text).split()),
        status_code=next((s for k, s in STATUS.items() if isinstance(error, k)), 502),
    )
    # Without it JupyterHub later shows the exception's own text: its status, class and reason.
    refused.jupyterhub_message = str(error)  # pyright: ignore[reportAttributeAccessIssue]
    # From there the portal has it in its reader's language.
    shown = f'<span style="white-space: pre-wrap">{with_message(error.text)}</span>'
    refused.jupyterhub_html_message = shown  # pyright: ignore[reportAttributeAccessIssue]
    return refused
