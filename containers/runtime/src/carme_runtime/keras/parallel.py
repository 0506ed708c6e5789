"""Who does what for a Keras model: each rank all of it, or a stage."""

import os
from typing import Any

from carme_runtime import strategies
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.keras.functional import functional_of
from carme_runtime.keras.graph import steps
from carme_runtime.keras.layers import has_split_layers
from carme_runtime.keras.library import keras
from carme_runtime.keras.steps import Steps
from carme_runtime.keras.world import World
from carme_runtime.logs import log
from carme_runtime.starts import STREAMED, check_start

# Arguments of `Model` about pipelines.
OF_PIPELINES = ("stages", "micro_batches", "schedule", "memory", "batch_norm", "num_pipeline_stages")


def steps_of(
    model: Any, world: World, data: bool, pipelining: bool, options: dict[str, Any], start: str = ""
) -> tuple[World, Steps]:
    """What trains a Keras model, and the ranks as it sees them.

    Args:
        model: Keras' own.
        world: The ranks.
        data, pipelining: What the script allows.
        options: Of `stages.Wanted`.
        start: `streamed`, or empty.

    Raises:
        InvalidCall: Stages were requested, and cannot be; or another start, or that with stages.
    """
    check_start(start)
    strategy = _strategy(data, pipelining)
    if strategy == strategies.DATA or (world.size == 1 and not strategies.plans_only()):
        return world, steps(model, world, start == STREAMED)
    if obstacle := _obstacle(model):
        if data and not os.environ.get(strategies.STRATEGY) and not strategies.plans_only():
            if has_split_layers(model) and world.is_master:
                log.warning("%s So each rank has the whole model, and its share of each batch.", obstacle)
            return world, steps(model, world, start == STREAMED)
        remedy = "Use ParallelStrategy.DATA, where each rank has all layers, and its share of each batch."
        if os.environ.get(strategies.STRATEGY) or strategies.plans_only():
            strategies.refuse_plan(
                CarmeRuntimeError(obstacle, "Leave --plan and --strategy out."), world.rank
            )
        raise InvalidCall(obstacle, remedy)
    if start:
        raise InvalidCall(
            f"The model {model.name} may be cut into stages, and start='{start}' is for whole models.",
            "Leave start out, or use ParallelStrategy.DATA.",
        )
    from carme_runtime.keras.stages import Wanted

    strategies.follow()
    seen = world.for_stages()
    return seen, _pipeline_steps()(model, seen, Wanted(strategy, **options))


def _pipeline_steps() -> Any:
    """The class for this backend."""
    if keras.backend.backend() == "torch":
        from carme_runtime.keras.stages_of_torch import TorchPipelineSteps

        return TorchPipelineSteps
    from carme_runtime.keras.stages_of_tensorflow import TensorFlowPipelineSteps

    return TensorFlowPipelineSteps


def _strategy(data: bool, pipelining: bool) -> str:
    requested = os.environ.get(strategies.STRATEGY)
    if requested or strategies.plans_only():
        usual = strategies.AUTO if data else strategies.PIPELINE
        return strategies.chosen_strategy(usual)
    if not pipelining:
        return strategies.DATA
    return strategies.AUTO if data else strategies.PIPELINE


def _obstacle(model: Any) -> str:
    """Why a model cannot be cut into stages; empty: it can."""
    if functional_of(model) is None:
        return (
            f"The model {model.name} cannot be cut into stages: it is not a functional or sequential model, "
            "or does not begin with keras.Input."
        )
    return ""
