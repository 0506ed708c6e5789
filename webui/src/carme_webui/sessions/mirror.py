"""Takes over what the broker says about sessions."""

from collections.abc import Iterable

from carme.broker import BrokerClient
from carme.errors import NotFound
from carme.sessions import Ending, SessionState
from carme.sessions import Session as SessionReport
from carme.translation import message
from carme_webui.sessions.models import Session

__all__ = ["find", "store", "sweep"]


def store(reports: Iterable[SessionReport]) -> None:
    """Bring the rows of these sessions up to date; sessions that the portal did not make have none."""
    latest = {session.name: session for session in reports}
    for row in Session.objects.select_related("owner").filter(name__in=latest):
        row.follow(latest[row.name])


def find(row: Session, broker: BrokerClient) -> SessionReport | None:
    """What the broker knows about one session, stored in its row; None when it knows of none.

    Raises:
        CarmeError: The broker does not answer.
    """
    try:
        reported = broker.session(row.name, user=row.owner.username)
    except NotFound:
        return None
    row.follow(reported)
    return reported


def sweep(broker: BrokerClient) -> set[str]:
    """Find out what became of sessions that the portal thinks alive and the broker does not; their owners."""
    alive = {session.name for session in broker.sessions(active=True)}
    rows = Session.objects.select_related("owner").exclude(state=SessionState.ENDED)
    gone = list(rows.filter(job_id__isnull=False).exclude(name__in=alive))
    for row in gone:
        if find(row, broker) is None:
            row.move(
                SessionState.ENDED,
                ending=Ending.LOST,
                sentence=message("No record says how this session ended. Start it again."),
            )
    return {row.owner.username for row in gone}
