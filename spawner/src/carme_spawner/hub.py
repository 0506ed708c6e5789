"""`carme-hub`: JupyterHub with the site's configuration."""

import argparse
import asyncio
import sys
from urllib.parse import urlsplit

from jupyterhub import orm
from jupyterhub.app import JupyterHub
from jupyterhub.objects import Server
from jupyterhub.user import User
from jupyterhub.utils import url_escape_path, url_path_join

from carme.config import load
from carme.errors import CarmeError
from carme_spawner.hub_config import hub_config
from carme_spawner.spawner import CarmeSpawner, refusal


class CarmeHub(JupyterHub):
    """JupyterHub that takes up starts which were waiting when it was ended.

    JupyterHub itself expects of a server it finds in its database that it answers within seconds; one whose
    job still waits in the queue it would end.
    """

    def load_config_file(self, *_: object, **__: object) -> None:
        """Nothing: `carme.toml` is the only configuration, whatever lies in the working directory."""

    async def init_spawners(self) -> int:
        """Check the running servers, and wait on for those that were starting."""
        waiting: list[tuple[User, CarmeSpawner]] = []
        for record in self.db.query(orm.Spawner).filter(orm.Spawner.server != None):  # noqa: E711
            user = self.users[record.user]
            spawner = user.spawners[record.name]
            if isinstance(spawner, CarmeSpawner) and spawner.is_waiting:
                # Without its server's record JupyterHub does not check it.
                spawner.server = None
                waiting.append((user, spawner))
        self.db.commit()
        for user, spawner in waiting:
            spawner._spawn_pending = True
            start = asyncio.ensure_future(self.wait_on(user, spawner))
            start.add_done_callback(lambda future, spawner=spawner: settle(future, spawner))
            spawner._spawn_future = start  # pyright: ignore[reportAttributeAccessIssue]  None in the base
        return await super().init_spawners()

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
        server.ip, server.port = url.hostname or "", url.port or 80
        self.db.commit()
        spawner.start_polling()
        await user._wait_up(spawner)
        await self.proxy.add_user(user, name)

        async def stopped() -> None:
            await self.proxy.delete_user(user, name)
            await user.stop(name)

        spawner.add_poll_callback(stopped)


def settle(future: "asyncio.Future[None]", spawner: CarmeSpawner) -> None:
    """The start is over; keep the future only if it tells why the start failed."""
    spawner._spawn_pending = False
    if future.cancelled() or future.exception() is None:
        spawner._spawn_future = None


def main() -> None:
    """Run the hub until it is ended by a signal."""
    parser = argparse.ArgumentParser(
        prog="carme-hub", description="JupyterHub with the site's configuration."
    )
    parser.add_argument("--config", metavar="FILE", help="default: $CARME_CONFIG, else /etc/carme/carme.toml")
    options = parser.parse_args()
    try:
        config = hub_config(load(options.config))
    except CarmeError as error:
        sys.exit(f"carme-hub: {error}")
    CarmeHub.instance(config=config)
    CarmeHub.launch_instance([])


if __name__ == "__main__":
    main()
