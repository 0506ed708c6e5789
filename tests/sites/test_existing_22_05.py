"""A Debian 12 site with a Slurm 22.05 of its own gets Carme as docs/admins/install.md says, and loses it."""

from .existing_22_05 import SITE
from .own_slurm_tests import OwnSlurmTests

__all__ = ["SITE", "TestExisting2205"]


class TestExisting2205(OwnSlurmTests):
    """All tests of a site with a Slurm of its own."""
