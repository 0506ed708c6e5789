"""`carme data copy --nodes`: jobs that share the work, and what they have done so far."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carme.broker import BrokerClient
from carme.config import load
from carme.errors import CarmeError, InvalidRequest
from carme.jobs import JobRequest, parse_minutes
from carme.staging import Options, Progress, Result
from carme.staging.options import shown
from carme.staging.spread import Spread
from carme.translation import message as _

__all__ = ["copy_by_nodes"]

#: Seconds between two checks of the workers.
POLL_SECONDS = 1.0
#: The nodes have the same installation as this host.
PROGRAM = "import sys; from carme.cli import main; sys.exit(main())"


def copy_by_nodes(arguments: argparse.Namespace, options: Options, notify: Callable[[Any], None]) -> Result:
    """Copy with an array of jobs; who runs the same command again follows the jobs that there are.

    Args:
        arguments: The command's.
        options: How to copy.
        notify: Called with problems and progress.

    Raises:
        CarmeError: It cannot be begun, or the jobs copied nothing.
    """
    if not 1 <= arguments.nodes <= 1000:
        raise InvalidRequest(
            _("The number of nodes must be 1 to 1000, not {nodes}.", nodes=arguments.nodes), field="nodes"
        )
    minutes = parse_minutes(arguments.time) if arguments.time else load().sessions.default_minutes
    client = BrokerClient()
    spread = Spread(arguments.source, arguments.destination, options)
    job = spread.job
    if job is None or not _active(client, job):
        units = spread.plan(arguments.nodes, dsync=arguments.dsync)
        workers = max(1, min(arguments.nodes, units))
        # Each worker is a job of its own; dsync's are one job, as they talk to each other.
        size = {"nodes": arguments.nodes} if arguments.dsync else {"array": f"0-{workers - 1}"}
        request = JobRequest.read(
            {
                "name": "copy",
                "kind": "batch",
                "command": [sys.executable, "-I", "-c", PROGRAM, "data", "work", str(spread.folder)],
                "partition": arguments.partition,
                "cpus_per_node": _more_than_half(client, arguments.partition),
                "minutes": minutes,
                "workdir": str(Path.home()),
                **size,
            }
        )
        job = client.submit(request)
        spread.submitted(job)
        if not arguments.json and not arguments.quiet:
            print(f"Job {job} copies. Should you end this command, run it again.")
    start = time.monotonic()
    try:
        while _active(client, job):
            notify(Progress(spread.progress()[0], time.monotonic() - start))
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        print(
            f"carme: the jobs go on. To finish, run the same command again; to end them: carme cancel {job}",
            file=sys.stderr,
        )
        raise
    counts, hosts = spread.progress()
    if not hosts:
        raise _without_hosts(job, arguments.destination, spread.dsync)
    notify(Progress(counts, time.monotonic() - start))
    result = spread.finish(notify)
    result.seconds = time.monotonic() - start
    return result


def _without_hosts(job: int, destination: str, dsync: bool) -> CarmeError:
    return CarmeError(
        _("Job {job} ended before it could copy to {destination}.", job=job, destination=shown(destination)),
        _(
            "See why: carme logs {job}{task}. All nodes must have both folders.",
            job=job,
            task="" if dsync else "_0",
        ),
    )


def _active(client: BrokerClient, array: int) -> bool:
    return any(array in (job.id, job.array_id) for job in client.jobs())


def _more_than_half(client: BrokerClient, partition: str | None) -> int | None:
    """So many processors that no two workers come to one node."""
    cluster = client.cluster()
    names = {
        name
        for each in cluster.partitions
        if (each.name == partition if partition else each.default)
        for name in each.node_names
    }
    cpus = [node.cpus for node in cluster.nodes if node.name in names]
    return max(cpus) // 2 + 1 if cpus else None
