"""How ranks may share a model, and what `carme-run` passes to scripts of it."""

import atexit
import os
import sys
from typing import Any, NoReturn

from carme_runtime.addresses import port_in_use
from carme_runtime.errors import CarmeRuntimeError

AUTO, DATA, PIPELINE, HYBRID = "auto", "data", "pipeline", "hybrid"
STRATEGIES = (AUTO, DATA, PIPELINE, HYBRID)
STRATEGY = "CARME_STRATEGY"
# Set: print the plan, and train nothing.
PLAN = "CARME_PLAN"
_REFUSED = 2  # exit code


def chosen_strategy(argument: str | None) -> str:
    """The strategy of a script: what `carme-run --strategy` says, else its own argument, else `auto`.

    Raises:
        CarmeRuntimeError: There is no such strategy.
    """
    strategy = os.environ.get(STRATEGY) or argument or AUTO
    if strategy not in STRATEGIES:
        raise CarmeRuntimeError(
            f"There is no strategy '{strategy}'.", f"Choose from {', '.join(STRATEGIES)}."
        )
    return strategy


def plans_only() -> bool:
    """Whether `carme-run --plan` started this process."""
    return PLAN in os.environ


def show_plan(text: str, rank: int) -> NoReturn:
    """Print the plan on rank 0, and end the script."""
    atexit.unregister(_note_missing_plan)
    if rank == 0:
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
    sys.exit(0)


def refuse_plan(error: CarmeRuntimeError, rank: int) -> NoReturn:
    """Print on rank 0 why there is no plan, or none of the strategy requested, and end the script.

    All ranks come here. The others end well, as the launcher stops rank 0 when one of them fails before it.
    """
    atexit.unregister(_note_missing_plan)
    if rank:
        sys.exit(0)
    option = "--plan" if plans_only() else "--strategy"
    print(f"carme-run {option}: {error}", file=sys.stderr, flush=True)
    sys.exit(_REFUSED)


def follow() -> None:
    """The script calls `pipeline`, which does what `carme-run`'s options request."""
    follow.done = True  # pyright: ignore[reportFunctionMemberAccess]


def watch_for_plan() -> None:
    """Let no script train that cannot do what `carme-run`'s options request. PyTorch is imported."""
    if not _needs_pipeline() or getattr(watch_for_plan, "done", False):
        return
    watch_for_plan.done = True  # pyright: ignore[reportFunctionMemberAccess]
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    optimizers.register_optimizer_step_pre_hook(lambda *_: _refuse_training())
    if plans_only():
        atexit.register(_note_missing_plan)


def _needs_pipeline() -> bool:
    return plans_only() or os.environ.get(STRATEGY) in (PIPELINE, HYBRID)


def _refuse_training() -> None:
    if getattr(follow, "done", False):
        return
    missing = "there is no plan" if plans_only() else "its model is not cut into stages"
    error = CarmeRuntimeError(
        f"The script trains without pipeline(), so {missing}.",
        "Call carme_runtime.torch.pipeline(model, optimizer, example=inputs) before the training loop.",
    )
    refuse_plan(error, int(os.environ.get("RANK", "0")))


def _note_missing_plan() -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    # Set where an exception that nothing caught has ended the script, and has been printed.
    error = getattr(sys, "last_value", None)
    if reported := port_in_use(error, os.environ):
        print(f"carme-run --plan: {reported}", file=sys.stderr, flush=True)
        return
    failed = error is not None
    ending = (
        "failed before it called pipeline(); its error is above"
        if failed
        else ("ended without a call of pipeline()")
    )
    print(f"carme-run --plan: The script {ending}, so there is no plan.", file=sys.stderr, flush=True)
