"""`carme-node-exporter`: serves the metrics of this node over HTTP."""

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from carme_monitoring.gpus import GpuWatch, NvidiaLibrary
from carme_monitoring.jobs import Allocations, Cgroups
from carme_monitoring.node.collector import NodeCollector
from carme_monitoring.serving import MetricsServer, ServingFailed

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Serve until ended by a signal; the exit code."""
    parser = argparse.ArgumentParser(
        prog="carme-node-exporter",
        description="Serve the metrics of this node's GPUs and Slurm jobs to Prometheus.",
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:9750", metavar="ADDRESS:PORT", help="default: %(default)s"
    )
    parser.add_argument(
        "--certificates", type=Path, metavar="FOLDER",
        help="tls.pem and ca.crt: serve by TLS to those alone whose certificate is of the same authority; "
        "without it only loopback can be listened on",
    )  # fmt: skip
    parser.add_argument(
        "--allocations", type=Path, default=Path("/run/carme/allocations"), metavar="FOLDER",
        help="where Slurm's prolog writes what it gave to whom (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-limit", type=float, default=5.0, metavar="SECONDS",
        help="time after which a GPU library counts as hanging (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-retry", type=float, default=60.0, metavar="SECONDS",
        help="time between two looks for a GPU that was lost (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    registry = CollectorRegistry()
    registry.register(
        NodeCollector(
            GpuWatch([NvidiaLibrary(retry=options.gpu_retry)], options.gpu_limit),
            Cgroups(),
            Allocations(options.allocations),
        )
    )
    try:
        server = MetricsServer(options.listen, registry, options.certificates)
    except ServingFailed as error:
        print(f"carme-node-exporter: {error}", file=sys.stderr)
        return 1
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    scheme = "https" if options.certificates else "http"
    print(f"Serving metrics at {scheme}://{options.listen}/metrics", flush=True)
    ended.wait()
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
