"""Carme: interactive machine learning on Slurm clusters."""

__version__ = "0.1.0"
