"""JupyterHub for Carme: interactive sessions are Slurm jobs, reached through the broker alone.

In job images this package is installed without its dependencies, for `carme_spawner.singleuser` only; hence
nothing is imported before it is requested.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carme_spawner.hub import CarmeHub
    from carme_spawner.spawner import CarmeSpawner

__all__ = ["CarmeHub", "CarmeSpawner"]


def __getattr__(name: str) -> Any:
    match name:
        case "CarmeHub":
            from carme_spawner.hub import CarmeHub

            return CarmeHub
        case "CarmeSpawner":
            from carme_spawner.spawner import CarmeSpawner

            return CarmeSpawner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """How Jupyter Server finds the extension that reports to the hub."""
    from carme_spawner.singleuser.server import SessionServer

    return [{"module": "carme_spawner", "app": SessionServer}]
