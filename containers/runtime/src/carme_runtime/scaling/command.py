"""`python -m carme_runtime.scaling RESULT.json`, which `carme scale` is, too."""

import argparse
import json
import sys
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.scaling.curves import changed, save
from carme_runtime.scaling.errors import ScalingError
from carme_runtime.scaling.network import Machine, parse_network
from carme_runtime.scaling.prediction import predict
from carme_runtime.scaling.profiles import load
from carme_runtime.scaling.show import as_dict, drawing, table


def main(arguments: list[str] | None = None) -> int:
    """Show what a probe's result predicts; 0: done, 1: it cannot be read."""
    options = parser().parse_args(arguments)
    try:
        show(options)
    except CarmeRuntimeError as error:
        print(f"{options.program}: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Of the options."""
    made = argparse.ArgumentParser(
        prog="python -m carme_runtime.scaling",
        description="Show how long a step takes on more ranks, by the result of carme-run --scale-probe.",
    )
    add_options(made)
    made.set_defaults(program="carme_runtime.scaling")
    return made


def add_options(made: argparse.ArgumentParser) -> None:
    """The options, for whoever has a parser."""
    made.add_argument("result", type=Path, metavar="RESULT.json", help="what the probe wrote")
    made.add_argument("--json", action="store_true", help="print JSON for programs")
    made.add_argument("--svg", type=Path, metavar="FILE", help="also draw the curve into this file")
    made.add_argument("--network", metavar="TEXT", help='links between nodes, such as "100 Gbit/s, 2 us"')
    made.add_argument("--ranks-per-node", type=int, default=1, metavar="K", help="as a rule the node's GPUs")
    made.add_argument("--upto", type=int, default=64, metavar="N", help="the most ranks (default: 64)")
    made.add_argument("--batch", type=int, metavar="B", help="samples of a step, instead of the script's")
    made.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the result with this network and batch, for the portal's forms and carme submit",
    )


def show(options: argparse.Namespace) -> None:
    """Print it. Raises CarmeRuntimeError."""
    for name in ("ranks_per_node", "upto", "batch"):
        if (value := getattr(options, name)) is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise ScalingError(f"{option} {value} is no number of 1 or more.", "Give at least 1.")
    profile = load(options.result)
    links = parse_network(options.network) if options.network else profile.links
    machine = Machine(links, options.ranks_per_node)
    if options.save:
        save(changed(profile, machine, options.batch), options.save)
    prediction = predict(profile, machine, options.upto, options.batch)
    if options.svg:
        try:
            options.svg.write_text(drawing(prediction))
        except OSError as error:
            raise ScalingError(
                f"The curve cannot be drawn into {options.svg} ({error.strerror}).", "Name another file."
            ) from None
    print(json.dumps(as_dict(prediction), indent=1) if options.json else table(prediction).rstrip("\n"))
