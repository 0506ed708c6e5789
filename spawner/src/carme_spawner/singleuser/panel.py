"""What JupyterLab's own panel asks and says: how long the session lasts, more time, that all is saved."""

import json
import os
from typing import Any

from jupyter_server.base.handlers import APIHandler
from jupyter_server.serverapp import ServerApp
from jupyter_server.utils import url_path_join
from tornado import web

from carme.translation import message, translated
from carme_spawner.singleuser.hub import Refused, Unanswered
from carme_spawner.singleuser.time_left import TimeLeft

#: As `carme.jobs.MAXIMUM_MINUTES`, which would load more at the session's start than all else here.
MAXIMUM_MINUTES = 366 * 1440


class StatusHandler(APIHandler):
    """`GET carme/status`: the hub's last answer, and the number of the session's job."""

    def initialize(self, time_left: TimeLeft) -> None:
        self.time_left = time_left

    @web.authenticated
    def get(self) -> None:
        self.set_header("Cache-Control", "no-store")
        job = os.environ.get("SLURM_JOB_ID", "")
        self.finish({**(self.time_left.status or {}), "job": int(job) if job.isdecimal() else None})


class ExtendHandler(APIHandler):
    """`POST carme/extend` with `{"minutes": N}`."""

    def initialize(self, time_left: TimeLeft) -> None:
        self.time_left = time_left

    @web.authenticated
    async def post(self) -> None:
        try:
            minutes: Any = json.loads(self.request.body)["minutes"]
        except (ValueError, KeyError, TypeError):
            minutes = None
        if type(minutes) is not int or minutes < 1:
            return self._refuse(400, message("Give the number of minutes, a whole number of at least 1."))
        if minutes > MAXIMUM_MINUTES:
            return self._refuse(
                400, message("A session gets at most {most} more minutes at once.", most=MAXIMUM_MINUTES)
            )
        try:
            self.finish(await self.time_left.extend(minutes))
        except Refused as error:
            self._refuse(400, str(error))
        except Unanswered:
            self._refuse(503, message("The hub does not answer at the moment. Try again in a minute."))

    def _refuse(self, status: int, sentence: str) -> None:
        self.set_status(status)
        self.finish({"message": translated(sentence)})


class SavedHandler(APIHandler):
    """`POST carme/saved`: a page has done what it is to do before the session ends."""

    def initialize(self, time_left: TimeLeft) -> None:
        self.time_left = time_left

    @web.authenticated
    def post(self) -> None:
        self.time_left.saved()
        self.set_status(204)
        self.finish()


def install(server: ServerApp, time_left: TimeLeft) -> None:
    """Add them to the server."""
    base = server.base_url
    options = {"time_left": time_left}
    server.web_app.add_handlers(
        ".*$",
        [
            (url_path_join(base, "carme/status"), StatusHandler, options),
            (url_path_join(base, "carme/extend"), ExtendHandler, options),
            (url_path_join(base, "carme/saved"), SavedHandler, options),
        ],
    )
