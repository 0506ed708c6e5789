"""The processes of a run on one node."""

from carme_runtime.ranks.environment import without_secrets
from carme_runtime.ranks.node import Node

__all__ = ["Node", "without_secrets"]
