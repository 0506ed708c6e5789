"""Runs on the head: for each line of standard input it reads a user's sessions in all views but the portal.

A line of JSON comes back: `slurm` (state of each session's job in the queue), `broker` (its state and
sentence), `hub` (what is pending, or `ready`); a view that cannot be had is null.

Arguments: the user, the hub's address.
"""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carme.broker import BrokerClient

PREFIX = "session-"


def slurm(user: str) -> dict[str, str]:
    """What the queue holds: the state of each session's job, by the session's name."""
    command = ["squeue", "--noheader", f"--user={user}", "--states=PD,R,CF,CG,S,ST", "--format=%T %j"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    jobs = [line.split(maxsplit=1) for line in output.splitlines()]
    return {name.removeprefix(PREFIX): state for state, name in jobs if name.startswith(PREFIX)}


def broker(user: str) -> dict[str, list[str]]:
    """State and sentence of each session."""
    found = BrokerClient().sessions(user=user, active=False)
    return {session.name: [session.state, session.sentence] for session in reversed(found)}


def hub(user: str, address: str, token: str) -> dict[str, str]:
    """`spawn`, `stop`, `check` or `ready` of each server that is not stopped."""
    request = urllib.request.Request(f"{address}/users/{user}", headers={"Authorization": f"token {token}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        servers = json.load(reply)["servers"]
    return {
        name: server["pending"] or ("ready" if server["ready"] else "none")
        for name, server in servers.items()
    }


def sample(*views: Callable[[], Any]) -> list[Any]:
    """All views; None for those that cannot be had just now."""
    found = []
    for view in views:
        try:
            found.append(view())
        except Exception:  # any failure of a view is a subject of these tests
            found.append(None)
    return found


def main(user: str, address: str) -> None:
    """Serve until standard input ends."""
    token = Path("/etc/carme/secrets/hub-api-token").read_text().strip()
    for _ in sys.stdin:
        views = sample(lambda: slurm(user), lambda: broker(user), lambda: hub(user, address, token))
        print(json.dumps(dict(zip(("slurm", "broker", "hub"), views, strict=True))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
