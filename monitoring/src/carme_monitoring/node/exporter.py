"""`carme-node-exporter`: serves the metrics of this node over HTTP."""

import argparse
import sys
from pathlib import Path

from carme_monitoring.gpus import AmdLibrary, GpuWatch, NvidiaLibrary
from carme_monitoring.jobs import Allocations, Cgroups, ProcessIoRecords, Training
from carme_monitoring.node.collector import NodeCollector
from carme_monitoring.node.options import add_cgroups
from carme_monitoring.serving import add_options, serve

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Serve until ended by a signal; the exit code."""
    parser = argparse.ArgumentParser(
        prog="carme-node-exporter",
        description="Serve the metrics of this node's GPUs and Slurm jobs to Prometheus.",
    )
    add_options(parser, "127.0.0.1:9750")
    parser.add_argument(
        "--allocations", type=Path, default=Path("/run/carme/allocations"), metavar="FOLDER",
        help="where Slurm's prolog writes what it gave to whom (default: %(default)s)",
    )  # fmt: skip
    add_cgroups(parser)
    parser.add_argument(
        "--gpu-limit", type=float, default=5.0, metavar="SECONDS",
        help="time after which a GPU library counts as hanging (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-retry", type=float, default=60.0, metavar="SECONDS",
        help="time between two searches for a GPU that was lost (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--io", type=Path, default=Path("/run/carme/io/jobs.json"), metavar="FILE",
        help="where carme-io-reader writes what jobs read and wrote (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--training", type=Path, metavar="SOCKET",
        help="socket to make, at which ranks of training runs report their progress (default: none)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    libraries = [NvidiaLibrary(retry=options.gpu_retry), AmdLibrary(retry=options.gpu_retry)]
    gpus = GpuWatch(libraries, options.gpu_limit)
    cgroups = Cgroups(options.cgroups)
    training = None
    if options.training:
        try:
            training = Training(options.training, cgroups.job_of)
        except OSError as error:
            reason = f"The socket {options.training} cannot be made: {error.strerror or error}."
            parser.error(f"{reason} Name one in a folder that this program may write to.")
        training.listen()
    moved = ProcessIoRecords(options.io)
    collector = NodeCollector(gpus, cgroups, Allocations(options.allocations), training, moved=moved)
    return serve(parser.prog, options, collector)


if __name__ == "__main__":
    sys.exit(main())
