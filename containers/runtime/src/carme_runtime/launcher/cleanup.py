"""`carme-run --cleanup`: ends what earlier runs of the same user have left behind on the nodes."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric
from carme_runtime.fabric.members import Member
from carme_runtime.ranks.orphans import MARK

SECONDS = 60.0  # that a node may take to answer
NOT_ALL_ENDED = 1


async def execute(
    fabric: Fabric,
    nodes: tuple[Member, ...],
    script: str,
    force: bool,
    dry_run: bool,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """End the orphaned processes on `nodes`, and say which there were; the exit code, 0 where none is left.

    Args:
        fabric: By which the nodes are queried.
        nodes: Where to look.
        script: Only those with a file of this name among their arguments; empty: all.
        force: Kill them, instead of asking them to end.
        dry_run: Only say which there are.
        environment: The caller's, whose own run is not over.

    Raises:
        CarmeRuntimeError: A node does not answer, or cannot do it.
    """
    number = None if dry_run else signal.SIGKILL if force else signal.SIGTERM
    request = {"type": "clean", "script": script, "spared": environment.get(MARK, ""), "signal": number}
    for member in nodes:
        fabric.send(member.number, request)
    try:
        reported = await asyncio.wait_for(_answers(fabric, nodes), SECONDS)
    except asyncio.TimeoutError:
        raise CarmeRuntimeError(
            f"Not all nodes reported within {SECONDS:.0f} s what is left there.", "Check that they run."
        ) from None
    remain = False
    for member in nodes:
        for each in reported[member.number]:
            name = f"{each['pid']} on {member.host} ({each['command']})"
            if dry_run:
                print(f"{name} was left behind.")
            elif each["ended"]:
                print(f"{name} was ended.")
            else:
                remain = True
                print(f"carme-run: {name} has not ended.{'' if force else ' Add --force.'}", file=sys.stderr)
    if not any(reported.values()):
        print(f"Nothing was left behind on {', '.join(member.host for member in nodes)}.")
    return NOT_ALL_ENDED if remain else 0


async def _answers(fabric: Fabric, nodes: tuple[Member, ...]) -> dict[int, list[dict[str, Any]]]:
    """By number of the node, what it reported."""
    hosts = {member.number: member.host for member in nodes}
    reported: dict[int, list[dict[str, Any]]] = {}
    while reported.keys() != hosts.keys():
        event = await fabric.next_event()
        present = {member.number for member in fabric.members.present}
        lost = [host for number, host in hosts.items() if number not in present and number not in reported]
        if event.gone or lost:
            named = lost[0] if lost else "this node"
            raise CarmeRuntimeError(f"The agent of {named} was lost.", "See whether the node is down.")
        if event.node is None:
            continue
        if event.content["type"] == "refused":
            raise CarmeRuntimeError(event.content["message"], event.content.get("remedy", ""))
        if event.content["type"] == "cleaned":
            reported[event.node] = event.content["processes"]
    return reported
