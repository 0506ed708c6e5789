"""The forecast of free GPUs, computed no more often than is worth its time."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

from carme.broker.bookings import Bookings
from carme.broker.watch import Watch
from carme.jobs import Cluster, Forecast, Job, Phase, Reservation, forecast

FORECAST_AGE = timedelta(minutes=1)
# Where a forecast takes more seconds of a processor than this, the next one rests so many times as long.
FORECAST_TAKES, FORECAST_REST = 0.1, 25.0


class Forecasts:
    """Has the latest forecast, and computes another one when it is old or what jobs hold has changed."""

    def __init__(self, watch: Watch, bookings: Bookings) -> None:
        self._watch = watch
        self._bookings = bookings
        #: What jobs held when it was computed, and the forecast.
        self._latest: tuple[frozenset[tuple[int, str]], Forecast] | None = None
        self._rests_until = 0.0
        self._computing = asyncio.Lock()
        self._reserved: tuple[datetime, list[Reservation]] | None = None

    async def current(self) -> Forecast:
        """The forecast of now, or the one before while that is computed. Raises CarmeError."""
        if self._latest is not None and self._computing.locked():
            return self._latest[1]
        async with self._computing:
            return await self._compute()

    async def _compute(self) -> Forecast:
        """The latest forecast, computed again where it is old. Others are answered meanwhile."""
        latest = self._latest
        # What is free now changes with what jobs hold; a plan that takes long to make may lag behind.
        if latest is not None and time.monotonic() < self._rests_until:
            return latest[1]
        cluster, jobs = self._watch.cluster(), self._watch.jobs()
        now = datetime.now(UTC).replace(microsecond=0)
        reserved = self._reserved
        if reserved is None or now - reserved[0] > FORECAST_AGE:
            self._reserved = reserved = now, await self._bookings.reservations()
        held = frozenset(
            (job.id, job.node_list) for job in jobs if job.state.phase is Phase.RUNNING and job.gpus
        )
        if latest is None or held != latest[0] or now - latest[1].start > FORECAST_AGE:
            found, took = await asyncio.to_thread(_timed_forecast, cluster, jobs, reserved[1], now)
            self._latest = latest = held, found
            self._rests_until = time.monotonic() + (FORECAST_REST * took if took > FORECAST_TAKES else 0.0)
        return latest[1]


def _timed_forecast(
    cluster: Cluster, jobs: list[Job], reserved: list[Reservation], now: datetime
) -> tuple[Forecast, float]:
    """The forecast, and how many seconds of a processor it took."""
    start = time.thread_time()
    found = forecast(cluster, jobs, reserved, now)
    return found, time.thread_time() - start
