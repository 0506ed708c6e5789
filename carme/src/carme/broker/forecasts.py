"""The forecast of free GPUs, computed no more often than is worth its time."""

import time
from datetime import UTC, datetime, timedelta

from carme.broker.bookings import Bookings
from carme.broker.watch import Watch
from carme.jobs import Forecast, Reservation, forecast

FORECAST_AGE = timedelta(minutes=1)
# Where a forecast takes more seconds of a processor than this, the next one rests so many times as long.
FORECAST_TAKES, FORECAST_REST = 0.1, 25.0


class Forecasts:
    """Has the latest forecast, and computes another one when it is old or what jobs hold has changed."""

    def __init__(self, watch: Watch, bookings: Bookings) -> None:
        self._watch = watch
        self._bookings = bookings
        #: What jobs held when it was made, and the forecast.
        self._latest: tuple[frozenset[tuple[int, str]], Forecast] | None = None
        self._rests_until = 0.0
        self._reserved: tuple[datetime, list[Reservation]] | None = None

    async def current(self) -> Forecast:
        """The forecast of now. Raises CarmeError."""
        cluster, jobs = self._watch.cluster(), self._watch.jobs()
        now = datetime.now(UTC).replace(microsecond=0)
        reserved = self._reserved
        if reserved is None or now - reserved[0] > FORECAST_AGE:
            self._reserved = reserved = now, await self._bookings.reservations()
        # What is free now changes with these at once; a plan that takes long to make may lag behind them.
        held = frozenset((job.id, job.node_list) for job in jobs if job.gpus and job.is_running)
        latest = self._latest
        rests = time.monotonic() < self._rests_until
        if latest is None or (not rests and (held != latest[0] or now - latest[1].start > FORECAST_AGE)):
            begun = time.thread_time()
            self._latest = latest = held, forecast(cluster, jobs, reserved[1], now)
            took = time.thread_time() - begun
            self._rests_until = time.monotonic() + (FORECAST_REST * took if took > FORECAST_TAKES else 0.0)
        return latest[1]
