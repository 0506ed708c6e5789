"""What is known about the file systems that the site's data lies on."""

from carme.storage.beegfs import BeeGFS, Mount, Pattern, Quota, mounts, suited

__all__ = ["BeeGFS", "Mount", "Pattern", "Quota", "mounts", "suited"]
