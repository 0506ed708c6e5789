"""What servers and the portal call at the hub besides JupyterHub's own API."""

from batchspawner.api import BatchSpawnerAPIHandler
from jupyterhub.apihandlers import default_handlers

from carme_spawner.activity import ActivityHandler, ExtendHandler
from carme_spawner.logins import LoginsHandler
from carme_spawner.ready import ReadyHandler

__all__ = ["install"]


def install() -> None:
    """Add our handlers to JupyterHub's, and take batchspawner's away.

    Importing batchspawner installs an API with which a server's own token sets any attribute of its spawner,
    commands that the hub executes among them. It must not exist; ours take what they name, nothing else.
    """
    default_handlers[:] = [entry for entry in default_handlers if entry[1] is not BatchSpawnerAPIHandler]
    default_handlers.extend(
        [
            (r"/api/carme/ready", ReadyHandler),
            (r"/api/carme/activity", ActivityHandler),
            (r"/api/carme/extend", ExtendHandler),
            (r"/api/carme/logins/([^/]+)", LoginsHandler),
        ]
    )
