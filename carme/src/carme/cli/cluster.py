"""`carme status`: what the cluster has and what is free; `carme accounts`: what of it pays for my jobs."""

import argparse

from carme.broker import BrokerClient
from carme.cli import portal
from carme.cli.output import age, listed, print_json, print_table
from carme.command_line import add_json
from carme.errors import CarmeError
from carme.jobs import Association, Cluster, minutes_text, usable


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands."""
    parser = commands.add_parser("status", help="show partitions and nodes, and what is free")
    add_json(parser)
    parser.set_defaults(run=_status)
    accounts = commands.add_parser(
        "accounts",
        help="list the Slurm accounts that your jobs may use, in which partitions and with which QOS",
    )
    add_json(accounts)
    accounts.set_defaults(run=_accounts)


def _status(options: argparse.Namespace) -> int:
    if portal.is_remote():
        with portal.client() as site:
            cluster: Cluster = site.cluster()
    else:
        cluster = _without_hidden(BrokerClient())
    if options.json:
        print_json(cluster)
        return 0
    _print(cluster)
    return 0


def _without_hidden(broker: BrokerClient) -> Cluster:
    """The cluster, with only those hidden partitions that take the caller's jobs."""
    cluster = broker.cluster()
    if not any(partition.hidden for partition in cluster.partitions):
        return cluster
    try:
        own = {partition.name for partition in usable(cluster, broker.access()).partitions}
    except CarmeError:
        own = set[str]()  # a service or root, who have no jobs
    shown = [partition for partition in cluster.partitions if not partition.hidden or partition.name in own]
    return cluster.model_copy(update={"partitions": shown})


def _accounts(options: argparse.Namespace) -> int:
    if portal.is_remote():
        with portal.client() as site:
            found = site.profile().associations
    else:
        found = BrokerClient().access().associations

    def row(association: Association) -> list[object]:
        qos = [name + ("*" if name == association.default_qos else "") for name in association.qos]
        state = "no new jobs" if association.stopped else ""
        return [
            association.account + ("*" if association.default else ""),
            association.partition or "all",
            ", ".join(qos),
            state,
        ]

    return listed(
        options,
        found,
        ["ACCOUNT", "PARTITION", "QOS", "STATE"],
        row,
        "Slurm's database names no account of yours. Need one? Ask your administrators.",
    )


def _state(state: str) -> str:
    """A node's state, which Slurm may give several words for: `MIXED+PLANNED`, `DOWN*` (sinfo(1))."""
    words = [part.rstrip("*~#!%$@^-").replace("_", " ").lower() for part in state.split("+")]
    return ", ".join(words + ["not responding"] * ("*" in state and "not responding" not in words))


def _print(cluster: Cluster) -> None:
    print_table(
        ["PARTITION", "STATE", "NODES", "LONGEST JOB"],
        [
            [
                partition.name + ("*" if partition.default else ""),
                partition.state.lower() + (" (hidden)" if partition.hidden else ""),
                len(partition.node_names),
                "no limit" if partition.max_minutes is None else minutes_text(partition.max_minutes),
            ]
            for partition in cluster.partitions
        ],
    )
    print()
    print_table(
        ["NODE", "STATE", "CPUS FREE", "MEMORY FREE", "GPUS FREE", "REASON"],
        [
            [
                node.name,
                _state(node.state),
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
