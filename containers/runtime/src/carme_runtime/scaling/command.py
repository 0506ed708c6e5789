"""`python -m carme_runtime.scaling RESULT.json`, which `carme scale` is, too."""

import argparse
import sys

from carme_runtime import strict_json
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.options import add_scale_options
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
    parser = argparse.ArgumentParser(
        prog="python -m carme_runtime.scaling",
        description="Show how long a step takes on more ranks, by the result of carme-run --scale-probe.",
    )
    add_scale_options(parser)
    parser.set_defaults(program="carme_runtime.scaling")
    return parser


def show(options: argparse.Namespace) -> None:
    """Print it. Raises CarmeRuntimeError."""
    for name in ("ranks_per_node", "upto", "batch"):
        if (value := getattr(options, name)) is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise ScalingError(f"{option} {value} is not a number of 1 or more.", "Give at least 1.")
    if not 0 < options.efficiency <= 100:
        raise ScalingError(
            f"--efficiency {options.efficiency:g} is not possible.", "Give more than 0 and up to 100 percent."
        )
    profile = load(options.result)
    links = parse_network(options.network) if options.network is not None else profile.links
    machine = Machine(links, options.ranks_per_node)
    if options.save:
        save(changed(profile, machine, options.batch), options.save, "--save")
    prediction = predict(profile, machine, options.upto, options.batch)
    if options.svg:
        try:
            options.svg.write_text(drawing(prediction))
        except OSError as error:
            raise ScalingError(
                f"The curve cannot be drawn into {options.svg} ({error.strerror}).", "Name another file."
            ) from None
    if options.json:
        print(strict_json.dumps(as_dict(prediction, options.efficiency), indent=1))
    else:
        print(table(prediction, options.efficiency).rstrip("\n"))
