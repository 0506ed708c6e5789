"""Slurm through its library, by pyslurm in a process of its own."""

from carme.slurm.library.adapter import SlurmLibrary
from carme.slurm.library.selection import Choice, choose, opened

__all__ = ["Choice", "SlurmLibrary", "choose", "opened"]
