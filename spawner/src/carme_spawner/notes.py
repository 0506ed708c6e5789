"""What the hub reports to the broker about its sessions, in order and in the background."""

import asyncio
import logging
from datetime import UTC, datetime
from time import time

from carme.broker import AsyncBrokerClient
from carme.errors import BrokerUnavailable, CarmeError
from carme.sessions import Mark, SessionNote, Step

#: Seconds between two attempts while the broker is away or has too much to do, at first and at most.
FIRST_DELAY, LONGEST_DELAY = 0.1, 1.0
#: In a note: not idle, nothing threatens.
NEVER = datetime.fromtimestamp(0, UTC)


def mark(step: Step, at: float) -> Mark:
    """A step that a server has reported; its clock may be ahead of ours."""
    return Mark(step=step, at=datetime.fromtimestamp(min(at, time()), UTC))


def moment(seconds: float | None) -> datetime:
    """A time in a note."""
    return NEVER if seconds is None else datetime.fromtimestamp(seconds, UTC)


class Notes:
    """Notes on their way to the broker: those of one job arrive in order, and none delays its session.

    Args:
        broker: The client that gets them.
        log: Where to say what the broker did not take.
    """

    def __init__(self, broker: AsyncBrokerClient, log: logging.Logger | logging.LoggerAdapter) -> None:
        self._broker = broker
        self._log = log
        self._last: dict[int, asyncio.Task[None]] = {}

    def send(self, job_id: int, user: str, session: str, note: SessionNote) -> asyncio.Task[None]:
        """Send a note once those before it have arrived; the task is done when the broker has answered."""
        task = asyncio.create_task(self._send(self._last.get(job_id), job_id, user, session, note))
        self._last[job_id] = task
        task.add_done_callback(lambda done: self._forget(job_id, done))
        return task

    async def _send(
        self, earlier: asyncio.Task[None] | None, job_id: int, user: str, session: str, note: SessionNote
    ) -> None:
        if earlier:
            await asyncio.wait([earlier])
        delay = FIRST_DELAY
        while True:
            try:
                await self._broker.note(job_id, user, note, session)
                return
            except CarmeError as error:
                if not isinstance(error, BrokerUnavailable) and error.code != "busy":
                    self._log.error(
                        "The broker does not take this note about job %s of %s: %s %s",
                        *(job_id, user, note.model_dump_json(exclude_defaults=True), error),
                    )
                    return
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    def _forget(self, job_id: int, task: asyncio.Task[None]) -> None:
        if self._last.get(job_id) is task:
            del self._last[job_id]
