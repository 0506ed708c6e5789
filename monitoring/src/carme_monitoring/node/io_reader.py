"""`carme-io-reader`: writes down what the jobs of this node read and write, for `carme-node-exporter`.

It needs CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, which the exporter is not to have: that one answers to the
network, this one to nobody.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from carme_monitoring.jobs import Cgroups, ProcessIo
from carme_monitoring.node.options import add_cgroups

__all__ = ["main"]

_log = logging.getLogger("carme.monitoring")


def main(arguments: list[str] | None = None) -> int:
    """Look until ended by a signal; the exit code."""
    parser = argparse.ArgumentParser(
        prog="carme-io-reader",
        description="Write down what this node's Slurm jobs read and write, where control groups "
        "do not count it.",
    )
    parser.add_argument("file", type=Path, help="to write it to; its folder must be there")
    parser.add_argument(
        "--every", type=float, default=30.0, metavar="SECONDS",
        help="time between two reads (default: %(default)s)",
    )  # fmt: skip
    add_cgroups(parser)
    options = parser.parse_args(arguments)
    if options.every <= 0:
        parser.error("--every must be more than 0 seconds")
    logging.basicConfig(format="%(message)s")
    cgroups, moved = Cgroups(options.cgroups), ProcessIo(options.file)
    while True:
        try:
            moved.update(cgroups.processes_by_step())
        except OSError as error:
            _log.error(
                "%s cannot be written: %s. See that its folder is there and belongs to this account; "
                "the next try is in %g s.",
                options.file, error.strerror or error, options.every,
            )  # fmt: skip
        time.sleep(options.every)


if __name__ == "__main__":
    sys.exit(main())
