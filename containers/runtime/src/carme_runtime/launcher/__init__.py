"""The launcher `carme-run`: places the ranks of a run on the nodes, and stays with them until they end."""

from carme_runtime.launcher.placement import Place, place
from carme_runtime.launcher.run import Run

__all__ = ["Place", "Run", "place"]
