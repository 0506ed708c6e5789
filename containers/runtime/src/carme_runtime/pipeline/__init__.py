"""Pipelines: schedules, which are checked and timed on paper, and plans that cut a graph into stages."""

from carme_runtime.pipeline.schedules import KINDS, Action, Kind, PlanError, Schedule, make
from carme_runtime.pipeline.simulation import Run, chain, held, simulate, slots_needed

__all__ = [
    "KINDS",
    "Action",
    "Kind",
    "PlanError",
    "Run",
    "Schedule",
    "chain",
    "held",
    "make",
    "simulate",
    "slots_needed",
]
