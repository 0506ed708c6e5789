"""`carme compare`, which is `python -m carme_runtime.compare` and `carme-run compare`, too."""

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from carme_runtime import strict_json
from carme_runtime.compare import report, results
from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.differences import difference
from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.images import DATA
from carme_runtime.compare.networks import ALL_NETWORKS, MOST_SIDE, MOST_WIDTH, NETWORKS
from carme_runtime.compare.rounds import Plan, compare
from carme_runtime.graph.show import columns
from carme_runtime.options import USUAL_NETWORKS, add_compare_options
from carme_runtime.subcommands import exit_code

_USUAL = {"networks": USUAL_NETWORKS, "more_s": 180.0}
_QUICK = {"networks": ("tiny", "mlp"), "rounds": 5, "turn_s": 0.25, "repeats": 1}
_MOST_RANKS, _MOST_MINUTES = 1024, 1440
_MODULE = "python -m carme_runtime.compare"


def main(arguments: list[str] | None = None, program: str = _MODULE) -> int:
    """Compare, list, or show differences; 0: done, 1: it cannot be done.

    Args:
        arguments: Of the command.
        program: As it was called, for its help and its messages.
    """
    options = parser(program).parse_args(arguments)
    return exit_code(options.program, lambda: run(options))


def parser(program: str = _MODULE) -> argparse.ArgumentParser:
    """Of the options."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train the same networks with every framework that is installed, in turns, and write a "
        "report with what each takes.",
    )
    add_compare_options(parser)
    parser.set_defaults(program=program)
    return parser


def run(options: argparse.Namespace) -> None:
    """Do what the options say. Raises CarmeRuntimeError."""
    if options.diff:
        before, after = map(results.load, options.diff)
        print(difference(before, after), end="")
    elif options.list:
        print(_listing(options.json, _pythons(options.python)))
    else:
        _compare(options)


def _listing(as_json: bool, pythons: Mapping[str, str]) -> str:
    missing = {
        name: contestant.missing(pythons.get(name, sys.executable))
        for name, contestant in CONTESTANTS.items()
    }
    if as_json:
        found = [
            {"name": each.name, "title": each.title, "backend": each.backend, "missing": missing[each.name]}
            for each in CONTESTANTS.values()
        ]
        networks = [
            {
                "name": each.name,
                "title": each.full_title,
                "batch": each.batch,
                "parameters": each.parameters(),
            }
            for each in NETWORKS.values()
        ]
        images = [
            {"name": each.name, "side": each.side, "channels": each.channels, "classes": each.classes}
            for each in DATA.values()
        ]
        return json.dumps({"contestants": found, "networks": networks, "data": images}, indent=1)
    rows: list[tuple[str, ...]] = [("contestant", "", "carme-run --backend", "missing")]
    rows += [
        (each.name, each.title, each.backend, ", ".join(missing[each.name])) for each in CONTESTANTS.values()
    ]
    more: list[tuple[str, ...]] = [("network", "", "parameters", "batch")]
    more += [
        (each.name, each.full_title, f"{each.parameters():,}", str(each.batch)) for each in NETWORKS.values()
    ]
    data: list[tuple[str, ...]] = [("data", "pixels", "channels", "classes")]
    data += [
        (each.name, str(each.side or "the network's"), str(each.channels), str(each.classes))
        for each in DATA.values()
    ]
    return f"{columns(rows, left=4)}\n\n{columns(more, left=2)}\n\n{columns(data, left=1)}"


def _compare(options: argparse.Namespace) -> None:
    plan = plan_of(options)
    folder: Path = options.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompareError(
            f"The folder {folder} cannot be made ({error.strerror}).", "Choose another with --output."
        ) from None
    requested = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(plan).items()
    }
    # Scripts are ended with SIGTERM; ranks must not stay behind.
    before = {number: signal.signal(number, _end) for number in _ending()}
    try:
        result = compare(plan, requested, folder, lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    results.save(result, folder / "compare.json")
    results.write_whole(folder / "compare.html", report.page(result))
    print(f"The report: {folder / 'compare.html'}", file=sys.stderr, flush=True)
    as_json = options.json
    print(strict_json.dumps(results.as_dict(result), indent=1) if as_json else report.text(result).rstrip())
    if not result.measured:
        raise CompareError("All rows are void, so nothing was measured.", "The report says why.")


def _ending() -> list[int]:
    """Signals that end a comparison; a shell lets what it starts in the background ignore SIGINT."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGINT]


def _end(number: int, _: object) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)  # a second one must not end the cleaning up
    sys.exit(128 + number)


def plan_of(options: argparse.Namespace) -> Plan:
    """What the options ask for. Raises CompareError."""
    chosen: dict[str, Any] = dict(_QUICK if options.quick else _USUAL)
    if options.networks is not None:
        requested = ALL_NETWORKS if options.networks == "all" else options.networks.split(",")
        chosen["networks"] = _names(requested, NETWORKS, "network")
    limits = {"rounds": results.MOST_ROUNDS, "batch": 1 << 20, "threads": 4096, "size": MOST_SIDE}
    for name, most in limits.items():
        if (value := getattr(options, name)) is not None:
            if not 1 <= value <= most:
                raise CompareError(f"--{name} {value} is not possible.", f"Give 1 to {most}.")
            chosen[name] = value
    if options.width is not None and not 0 < options.width <= MOST_WIDTH:
        raise CompareError(
            f"--width {options.width:g} is not possible.", f"Give more than 0 and up to {MOST_WIDTH:g}."
        )
    if not 0 <= options.limit <= 100:
        raise CompareError(f"--limit {options.limit:g} is not possible.", "Give 0 to 100 percent.")
    if options.minutes is not None:
        if not 0 <= options.minutes <= _MOST_MINUTES:
            raise CompareError(
                f"--minutes {options.minutes:g} is not possible.", f"Give 0 to {_MOST_MINUTES} minutes."
            )
        chosen["more_s"] = 60 * options.minutes
    if options.seed < 0:
        raise CompareError(f"--seed {options.seed} is not possible.", "Give 0 or more.")
    return Plan(
        contestants=_names(options.contestants or list(CONTESTANTS), CONTESTANTS, "contestant"),
        ranks=_ranks(options.ranks),
        scaling=options.scaling,
        precision=options.precision,
        input=options.input,
        data=_names([options.data], DATA, "data set")[0],
        width=options.width,
        limit=options.limit,
        seed=options.seed,
        slower=dict(map(_slower, options.slower)),
        pythons=_pythons(options.python),
        **chosen,
    )


def _names(requested: Iterable[str], known: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in requested))
    for name in names:
        if name not in known:
            raise CompareError(
                f"There is no {kind} '{name}'.",
                f"Choose from {', '.join(known)}.",
            )
    return names


def _ranks(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not all(1 <= number <= _MOST_RANKS for number in found):
        raise CompareError(
            f"--ranks {text} cannot be read.",
            f"Give numbers of 1 to {_MOST_RANKS} with commas: 1,2,4",
        )
    return found


def _pythons(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if name not in CONTESTANTS or not path:
            raise CompareError(
                f"--python {text} cannot be read.",
                "Give a contestant and the Python that it runs with: mxnet=/path/of/environment/bin/python",
            )
        # Not resolved: an environment's Python is a link, and Python knows the environment by its place.
        found[name] = str(Path(path).expanduser().absolute())
    return found


def _slower(text: str) -> tuple[str, float]:
    name, _, percent = text.partition("=")
    try:
        value = float(percent)
    except ValueError:
        value = -1.0
    if name not in CONTESTANTS or not 0 < value <= 1000:
        raise CompareError(
            f"--slower {text} cannot be read.", "Give a contestant and up to 1000 percent: torch-gloo=10"
        )
    return name, value
