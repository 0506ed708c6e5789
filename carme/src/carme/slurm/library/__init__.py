"""Slurm through its library, by pyslurm in a process of its own."""

from carme.slurm.library.adapter import SlurmLibrary

__all__ = ["SlurmLibrary"]
