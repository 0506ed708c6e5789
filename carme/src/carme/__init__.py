"""Carme: interactive machine learning on Slurm clusters."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from carme.client import Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> Any:
    # What runs on a cluster's hosts does not need it, and does not wait for it.
    if name == "Client":
        from carme.client import Client

        return Client
    raise AttributeError(f"module 'carme' has no attribute {name!r}")
