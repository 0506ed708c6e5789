"""`carme data`."""

from __future__ import annotations

import sys

from carme.command_line import add_partition, add_time, add_workers
from carme.errors import InvalidRequest
from carme.staging import Counts, Options, Problem, Progress, Result, copy, pack, parse_size, sync, verify
from carme.staging.digests import ALGORITHMS
from carme.staging.options import COMPRESSIONS, ENGINES, shown
from carme.staging.progress import Rates, duration, progress_text
from carme.translation import message as _
from carme.wording import number, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    parser = commands.add_parser("data", help="copy data quickly, verified, and compare copies")
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=parser.prog)
    for add_command in (_add_copy, _add_work, _add_sync, _add_verify, _add_pack):
        add_command(parts)


def _add_copy(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = parts.add_parser(
        "copy",
        help="copy a folder or file; run it again to resume, or to copy changes",
        description="Copy the contents of folder SRC into folder DST, or file SRC to DST. Unchanged files "
        "are not copied again. Nothing is removed at the destination.",
    )
    _paths(command)
    _how(command)
    _nodes(command)
    command.set_defaults(run=_copy)


def _add_work(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = parts.add_parser(
        "work",
        help="copy a part of a copy by several nodes; its jobs run this",
        description="Copy units of the plan that 'carme data copy --nodes' made, until there are no more.",
    )
    command.add_argument("plan", metavar="PLAN", help="the plan's folder, at the copy's top")
    command.set_defaults(run=_run_worker)


def _add_sync(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = parts.add_parser(
        "sync",
        help="copy, and remove from DST what SRC does not have",
        description="Make folder DST equal to folder SRC: copy changes, and remove from DST what SRC does "
        "not have.",
    )
    _paths(command)
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="change nothing; print what would be copied, updated and removed",
    )
    _how(command)
    command.set_defaults(run=_sync)


def _add_verify(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = parts.add_parser(
        "verify",
        help="compare a copy with its source, byte by byte",
        description="Compare DST with SRC: contents and attributes. Changes nothing. With "
        "IMAGE alone, compare a packed image with its recorded digest.",
    )
    command.add_argument("source", metavar="SRC | IMAGE")
    command.add_argument("destination", metavar="DST", nargs="?", default="")
    _printing(command)
    command.add_argument(
        "--device", action="store_true", help="read from the devices, not from this host's memory"
    )
    _add_pace_options(command)
    command.set_defaults(run=_verify)


def _add_pack(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = parts.add_parser(
        "pack",
        help="pack a folder into one image that jobs mount",
        description="Pack the folder SRC into the squashfs image IMAGE, with its index and digest beside it, "
        "and compare the two.",
    )
    command.add_argument("source", metavar="SRC")
    command.add_argument("image", metavar="IMAGE")
    _printing(command)
    add_workers(command)
    command.add_argument(
        "--compression",
        choices=COMPRESSIONS,
        default="zstd",
        help="compression (default: zstd)",
    )
    command.add_argument("--hash", choices=ALGORITHMS, default="", help="digest (default: blake3)")
    command.set_defaults(run=_pack)


def _nodes(parser: argparse.ArgumentParser) -> None:
    nodes = parser.add_argument_group("copy with several nodes, which must all mount SRC and DST")
    nodes.add_argument("--nodes", type=int, metavar="N", help="share the work among this many nodes, as jobs")
    nodes.add_argument(
        "--dsync", action="store_true", help="copy with dsync of mpiFileUtils, which all nodes need"
    )
    add_partition(nodes, "partition of these jobs (default: the site's)")
    add_time(nodes, "how long they may run")


def _run_worker(arguments: argparse.Namespace) -> int:
    import os

    from carme.staging.spread import work

    reporter = Reporter(False, True)
    return reporter.end(work(arguments.plan, os.environ.get("SLURM_ARRAY_TASK_ID", "")))


def _paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("destination", metavar="DST")


def _printing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON event a line, for programs")
    parser.add_argument("--quiet", action="store_true", help="print only errors and the summary, no progress")


def _add_pace_options(parser: argparse.ArgumentParser) -> None:
    add_workers(parser)
    parser.add_argument("--bandwidth", metavar="SIZE", help="limit in bytes per second, for example 500M")
    parser.add_argument(
        "--operations", type=int, default=0, metavar="N", help="limit in files and parts per second"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="native: the compiled part; python: without it; auto: whichever is installed (default)",
    )


def _how(parser: argparse.ArgumentParser) -> None:
    _printing(parser)
    _add_pace_options(parser)
    parser.add_argument(
        "--verify",
        choices=("read", "device", "none"),
        default="read",
        help="read: read every copied byte back (default); device: write it to the device first and read it "
        "from there; none: do not verify",
    )
    parser.add_argument(
        "--hash",
        choices=ALGORITHMS,
        default="",
        help="digest for the verification (default: xxh3; the strong ones are slower)",
    )
    parser.add_argument(
        "--contents", action="store_true", help="find changes by contents, not by size and time"
    )
    parser.add_argument("--no-attributes", action="store_true", help="leave out extended attributes and ACLs")
    parser.add_argument(
        "--durable", action="store_true", help="finish only when everything is on the destination's device"
    )


def _options(arguments: argparse.Namespace) -> Options:
    if arguments.operations < 0:
        raise InvalidRequest(
            _("The number of operations a second must not be negative."), _("Leave it out for no limit.")
        )
    return Options(
        workers=arguments.workers,
        verify=arguments.verify,
        hash=arguments.hash,
        contents=arguments.contents,
        bandwidth=parse_size(arguments.bandwidth) if arguments.bandwidth else 0,
        operations=arguments.operations,
        attributes=not arguments.no_attributes,
        engine=arguments.engine,
        durable=arguments.durable,
        # For somebody, or something, that watches.
        estimate=not arguments.quiet and (arguments.json or sys.stderr.isatty()),
    )


def _verify(arguments: argparse.Namespace) -> int:
    reporter = Reporter(arguments.json, arguments.quiet, verb="compared")
    options = Options(
        workers=arguments.workers,
        verify="device" if arguments.device else "read",
        bandwidth=parse_size(arguments.bandwidth) if arguments.bandwidth else 0,
        operations=max(0, arguments.operations),
        engine=arguments.engine,
    )
    return reporter.end(verify(arguments.source, arguments.destination, options, notify=reporter))


def _pack(arguments: argparse.Namespace) -> int:
    reporter = Reporter(arguments.json, arguments.quiet, verb="packed")
    options = Options(workers=arguments.workers, hash=arguments.hash)
    return reporter.end(
        pack(arguments.source, arguments.image, arguments.compression, options, notify=reporter)
    )


def _copy(arguments: argparse.Namespace) -> int:
    reporter = Reporter(arguments.json, arguments.quiet)
    if arguments.nodes is not None:
        from carme.cli.spread import copy_by_nodes

        return reporter.end(copy_by_nodes(arguments, _options(arguments), reporter))
    if arguments.partition or arguments.time or arguments.dsync:
        raise InvalidRequest(
            _("--dsync, --partition and --time are for jobs."), _("Add --nodes N, or leave them out.")
        )
    return reporter.end(copy(arguments.source, arguments.destination, _options(arguments), notify=reporter))


def _sync(arguments: argparse.Namespace) -> int:
    reporter = Reporter(arguments.json, arguments.quiet, dry=arguments.dry_run)
    result = sync(
        arguments.source,
        arguments.destination,
        _options(arguments),
        dry_run=arguments.dry_run,
        notify=reporter,
    )
    return reporter.end(result)


class Reporter:
    """Prints what happens: a line that is rewritten on a terminal, JSON events for programs.

    Args:
        events: Print JSON.
        quiet: No progress.
        dry: Nothing is really done.
        verb: What was done with the files that are counted.
    """

    def __init__(self, events: bool, quiet: bool, *, dry: bool = False, verb: str = "copied") -> None:
        self.events, self.quiet, self.dry, self.verb = events, quiet, dry, verb
        self.terminal = not events and not quiet and sys.stderr.isatty()
        self.rates = Rates()
        self.drawn = False

    def __call__(self, what: Problem | Progress | tuple[str, str]) -> None:
        """Report one thing."""
        if isinstance(what, Problem):
            self._event("problem", path=what.path, reason=what.reason)
            if not self.events:
                self._wipe()
                print(f"carme: {shown(what.path)}: {what.reason}", file=sys.stderr)
        elif isinstance(what, tuple):
            self._event("action", action=what[0], path=what[1])
            if not self.events and not self.quiet:
                print(f"would {what[0]} {shown(what[1])}")
        elif self.events and not self.quiet:
            self._event("progress", **vars(what.counts), seconds=round(what.seconds, 2), **self.rates(what))
        elif self.terminal:
            self._draw(what)

    def _event(self, event: str, **values: Any) -> None:
        if self.events:
            # Bytes that are not UTF-8 become \\udcXX, which Python's json gives back as they were.
            import json

            print(json.dumps({"event": event, **values}), flush=True)

    def _draw(self, progress: Progress) -> None:
        text = progress_text(progress, self.rates(progress))
        if total := progress.total_bytes:
            done = progress.counts.bytes_copied + progress.counts.bytes_unchanged
            filled = min(20, 20 * done // total)
            text = f"[{'#' * filled}{'.' * (20 - filled)}] {text}"
        import shutil

        text = text[: max(20, shutil.get_terminal_size().columns - 1)]
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        self.drawn = True

    def _wipe(self) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.drawn = False

    def end(self, result: Result) -> int:
        """Report the result; the exit code."""
        counts = result.counts
        if self.events:
            self._event(
                "end",
                ok=result.ok,
                **vars(counts),
                seconds=round(result.seconds, 2),
                warnings=result.warnings,
                resumed=result.resumed,
                workers=result.workers,
                hash=result.hash,
                engine=result.engine,
                hosts=result.hosts,
            )
            return 0 if result.ok else 1
        self._wipe()
        for warning in result.warnings:
            print(f"carme: note: {warning}", file=sys.stderr)
        print(self.summary(counts, result))
        if counts.problems:
            what = number(counts.problems, "entry was", "entries were")
            print(f"carme: {what} not {self.verb}; the reasons are above.", file=sys.stderr)
        return 0 if result.ok else 1

    def summary(self, counts: Counts, result: Result) -> str:
        """One line."""
        if self.verb == "compared":
            same = f"{number(counts.unchanged, 'file is', 'files are')} the same"
            different = f"{number(counts.different, 'entry differs', 'entries differ')}"
            return f"{same} ({size(counts.bytes_unchanged)}), {different}, in {duration(result.seconds)}."
        would = "Would have " if self.dry else ""
        parts = [f"{self.verb} {number(counts.copied, 'file')} ({size(counts.bytes_copied)})"]
        if counts.updated:
            parts.append(f"updated {counts.updated}")
        if counts.removed:
            parts.append(f"removed {counts.removed}")
        parts.append(f"{counts.unchanged} unchanged")
        rate = f", {size(counts.bytes_copied / result.seconds)}/s" if result.seconds and not self.dry else ""
        line = would + ", ".join(parts)
        if result.hosts:
            line += f", by {number(len(result.hosts), 'host')}"
        resumed = " It went on from an interrupted run." if result.resumed else ""
        return f"{line[0].upper()}{line[1:]}, in {duration(result.seconds)}{rate}.{resumed}"
