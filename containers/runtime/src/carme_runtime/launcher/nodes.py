"""Waiting for the nodes of a job."""

import asyncio
import contextlib
import os

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric
from carme_runtime.launcher import slurm

JOIN_SECONDS = 60.0  # how long the nodes of a job may take to come up


async def wait_for_nodes(fabric: Fabric, nodes: int | None) -> None:
    """Wait for the nodes that the run needs: when a job has just begun, they may still come up."""
    members = fabric.members
    if nodes and nodes > members.expected:
        if not fabric.in_job and (found := slurm.obstacle(os.environ, nodes)):
            raise CarmeRuntimeError(f"--nodes {nodes} cannot be used here. {found.reason}.", found.remedy)
        if not fabric.in_job:
            raise CarmeRuntimeError(
                f"--nodes {nodes} was requested outside of a job, where there is this host alone.",
                "Start a job with so many nodes and use carme-run there, or leave --nodes out.",
            )
        raise too_few_nodes(nodes, members.expected)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_until_there(fabric, nodes), JOIN_SECONDS)
    members = fabric.members
    missing = (nodes or members.expected) - len(members.present)
    if missing > 0:
        present = ", ".join(member.host for member in members.present)
        lost = f"; lost: {', '.join(members.lost)}" if members.lost else ""
        raise CarmeRuntimeError(
            f"{missing} of the job's {members.expected} nodes cannot be reached (here: {present}{lost}).",
            f"Use --nodes {len(members.present)} to run on those that are here, or start a new job.",
        )


def too_few_nodes(requested: int, available: int) -> CarmeRuntimeError:
    """What to say where --nodes asks for more than the job has."""
    return CarmeRuntimeError(
        f"--nodes {requested} was requested, but the job has {available}.",
        f"Use --nodes {available} or less, or start a job with more nodes.",
    )


async def _until_there(fabric: Fabric, nodes: int | None) -> None:
    while len(fabric.members.present) < (nodes or fabric.members.expected - len(fabric.members.lost)):
        if len(fabric.members.present) + len(fabric.members.lost) >= fabric.members.expected:
            return
        if (await fabric.next_event()).gone:
            raise CarmeRuntimeError("The job's agent on this node was lost.", "Start a new job.")
