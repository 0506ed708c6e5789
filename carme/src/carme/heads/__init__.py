"""Two heads: one active, one standby. A lease in the shared database says which of them is active."""

from carme.heads.lease import Holder, Lease
from carme.heads.names import own_name

__all__ = ["Holder", "Lease", "own_name"]
