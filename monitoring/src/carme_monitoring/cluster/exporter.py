"""`carme-cluster-exporter`: serves the metrics of the whole site over HTTP."""

import argparse
import sys

from prometheus_client import disable_created_metrics

from carme.broker import BrokerClient
from carme.command_line import add_config
from carme.config import load
from carme.errors import CarmeError
from carme_monitoring.cluster.collector import ClusterCollector
from carme_monitoring.cluster.health import Health, addresses
from carme_monitoring.serving import add_options, serve

__all__ = ["main"]

PATIENCE = 5.0  # seconds for the broker; what is slower has no place in a scrape


def main(arguments: list[str] | None = None) -> int:
    """Serve until ended by a signal; the exit code."""
    parser = argparse.ArgumentParser(
        prog="carme-cluster-exporter",
        description="Serve the metrics of the whole site to Prometheus: queues, nodes, users, services.",
    )
    add_options(parser, "127.0.0.1:9751")
    add_config(parser)
    options = parser.parse_args(arguments)
    try:
        settings = load(options.config)
    except CarmeError as error:
        print(f"carme-cluster-exporter: {error}", file=sys.stderr)
        return 1
    disable_created_metrics()  # they double the counters' series and say nothing new
    client = BrokerClient(settings.broker.socket, timeout=PATIENCE)
    health = Health(addresses(settings))
    return serve(parser.prog, options, ClusterCollector(client.overview, health.check))


if __name__ == "__main__":
    sys.exit(main())
