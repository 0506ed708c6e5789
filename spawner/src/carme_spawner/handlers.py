"""What servers and the portal call at the hub besides JupyterHub's own API."""

from jupyterhub.apihandlers import default_handlers

from carme_spawner.activity import ActivityHandler, ExtendHandler
from carme_spawner.logins import LoginsHandler
from carme_spawner.ready import ReadyHandler

__all__ = ["install"]


def install() -> None:
    """Add our handlers to JupyterHub's."""
    default_handlers.extend(
        [
            (r"/api/carme/ready", ReadyHandler),
            (r"/api/carme/activity", ActivityHandler),
            (r"/api/carme/extend", ExtendHandler),
            (r"/api/carme/logins/([^/]+)", LoginsHandler),
        ]
    )
