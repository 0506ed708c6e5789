"""When a session is idle, and when it is to be stopped for it.

Only what its server reports counts. Where reports are missing, because the hub was down or the server could
not be reached, nothing is known about that time, and the count begins anew: nobody loses a session to a pause
of the hub.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from carme.config import SessionSettings

#: Seconds between two reports after which something was missing; servers report every 30 s.
GAP = 90.0
#: Seconds without use from which on a session is called idle.
IDLE = 60.0
#: Seconds of idleness before which nobody is warned, however short the limit: the time between two reports.
QUIET = 30.0


@dataclass
class IdleWatch:
    """The idleness of one session. All times are seconds since 1970.

    Attributes:
        since: Since when it has been idle; None while it is in use or too little is known.
        stops: When it is stopped unless it is used before; None if nothing threatens.
        due: Whether that moment has come.
    """

    since: float | None = None
    stops: float | None = None
    due: bool = False
    _began: float = 0.0
    _last: float = 0.0

    def take(self, busy: Iterable[float | None], policy: SessionSettings, now: float) -> None:
        """Take a report.

        Args:
            busy: When kernels, terminals, GPUs and ranks were last in use; None for what cannot be known,
                which keeps no session alive.
            policy: The rules of the session's partition.
            now: The time of the report.
        """
        if now - self._last > GAP:
            self._began, self.stops = now, None
        self._last = now
        used = max([self._began, *(min(moment, now) for moment in busy if moment is not None)])
        idle = now - used
        self.since = used if idle >= IDLE else None
        limit = 60.0 * policy.idle_minutes
        warning = min(60.0 * policy.idle_warning_minutes, limit - QUIET)
        if not limit or idle < limit - warning:
            self.stops = None
        elif self.stops is None:
            self.stops = now + warning
        self.due = self.stops is not None and now >= self.stops
