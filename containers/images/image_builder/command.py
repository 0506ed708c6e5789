"""The command line of the build."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from .builder import TENSORFLOW, TORCH, Builder
from .definitions import SUITE, definitions, image_names, in_order
from .errors import BuildError

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="build", description="Build the job containers.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="an image, which is a NAME.def in this folder"
    )
    parser.add_argument("--all", action="store_true", help="all images")
    parser.add_argument("--output", type=Path, required=True, help="the folder that the platform reads")
    parser.add_argument(
        "--cache", type=Path, default=Path("/var/cache/carme/images"), help="default: %(default)s"
    )
    parser.add_argument(
        "--torch", choices=sorted(TORCH), default="cpu", help="kind of PyTorch (default: cpu)"
    )
    parser.add_argument(
        "--torch-index",
        default=TORCH_INDEX,
        metavar="URL",
        help="where to look for PyTorch if pip's configured places do not have it (default: %(default)s)",
    )
    parser.add_argument(
        "--tensorflow", choices=sorted(TENSORFLOW), default="cpu", help="kind of TensorFlow (default: cpu)"
    )
    parser.add_argument(
        "--horovod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether the images of PyTorch and TensorFlow have Horovod, which takes minutes to compile once "
        "(default: yes)",
    )
    parser.add_argument(
        "--mirror",
        action="append",
        default=[],
        metavar="SOURCE",
        help=f"address of a Debian mirror, or a whole 'deb ...' line for {SUITE}; may be repeated; "
        "default: the host's own mirror if it runs Debian",
    )
    parser.add_argument("--fresh", action="store_true", help="build anew, with the packages of today")
    parser.add_argument(
        "--check", action="store_true", help="build nothing; exit code 1 if something is out of date"
    )
    parser.add_argument("--json", action="store_true", help="print the result for programs")
    options = parser.parse_args(arguments)
    if bool(options.names) == options.all:
        parser.error("say which images to build: either names or --all")
    options.output, options.cache = options.output.absolute(), options.cache.absolute()
    return options


def main(arguments: list[str] | None = None) -> int:
    """Build what the arguments name; return the exit code."""
    options = parse(arguments)
    try:
        known = definitions()
        wanted = in_order(image_names(known) if options.all else options.names, known)
        builder = Builder(options)
        if options.check:
            state = {definition.name: builder.is_current(definition) for definition in wanted}
            if options.json:
                print(json.dumps(state))
            else:
                for name, current in state.items():
                    print(f"{name}: {'up to date' if current else 'has to be built'}")
            return 0 if all(state.values()) else 1
        if os.geteuid() != 0:
            raise BuildError("Images are built by root. Run the build with sudo, or as root in a container.")
        with (builder.cache.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in builder.cache.folder.glob("carme-image-*"):
                # A build that was killed; the lock says that none is running.
                shutil.rmtree(left)
            results = [builder.build(definition) for definition in wanted]
    except (BuildError, OSError) as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
    return 0
