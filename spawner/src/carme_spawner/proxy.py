"""The proxy's routes to servers."""

from jupyterhub.proxy import ConfigurableHTTPProxy, Proxy
from jupyterhub.user import User

from carme_spawner.spawner import CarmeSpawner


class EndsServersFirst(Proxy):
    """Takes a server's route away when the server has ended: until then open pages save through it.

    JupyterHub itself takes the route away first, and ends the server then.
    """

    async def delete_user(self, user: User, server_name: str = "") -> None:
        """End the server if it still runs, then remove its route."""
        spawner = user.spawners.get(server_name)
        if isinstance(spawner, CarmeSpawner) and await spawner.poll() is None:
            spawner.stop_polling()  # anyone who requested the end needs no notice of it
            await spawner.stop()
        await super().delete_user(user, server_name)


class PatientProxy(EndsServersFirst, ConfigurableHTTPProxy):
    """The same of configurable-http-proxy, a service of its own."""
