"""`carme status`: what the cluster has and what is free."""

import argparse

from carme.broker import BrokerClient
from carme.cli import portal
from carme.cli.output import add_json, age, print_json, print_table
from carme.jobs import Cluster, minutes_text


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("status", help="show partitions and nodes, and what is free")
    add_json(parser)
    parser.set_defaults(run=_status)


def _status(options: argparse.Namespace) -> int:
    if portal.is_remote():
        with portal.client() as site:
            cluster: Cluster = site.cluster()
    else:
        cluster = BrokerClient().cluster()
    if options.json:
        print_json(cluster)
        return 0
    _print(cluster)
    return 0


def _print(cluster: Cluster) -> None:
    print_table(
        ["PARTITION", "STATE", "NODES", "LONGEST JOB"],
        [
            [
                partition.name + ("*" if partition.default else ""),
                partition.state.lower(),
                len(partition.node_names),
                "no limit" if partition.max_minutes is None else minutes_text(partition.max_minutes),
            ]
            for partition in cluster.partitions
            if not partition.hidden
        ],
    )
    print()
    print_table(
        ["NODE", "STATE", "CPUS FREE", "MEMORY FREE", "GPUS FREE", "REASON"],
        [
            [
                node.name,
                node.state.lower(),
                f"{node.cpus - node.cpus_used} of {node.cpus}",
                f"{(node.memory_mb - node.memory_used_mb) / 1024:.1f} of {node.memory_mb / 1024:.1f} GiB",
                ", ".join(
                    f"{count - node.gpus_used.get(kind, 0)} of {count} {kind}"
                    for kind, count in node.gpus.items()
                )
                or "-",
                node.reason,
            ]
            for node in cluster.nodes
        ],
    )
    print(f"\nSeen {age(cluster.taken)} ago. Start something with: carme submit --gpus 1 -- COMMAND")
