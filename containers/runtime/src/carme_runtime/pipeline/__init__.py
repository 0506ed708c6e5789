"""Pipelines: schedules, which are checked and timed on paper, and plans that cut a graph into stages."""

from carme_runtime.pipeline.devices import Device
from carme_runtime.pipeline.partition import Request, plan
from carme_runtime.pipeline.pieces import Pieces
from carme_runtime.pipeline.plans import Plan
from carme_runtime.pipeline.schedules import KINDS, Action, Kind, PlanError, Schedule, make
from carme_runtime.pipeline.simulation import Run, Schedules, chain, held, simulate, slots_needed
from carme_runtime.pipeline.stages import Disk, Stage, StageFit

__all__ = [
    "KINDS",
    "Action",
    "Device",
    "Disk",
    "Kind",
    "Pieces",
    "Plan",
    "PlanError",
    "Request",
    "Run",
    "Schedule",
    "Schedules",
    "Stage",
    "StageFit",
    "chain",
    "held",
    "make",
    "plan",
    "simulate",
    "slots_needed",
]
