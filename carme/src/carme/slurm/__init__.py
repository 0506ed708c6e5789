"""The gateway to Slurm: one interface, and the adapters that speak to a real Slurm."""

from carme.slurm.account import UnixAccount
from carme.slurm.commands import SlurmCommands
from carme.slurm.gateway import Order, Outcome, Slurm
from carme.slurm.label import Label

__all__ = ["Label", "Order", "Outcome", "Slurm", "SlurmCommands", "UnixAccount"]
