"""Collective operations over groups of ranks, on NumPy arrays and torch tensors in host memory."""

from carme_runtime.collectives.group import Group, Pending, Plan

__all__ = ["Group", "Pending", "Plan"]
