"""What `carme submit` and `carme session start` make of a probe's result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from carme.cli.output import plain, print_json, print_table
from carme.errors import InvalidRequest
from carme.scaling import Choice, Curve, Prediction, choices, marks, read_file
from carme.translation import message as _
from carme.wording import number, percent

__all__ = ["NOT_POSSIBLE", "add", "choice_words", "read_prediction", "show", "size_words"]

#: When a choice starts that this site cannot start.
NOT_POSSIBLE = "not possible"
_BEYOND = "* Beyond what was measured."
_MOST_NODES, _MOST_GPUS = 1024, 16  # that a result may have rows for


def add(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--scaling",
        type=Path,
        metavar="RESULT.json",
        help="what carme-run --scale-probe wrote; its prediction for these nodes and GPUs stays with the job",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="with --scaling: steps of the whole training")
    parser.add_argument(
        "--reason", default="", metavar="TEXT", help="with --scaling: why you need so many nodes or GPUs"
    )
    parser.add_argument(
        "--choices",
        action="store_true",
        help="with --scaling: show what other nodes and GPUs would take and cost, and start nothing",
    )


def read_prediction(options: argparse.Namespace) -> Prediction | None:
    """What is kept with the job, which a sentence also says; None: no --scaling. Raises InvalidRequest."""
    curve = _curve(options)
    if curve is None:
        return None
    prediction = curve.prediction(options.nodes, options.gpus, options.steps, options.reason)
    if not options.json:
        chosen = Choice(options.nodes, options.gpus, curve.row(options.nodes, options.gpus), options.steps)
        print(f"carme: Predicted: {plain(choice_words(chosen))}.", file=sys.stderr)
    return prediction


def show(options: argparse.Namespace, start: Callable[[int, int], str] | None = None) -> int:
    """Print a table of what could be chosen. Raises CarmeError.

    Args:
        start: Says when a job with so many nodes and GPUs of each would start, or NOT_POSSIBLE; None: nobody
            can say.
    """
    curve = _curve(options)
    if curve is None:
        raise InvalidRequest(
            _("--choices needs the result of a probe."), _("Add --scaling RESULT.json."), field="scaling"
        )
    when_of = cache(start or (lambda nodes, gpus: ""))

    def is_possible(nodes: int, gpus: int) -> bool:
        return when_of(nodes, gpus) != NOT_POSSIBLE

    # Of what is requested there may be no row; the others are shown all the same.
    chosen = (options.nodes, options.gpus)
    found = choices(curve, _MOST_NODES, _MOST_GPUS, chosen, options.steps, is_possible)
    if not found:
        raise InvalidRequest(
            _("The probe's result has no prediction for any of these."), _("Measure again."), field="scaling"
        )
    starts = [when_of(choice.nodes, choice.gpus_per_node) for choice in found]
    # What this site cannot start is shown, but recommended to nobody.
    possible = [choice for choice, when in zip(found, starts, strict=True) if when != NOT_POSSIBLE]
    cheapest, fastest = marks(possible) if possible else (None, None)
    if options.json:
        each = zip(found, starts, strict=True)
        print_json([_for_programs(choice, cheapest, fastest, when) for choice, when in each])
        return 0
    rows = []
    for choice, when in zip(found, starts, strict=True):
        which = [name for name, best in (("cheapest", cheapest), ("fastest", fastest)) if best is choice]
        if (choice.nodes, choice.gpus_per_node) == chosen:
            which.append("chosen")
        row = choice.row
        rows.append(
            [
                f"{size_words(choice)}{'*' if row.extrapolated else ''}",
                f"{row.speedup:.1f}",
                percent(row.efficiency),
                hours_words(choice.hours) if choice.hours is not None else f"{row.step_ms:.3g} ms a step",
                f"{choice.cost:.3g}" if choice.hours is not None else f"{choice.cost:.2f} times",
                row.limit,
                *([when] if start else []),
                ", ".join(which),
            ]
        )
    titles = ["CHOICE", "TIMES AS FAST", "EFFICIENCY", "TIME", "GPU-HOURS" if options.gpus else "NODE-HOURS"]
    print_table([*titles, "LIMIT", *(["EXPECTED START"] if start else []), ""], rows)
    if any(choice.row.extrapolated for choice in found):
        print(_BEYOND)
    return 0


def _for_programs(
    choice: Choice, cheapest: Choice | None, fastest: Choice | None, start: str
) -> dict[str, Any]:
    """A choice as JSON."""
    more = {"expected_start": start} if start else {}
    return {
        "nodes": choice.nodes,
        "gpus_per_node": choice.gpus_per_node,
        **choice.row.model_dump(exclude={"nodes", "ranks_per_node"}),
        "hours": choice.hours,
        "cost": choice.cost,
        "cheapest": choice is cheapest,
        "fastest": choice is fastest,
        **more,
    }


def size_words(choice: Choice) -> str:
    """Nodes and GPUs."""
    nodes = number(choice.nodes, "node")
    return f"{nodes}, {number(choice.gpus, 'GPU')}" if choice.gpus_per_node else nodes


def hours_words(hours: float) -> str:
    """A time, in the unit that fits."""
    return f"{hours:.3g} h" if hours >= 1 else f"{hours * 60:.3g} min"


def choice_words(choice: Choice) -> str:
    """A choice in one line: `8 GPUs: 6.9 times as fast, 41 GPU-hours`."""
    unit = "GPU-hours" if choice.gpus_per_node else "node-hours"
    cost = f"{choice.cost:.3g} {unit}" if choice.hours is not None else f"{choice.cost:.2f} times the {unit}"
    time = f"{hours_words(choice.hours)}, " if choice.hours is not None else ""
    row = choice.row
    return (
        f"{size_words(choice)}: {row.speedup:.1f} times as fast as one, {time}{cost}, "
        f"efficiency {percent(row.efficiency)}{' (beyond what was measured)' if row.extrapolated else ''}"
    )


def _curve(options: argparse.Namespace) -> Curve | None:
    if options.scaling is not None:
        return read_file(options.scaling)
    for name in ("steps", "reason"):
        if getattr(options, name):
            raise InvalidRequest(
                _("--{name} belongs to --scaling.", name=name), _("Add --scaling RESULT.json."), field=name
            )
    return None
