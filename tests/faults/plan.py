"""The faults: what is broken, for how long, and what may become of sessions meanwhile."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from carme.sessions import SessionState
from demo_site import DemoSite, wait_until
from patience import HANG

#: The phases in which faults hit sessions.
PHASES = ("queued", "starting", "running", "stopping")
#: The node that all sessions of a batch run on, and that the faults of nodes hit.
NODE = "n1"

#: Carme's own services, in the order in which they are started.
PARTS = ("broker", "proxy", "hub", "portal", "sync", "worker", "beat")

READY, QUEUED, ENDED = SessionState.READY, SessionState.QUEUED, SessionState.ENDED

SURVIVES = {"queued": {QUEUED}, "starting": {READY}, "running": {READY}, "stopping": {ENDED}}
#: The node's jobs are lost with it; one that had only just begun Slurm may put back into the queue.
NODE_LOST = {"queued": {QUEUED}, "starting": {ENDED, QUEUED}, "running": {ENDED}, "stopping": {ENDED}}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        begin, end: Break it; repair it.
        seconds: From the one to the other.
        outcome: For each phase the states in which a session may be afterwards.
        patience: Seconds after the fault's begin in which all views must agree again.
    """

    begin: Callable[[DemoSite], None]
    end: Callable[[DemoSite], None]
    seconds: float = 1
    outcome: dict[str, set[SessionState]] = field(default_factory=lambda: SURVIVES)
    patience: float = 60


def killed(*units: str, node: str = "head") -> Fault:
    """Services that get SIGKILL and are started a second later if they did not come back themselves."""

    def begin(site: DemoSite) -> None:
        site.run(node, "systemctl", "kill", "--signal=KILL", "--kill-whom=main", *units)

    def end(site: DemoSite) -> None:
        site.run(node, "systemctl", "start", *units)

    return Fault(begin, end)


def _podman(site: DemoSite, *arguments: str) -> None:
    site.podman.run(*arguments, timeout=HANG)


def frozen(seconds: float, outcome: dict[str, set[SessionState]]) -> Fault:
    """Pause the compute node."""
    return Fault(
        lambda site: _podman(site, "pause", site.podman.container(NODE)),
        lambda site: _podman(site, "unpause", site.podman.container(NODE)),
        seconds,
        outcome,
        seconds + 60,
    )


def kill(site: DemoSite, node: str) -> None:
    """Stop a host as if its power had failed."""
    _podman(site, "kill", site.podman.container(node))


def boot(site: DemoSite, node: str) -> None:
    """Start a host, and return when it runs."""
    _podman(site, "start", site.podman.container(node))

    def booted() -> bool:
        message = site.run(node, "systemctl", "is-system-running", check=False).stdout.strip()
        return message in ("running", "degraded")

    wait_until(f"{node} has booted", booted, timeout=HANG)


def _disconnect(site: DemoSite) -> None:
    _podman(site, "network", "disconnect", "--force", _network(site), site.podman.container(NODE))


def _connect(site: DemoSite) -> None:
    address = next(machine.address for machine in site.settings.machines() if machine.name == NODE)
    _podman(site, "network", "connect", "--ip", address, _network(site), site.podman.container(NODE))


def _network(site: DemoSite) -> str:
    """The demo's network, by its other node, which is always connected."""
    head = site.podman.container("head")
    return next(each.networks[0] for each in site.podman.containers() if each.name == head)


FAULTS: dict[str, Fault] = {
    "hub": killed("carme-hub"),
    "proxy": killed("carme-proxy"),
    "broker": killed("carme-broker"),
    # It saves its state some seconds late. It knows nothing of what had just begun, and the nodes end that;
    # what still waited is submitted again.
    "slurmctld": replace(killed("slurmctld"), outcome=SURVIVES | {"starting": {READY, ENDED}}),
    # A launch that died with slurmd Slurm misses only when the node registers for the second time.
    "slurmd": replace(killed("slurmd", node=NODE), outcome=SURVIVES | {"starting": {READY, ENDED}}),
    "portal": killed("carme-portal"),
    "portal-sync": killed("carme-sync"),
    "portal-worker": killed("carme-worker"),
    "redis": killed("redis-server"),
    # With the head goes slurmctld, and what it had not saved yet.
    "head-reboot": Fault(
        lambda site: kill(site, "head"),
        lambda site: boot(site, "head"),
        outcome=SURVIVES | {"starting": {READY, ENDED}},
        patience=120,
    ),
    "node-stalls": frozen(4, SURVIVES),
    "node-frozen": frozen(35, NODE_LOST),
    "node-killed": Fault(
        lambda site: kill(site, NODE), lambda site: boot(site, NODE), 35, NODE_LOST, patience=100
    ),
    "node-cut-off": Fault(_disconnect, _connect, 35, NODE_LOST, patience=100),
}


def heal(site: DemoSite) -> None:
    """Whatever was broken: all machines run and are connected, all services are up, both nodes take jobs."""
    network = _network(site)
    for machine in site.settings.machines():
        container = site.podman.container(machine.name)
        present = next(each for each in site.podman.containers() if each.name == container)
        if present.status == "paused":
            _podman(site, "unpause", container)
        elif not present.is_alive:
            boot(site, machine.name)
        if network not in present.networks:
            _connect(site)
    site.run("head", "systemctl", "reset-failed")
    site.run("head", "systemctl", "start", "redis-server", "slurmdbd", "slurmctld")
    site.run("head", "systemctl", "start", *(f"carme-{part}" for part in PARTS))
    for machine in site.settings.machines():
        if not machine.is_head:
            site.run(machine.name, "systemctl", "start", "slurmd")

    def idle() -> bool:
        states = site.run("head", "sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
        return bool(states) and all(state == "idle" for state in states)

    site.end_all_jobs()
    wait_until("both nodes are idle", idle, timeout=HANG)
    time.sleep(1)
