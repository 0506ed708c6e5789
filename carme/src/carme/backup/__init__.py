"""Backup and restore of what a site's head holds: databases, state, secrets, certificates and records."""

from carme.backup.archive import Manifest, check, create, restore
from carme.backup.sealing import make_key

__all__ = ["Manifest", "check", "create", "make_key", "restore"]
