"""`POST /api/carme/activity` and `/api/carme/extend`: a server says what it does, and asks for more time."""

from datetime import UTC, datetime

from carme.errors import CarmeError
from carme.sessions import Session, Step, warned_at
from carme.translation import Message
from carme_spawner.report_handler import ReportHandler
from carme_spawner.reports import Activity, Extend


class ActivityHandler(ReportHandler):
    """Takes what a server does, and answers what is known about its end."""

    async def post(self) -> None:
        spawner = self.own_spawner()
        spawner.report_activity(self.report(Activity))
        policy, session = spawner.policy(), spawner.known_session()
        stops = datetime.fromtimestamp(spawner.idle.stops, UTC) if spawner.idle.stops else None
        ends = session.ends if session else None
        self.write(
            {
                "ends": ends.isoformat() if ends else None,
                "warned": _warned(session, ends),
                "stops_idle": stops.isoformat() if stops else None,
                "warned_idle": [moment.isoformat() for moment in warned_at(stops, None)] if stops else [],
                "idle_minutes": policy.idle_minutes,
                "extend": policy.extend,
            }
        )


class ExtendHandler(ReportHandler):
    """Asks the broker for more time, in the name of the session's owner."""

    async def post(self) -> None:
        spawner = self.own_spawner()
        minutes = self.report(Extend).minutes
        try:
            extension = await spawner.broker.extend(int(spawner.job_id), minutes, spawner.user.name)
        except CarmeError as error:
            self.set_status(400)
            # The server shows it in the language of its pages.
            parts = {"parts": error.text.parts()} if isinstance(error.text, Message) else {}
            self.write({"message": str(error), **parts})
            return
        ends, session = extension.ends, spawner.known_session()
        given = {"ends": ends.isoformat(), "minutes_limit": extension.minutes_limit}
        self.write(given | {"warned": _warned(session, ends)})


def _warned(session: Session | None, ends: datetime | None) -> list[str]:
    """When the session's pages warn of an end."""
    if ends is None:
        return []
    start = session.at(Step.ALLOCATED) if session else None
    return [moment.isoformat() for moment in warned_at(ends, ends - start if start else None)]
