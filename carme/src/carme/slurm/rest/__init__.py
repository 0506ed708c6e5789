"""Slurm through slurmrestd, for hosts that have neither its programs nor its library."""

from carme.slurm.rest.adapter import SlurmRest
from carme.slurm.rest.server import VERSIONS, RestServer

__all__ = ["VERSIONS", "RestServer", "SlurmRest"]
