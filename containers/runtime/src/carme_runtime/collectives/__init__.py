"""Collective operations over groups of ranks, on NumPy arrays and torch tensors in host memory."""

from carme_runtime.collectives.group import FromAny, Group, Pending, Plan

__all__ = ["FromAny", "Group", "Pending", "Plan"]
