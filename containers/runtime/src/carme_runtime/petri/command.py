"""`carme net`, which is `carme-run net` and `python -m carme_runtime.petri`, too."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from carme_runtime import strict_json
from carme_runtime.graph.show import columns, size_text
from carme_runtime.petri import control, frames, journal
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.net import Net
from carme_runtime.petri.run import Run
from carme_runtime.petri.scripts import net_in
from carme_runtime.subcommands import add_subcommand, exit_code

#: Seconds between two looks at a run of another program.
_EVERY = 0.5
#: Of a terminal's screen.
_CLEAR = "\x1b[H\x1b[2J"


def main(arguments: list[str] | None = None, program: str = "python -m carme_runtime.petri") -> int:
    """Run one command; 0: done, 1: it cannot be done."""
    options = parser(program).parse_args(arguments)
    return exit_code(program, lambda: options.run(options))


def parser(program: str = "carme net") -> argparse.ArgumentParser:
    """Of the options."""
    parser = argparse.ArgumentParser(prog=program, description="Petri nets: run them, watch them, feed them.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], words: str) -> argparse.ArgumentParser:
        return add_subcommand(commands, name, run, words)

    run = add("run", _run, "run the net that a script defines")
    run.add_argument("script", type=Path, metavar="SCRIPT.py", help="a Python file that makes a Net")
    run.add_argument(
        "--net", default="", metavar="NAME", help="which net to run, where the script makes several"
    )
    run.add_argument(
        "--folder", type=Path, help="folder of the run (default: a new one, named after the net)"
    )
    _add_running(run)
    resume = add("resume", _resume, "go on with a run whose program has ended")
    resume.add_argument("folder", type=Path, help="folder of the run")
    _add_running(resume)
    status = add("status", _status, "show what a run has done and where its tokens are")
    status.add_argument(
        "folder", type=Path, nargs="?", help="folder of the run (default: list the runs on this node)"
    )
    status.add_argument(
        "--follow", action="store_true", help="show it again whenever it has changed, until it rests or ends"
    )
    put = add("put", _put, "put tokens into a net that runs")
    put.add_argument("folder", type=Path, help="folder of the run")
    put.add_argument("place", help="where the tokens go")
    put.add_argument(
        "tokens", nargs="+", metavar="TOKEN", help="text, number or JSON; '-': lines of the input"
    )
    add("include", _include, "print the folder of carme_ranges.h, for programs in C and C++")
    attach = add("attach", _attach, "follow a run that another program has, until it rests or ends")
    attach.add_argument("folder", type=Path, help="folder of the run")
    return parser


def _add_running(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--workers",
        default="here",
        metavar="N",
        help="number of processes, 'here': one per processor, or 'job': on all nodes",
    )
    command.add_argument(
        "--offers",
        default="",
        metavar="NEEDS",
        help="what workers offer to transitions that need it, such as gpu:2",
    )
    command.add_argument(
        "--memory", metavar="SIZE", help="memory of this node that ranges may take, such as 8GiB"
    )
    command.add_argument(
        "--spill", type=Path, metavar="FOLDER", help="folder for ranges that do not fit into memory"
    )
    command.add_argument(
        "--put",
        action="append",
        default=[],
        metavar="PLACE=TOKEN",
        help="put a token into a place at the start",
    )
    command.add_argument(
        "--stay", action="store_true", help="wait for more tokens (carme net put) until Ctrl-C"
    )


def _run(options: argparse.Namespace) -> int:
    net = net_in(options.script, Net, options.net)
    return _follow(options, net.start(folder=options.folder, **_settings(options)))


def _resume(options: argparse.Namespace) -> int:
    return _follow(options, Net.resume(options.folder, **_settings(options)))


def _include(options: argparse.Namespace) -> int:
    folder = str(Path(__file__).parent / "include")
    print(json.dumps(folder) if options.json else folder)
    return 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    workers = int(options.workers) if options.workers.isdecimal() else options.workers
    return {
        "workers": workers,
        "offers": options.offers,
        "memory": options.memory,
        "spill": options.spill,
    }


def _follow(options: argparse.Namespace, run: Run) -> int:
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with run:
            print(f"The run is in {run.folder}.", file=sys.stderr, flush=True)
            for each in options.put:
                name, _, text = each.partition("=")
                place = run.place(name)
                run.put(place, control.from_text(place, text, run))
            try:
                marking = run.follow(show=_show)
                if options.stay:
                    _stay(run)
            except KeyboardInterrupt:
                if not options.stay:
                    raise
                marking = run.marking()  # it ends as it should, whatever still ran
            _print(options, marking, run.status())
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _stay(run: Run) -> NoReturn:
    """Show what the run makes of new tokens, until a signal or an error ends it."""
    last = ""
    while True:
        time.sleep(_EVERY)
        status = run.status()
        if status["error"]:
            run.wait()
        if status["line"] != last:
            _show(status["line"])
        last = status["line"]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _status(options: argparse.Namespace) -> int:
    if options.folder is None:
        return _list(options)
    try:
        with control.Attached(options.folder) as attached:
            last: dict[str, Any] = {}
            while True:
                status = attached.status()
                if status != last:
                    if last and not options.json and sys.stdout.isatty():
                        print(_CLEAR, end="")
                    _print(options, None, status)
                    sys.stdout.flush()
                last = status
                if not options.follow or status["state"] != "running":
                    break
                time.sleep(_EVERY)
    except PetriError:
        if not (options.folder / "journal").exists():
            raise
        _print(options, None, _journaled(options.folder))
    return 0


def _list(options: argparse.Namespace) -> int:
    found = []
    for identity in control.identities():
        try:
            with control.Attached.to(identity) as attached:
                found.append(attached.status())
        except PetriError:  # it has ended just now
            continue
    if options.json:
        print(json.dumps(found, indent=1))
    elif not found:
        print("No net of yours runs on this node.")
    else:
        rows: list[tuple[str, ...]] = [("net", "state", "folder", "workers", "running", "tokens")]
        for each in found:
            numbers = each["workers"], sum(each["running"].values()), sum(each["places"].values())
            rows.append((each["net"], each["state"], each["folder"], *map(str, numbers)))
        print(columns(rows, 3))
    return 0


def _journaled(folder: Path) -> dict[str, Any]:
    """The state of a run that no program has."""
    file = folder / "journal"
    header, state = frames.header_of(file), journal.read(file)
    places = dict.fromkeys(header["places"], 0)
    for place, _ in state.tokens.values():
        places[header["places"][place]] += 1
    return {
        "net": header["net"],
        "folder": str(folder.absolute()),
        "state": "ended",
        "error": "",
        "workers": 0,
        "running": {},
        "fired": {},
        "places": places,
        "ranges": {name: each.size for name, each in sorted(state.ranges.items())},
        "notices": [],
    }


def _put(options: argparse.Namespace) -> int:
    texts = [
        text
        for token in options.tokens
        for text in (sys.stdin.read().splitlines() if token == "-" else [token])
    ]
    with control.Attached(options.folder) as attached:
        attached.put_text(options.place, *texts)
    if options.json:
        print(json.dumps({"place": options.place, "put": len(texts)}))
    else:
        print(f"Put {len(texts)} token{'s' * (len(texts) != 1)} into {options.place}.")
    return 0


def _attach(options: argparse.Namespace) -> int:
    last = ""
    with control.Attached(options.folder) as attached:
        while True:
            status = attached.status()
            if (line := status["line"]) != last:
                _show(line)
            last = line
            if status["state"] != "running":
                _print(options, None, status)
                return 0
            time.sleep(_EVERY)


def _print(options: argparse.Namespace, marking: dict[str, list[Any]] | None, status: dict[str, Any]) -> None:
    if options.json:
        tokens = {"tokens": marking} if marking is not None else {}
        print(strict_json.dumps(status | tokens, indent=1, default=repr))
        return
    print(f"Net {status['net']} in {status['folder']}: {status['state']}.")
    if status["error"]:
        print(status["error"])
    print(columns([("place", "tokens"), *((name, str(n)) for name, n in status["places"].items())], 1))
    steps = [(n, str(status["fired"][n]), str(status["running"].get(n, 0))) for n in status["fired"]]
    if steps:
        print("\n" + columns([("transition", "ended", "running"), *steps], 1))
    if status["ranges"]:
        rows = [(name, size_text(size)) for name, size in status["ranges"].items()]
        print("\n" + columns([("range", "size"), *rows], 1))
    for notice in status["notices"][-5:]:
        print(notice)
