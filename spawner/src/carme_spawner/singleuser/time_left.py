"""How long the session may go on: what the hub answers each time that it hears of the session's activity."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

from jupyter_server.serverapp import ServerApp

from carme_spawner.singleuser.hub import Hub, Refused, Unanswered

if TYPE_CHECKING:
    from carme_spawner.singleuser.activity import Activity

REPORT_SECONDS = 30.0
POLL_SECONDS = 5.0

#: What open pages get at once, by Jupyter Server's events.
EVENT = "https://schema.carme/session"
EVENT_SCHEMA = {
    "$id": EVENT,
    "version": "1",
    "title": "Session",
    "description": "The session is to end: documents must be saved now.",
    "type": "object",
    "required": ["state"],
    "properties": {"state": {"enum": ["ending"]}},
}


class TimeLeft:
    """Reports activity to the hub and keeps its answer.

    Attributes:
        status: The hub's last answer; None before the first one.
    """

    def __init__(self, hub: Hub, server: ServerApp) -> None:
        self.status: dict[str, Any] | None = None
        self._hub = hub
        self._server = server
        self._now = asyncio.Event()
        self._saved = asyncio.Semaphore(0)
        self._more: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        assert server.event_logger is not None
        self._events: Any = server.event_logger
        self._events.register_event_schema(EVENT_SCHEMA)

    def start(self) -> None:
        """Report from now on."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Report no more."""
        if self._task:
            self._task.cancel()

    def report_soon(self, **more: Any) -> None:
        """Report at once, and this besides."""
        self._more |= more
        self._now.set()

    async def extend(self, minutes: int) -> dict[str, Any]:
        """Ask for more time; the hub's answer. Raises Refused, Unanswered."""
        answer = await self._hub.post("extend", {"minutes": minutes})
        if self.status is not None:
            self.status |= {"ends": answer["ends"], "warned": answer["warned"]}
        return answer

    async def until_saved(self, pages: int) -> None:
        """Notify so many open pages that the session ends, and wait until each has saved its documents."""
        self._events.emit(schema_id=EVENT, data={"state": "ending"})
        for _ in range(pages):
            await self._saved.acquire()

    def saved(self) -> None:
        """A page that was notified of the end has saved its documents."""
        self._saved.release()

    async def _run(self) -> None:
        from carme_spawner.singleuser.activity import Activity

        activity = Activity(self._server)
        while True:
            self._refresh(activity)
            await self._post(activity)
            due = time.monotonic() + REPORT_SECONDS
            while (left := due - time.monotonic()) > 0 and not self._now.is_set():
                try:
                    async with asyncio.timeout(min(left, POLL_SECONDS)):
                        await self._now.wait()
                except TimeoutError:
                    self._refresh(activity)
            self._now.clear()

    def _refresh(self, activity: "Activity") -> None:
        try:
            activity.refresh()
        except Exception:
            # A kernel that is just being started has no activity yet; the reports must go on.
            self._server.log.exception("Could not read what this session uses.")

    async def _post(self, activity: "Activity") -> None:
        more, self._more = self._more, {}
        try:
            self.status = await self._hub.post("activity", activity.report() | more)
        except (Refused, Unanswered) as error:
            self._server.log.warning("The hub did not take the report of this session's activity: %s", error)
            # A page is notified again; all else is in the next report anyway.
            self._more = more | self._more
