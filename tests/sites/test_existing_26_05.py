"""A Debian 13 site with the Slurm 26.05 of Debian testing gets Carme as install.md says, and loses it."""

from .existing_26_05 import SITE
from .own_slurm_tests import OwnSlurmTests

__all__ = ["SITE", "TestExisting2605"]


class TestExisting2605(OwnSlurmTests):
    """All tests of a site with a Slurm of its own."""
