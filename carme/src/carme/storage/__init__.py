"""What is known about the file systems that the site's data lies on."""

from carme.storage.beegfs import (
    BeeGFS,
    Mount,
    Pattern,
    Quota,
    Target,
    balanced,
    first_targets,
    fit,
    mounts,
    suited,
)
from carme.storage.readers import readers
from carme.storage.space import Limits, Space, space_of

__all__ = [
    "BeeGFS",
    "Limits",
    "Mount",
    "Pattern",
    "Quota",
    "Space",
    "Target",
    "balanced",
    "first_targets",
    "fit",
    "mounts",
    "readers",
    "space_of",
    "suited",
]
