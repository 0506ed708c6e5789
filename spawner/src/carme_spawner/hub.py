"""`carme-hub`: JupyterHub with the site's configuration."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import carme_spawner.schemas  # noqa: F401  # isort: skip  before JupyterHub
from jupyterhub import orm
from jupyterhub.app import JupyterHub
from jupyterhub.httpclient import JupyterHubHTTPClient
from jupyterhub.metrics import RUNNING_SERVERS
from jupyterhub.objects import Server
from jupyterhub.user import User
from jupyterhub.utils import url_escape_path, url_path_join
from tornado.web import RequestHandler

from carme.backup.moving import check_move
from carme.command_line import add_config
from carme.config import Settings, load
from carme.errors import CarmeError
from carme_spawner.certificates import exclusively, renew, signer
from carme_spawner.hub_config import hub_config
from carme_spawner.moving import move_database
from carme_spawner.names import ServerResolver
from carme_spawner.orphan_cleanup import OrphanCleanup
from carme_spawner.shown import refusal
from carme_spawner.spawner import CarmeSpawner
from carme_spawner.watcher import JobWatcher

#: Seconds that a hub which is being ended has for its last answers, beyond those after which it answers a
#: start even if the server is not ready.
LAST_ANSWERS = 0.5
#: Connections to the hub that may wait to be taken, if the kernel allows so many.
BACKLOG = 4096


class CarmeHub(JupyterHub):
    """JupyterHub that takes up what an earlier process left, and looks after running servers.

    JupyterHub itself ends servers that it finds in its database and that do not answer within seconds: those
    whose job still waits in the queue, and those whose node is cut off just then.
    """

    def load_config_file(self, *_: object, **__: object) -> None:
        """Nothing: `carme.toml` is the only configuration, whatever lies in the working directory."""

    def init_internal_ssl(self) -> None:
        """Make or renew the certificates of hub and proxy, and find servers by their names."""
        directory = Path(self.internal_certs_location)
        # JupyterHub would trust the system's authorities as well, also for clients; they come from here.
        os.environ["SSL_CERT_FILE"] = os.environ["SSL_CERT_DIR"] = os.devnull
        with exclusively(directory):
            renew(directory, self.trusted_alt_names)
            super().init_internal_ssl()
        signer(str(directory))  # now, not when the first session starts
        JupyterHubHTTPClient.instance()._internal_connector_options["resolver"] = ServerResolver()

    async def start(self) -> None:
        """Listen, then look after the servers."""
        await super().start()
        # While the hub is busy for a moment, hundreds of servers may report. Tornado lets 128 wait; the
        # kernel forgets those beyond, and they come again only seconds later.
        assert self.http_server
        for listening in self.http_server._sockets.values():
            listening.listen(BACKLOG)
        settings = self.config.CarmeSpawner.settings
        watcher = JobWatcher.shared(str(settings.broker.socket), self.log)
        self.orphan_cleanup = OrphanCleanup(self.users, watcher)
        self.cleaning_up = asyncio.create_task(self.orphan_cleanup.watch())

    async def shutdown_cancel_tasks(self, sig: signal.Signals | None = None) -> None:
        """Answer the requests that have come, then end.

        A start or stop that was cut off here would be a failure to whom it was for, although the job runs
        and the next hub leads to it.
        """
        await self.finish_requests()
        await super().shutdown_cancel_tasks(sig)

    async def finish_requests(self) -> None:
        """Take no more requests, and wait until those that were taken have been answered."""
        if self.http_server:
            self.http_server.stop()
            # On connections that are open already; the proxy keeps some.
            self.tornado_application.add_handlers(".*", [(".*", Restarting)])
            answer_after = self.tornado_application.settings["slow_spawn_timeout"]
            await asyncio.sleep(answer_after + LAST_ANSWERS)

    async def update_last_activity(self) -> None:
        """Put back routes that the proxy has lost.

        When sessions were last used, they report themselves; JupyterHub's own way asks the database twice
        for each route.
        """
        await self.proxy.check_routes(self.users, self._service_map)

    async def init_spawners(self) -> int:
        """Take up running servers, and wait on for those that were starting."""
        found: list[tuple[User, CarmeSpawner]] = []
        for record in self.db.query(orm.Spawner).filter(orm.Spawner.server != None):  # noqa: E711
            user = self.users[record.user]
            spawner = user.spawners[record.name]
            assert isinstance(spawner, CarmeSpawner)
            found.append((user, spawner))
        await asyncio.gather(*(spawner.find_submission() for _, spawner in found if spawner.was_submitting))
        for user, spawner in found:
            spawner._check_pending = not spawner.is_waiting
            if spawner.is_waiting:
                spawner.server = None
                spawner._spawn_pending = True
                start = asyncio.ensure_future(self.wait_on(user, spawner))
                start.add_done_callback(lambda future, spawner=spawner: settle(future, spawner))
                spawner._spawn_future = start  # pyright: ignore[reportAttributeAccessIssue]  None in the base
        self.db.commit()
        await asyncio.gather(*(self.take_up(*each) for each in found if each[1]._check_pending))
        RUNNING_SERVERS.set(self.users.count_active_users()["active"])
        return len(found)

    async def take_up(self, user: User, spawner: CarmeSpawner) -> None:
        """A server that ran when an earlier hub process ended; the cleanup checks that it answers."""
        try:
            if await spawner.poll() is None:
                spawner.add_poll_callback(self.stopped(user, spawner))
            else:
                self.log.info("%s ended while the hub was down", spawner._log_name)
                await user.stop(spawner.name)
        finally:
            spawner._check_pending = False

    def stopped(self, user: User, spawner: CarmeSpawner) -> Callable[[], Awaitable[None]]:
        """The clean-up after the end of the job."""

        async def clean_up() -> None:
            await self.proxy.delete_user(user, spawner.name)
            await user.stop(spawner.name)

        return clean_up

    async def wait_on(self, user: User, spawner: CarmeSpawner) -> None:
        """The rest of a start that an earlier hub process began."""
        name = spawner.name
        base_url = url_path_join(user.base_url, url_escape_path(name), "/")
        record = orm.Server(base_url=base_url)
        self.db.add(record)
        self.db.commit()
        spawner.server = server = Server(orm_server=record)
        self.db.commit()
        self.log.info(
            "%s was starting when the hub ended; waiting on for job %s", spawner._log_name, spawner.job_id
        )
        try:
            url = urlsplit(await spawner.until_ready())
        except CarmeError as error:
            await user.stop(name)
            raise refusal(error) from None
        server.proto, server.ip, server.port = url.scheme, url.hostname or "", url.port or 443
        self.db.commit()
        await user._wait_up(spawner)
        spawner.add_poll_callback(self.stopped(user, spawner))
        try:
            await self.proxy.add_user(user, name)
        except Exception:
            self.log.exception("%s has no route yet; the next look at routes adds it", spawner._log_name)


class Restarting(RequestHandler):
    """Answers requests that come too late: nothing was done, and in a moment the next hub is there."""

    def check_xsrf_cookie(self) -> None:
        """Not needed: no matter who calls it, nothing is done."""

    def prepare(self) -> None:
        self.set_header("Retry-After", "5")
        self.set_status(503, "The hub restarts")
        self.finish()


def settle(future: "asyncio.Future[None]", spawner: CarmeSpawner) -> None:
    """The start is over; keep the future only if it reports why the start failed."""
    spawner._spawn_pending = False
    if future.cancelled() or future.exception() is None:
        spawner._spawn_future = None


async def certify(hub: CarmeHub) -> None:
    """Make the certificates without starting the hub."""
    hub.init_internal_ssl()


def move(settings: Settings, target: str) -> str:
    """Copy the hub's database to a server; what was done. Raises CarmeError, and then nothing was."""
    file = check_move(settings, "hub", target)
    counts = move_database(file, target)
    return (
        f"{sum(counts.values())} rows of {sum(map(bool, counts.values()))} tables copied and compared. "
        f"Set carme_hub_database to {target} and run site.yml. {file} is as it was."
    )


def command_parser() -> argparse.ArgumentParser:
    """The command line of `carme-hub`."""
    parser = argparse.ArgumentParser(
        prog="carme-hub", description="JupyterHub with the site's configuration."
    )
    add_config(parser)
    parser.add_argument(
        "--certificates", action="store_true", help="only make or renew the certificates of hub and proxy"
    )
    parser.add_argument(
        "--move-database",
        metavar="ADDRESS",
        help="only copy the database from SQLite to an empty one, postgresql://USER@HOST/NAME; "
        "a password is taken from PGPASSWORD",
    )
    return parser


def main() -> None:
    """Run the hub until it is ended by a signal."""
    options = command_parser().parse_args()
    try:
        if options.move_database:
            print(move(load(options.config), options.move_database))
            return
        config = hub_config(load(options.config))
    except CarmeError as error:
        sys.exit(f"carme-hub: {error}")
    hub = CarmeHub.instance(config=config)
    if options.certificates:
        asyncio.run(certify(hub))
    else:
        CarmeHub.launch_instance([])


if __name__ == "__main__":
    main()
