"""What runs and whether the demo can be used."""

import json
import re
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field

from .errors import DemoError
from .podman import Podman
from .settings import Places, Settings

SERVICES = (
    "carme-*.service",
    "slurm*.service",
    "munge.service",
    "nginx.service",
    "redis-server.service",
    "mariadb.service",
    "postgresql*.service",
    "prometheus*.service",
)
# Slurm's words for a node that takes jobs; a suffix such as * or ~ means that it does not answer or sleeps.
WORKING = ("idle", "mixed", "allocated", "completing", "reserved", "planned")


@dataclass(frozen=True)
class NodeStatus:
    name: str
    address: str
    running: bool
    slurm: str = ""


@dataclass(frozen=True)
class ServiceStatus:
    node: str
    name: str
    state: str


@dataclass(frozen=True)
class Status:
    """A demo at one moment. ``problems`` are sentences; none means that it can be used."""

    name: str
    url: str
    nodes: list[NodeStatus] = field(default_factory=list)
    services: list[ServiceStatus] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return not self.problems

    def as_json(self) -> str:
        return json.dumps({"ready": self.ready, **asdict(self)}, indent=2)

    def as_text(self) -> str:
        lines = [f"Demo {self.name}: {'ready' if self.ready else 'not ready'}, {self.url}", "", "Nodes"]
        for node in self.nodes:
            state = "running" if node.running else "stopped"
            slurm = f", Slurm: {node.slurm}" if node.slurm else ""
            lines.append(f"  {node.name:<6} {node.address:<14} {state}{slurm}")
        if self.services:
            lines += ["", "Services"]
            lines += [f"  {each.node:<6} {each.name:<32} {each.state}" for each in self.services]
        if self.problems:
            lines += ["", "Not in order"]
            lines += [f"  {problem}" for problem in self.problems]
        return "\n".join(lines)


def of_demo(podman: Podman, places: Places, settings: Settings, alive: set[str]) -> Status:
    """Look at a demo.

    Args:
        alive: names of the nodes that run.
    """
    problems = [f"Node {node.name} does not run." for node in settings.machines() if node.name not in alive]
    services: list[ServiceStatus] = []
    for node in settings.machines():
        if node.name in alive:
            services += _services(podman, node.name)
    problems += [
        f"{each.name} on {each.node} is {each.state}." for each in services if each.state != "active"
    ]
    states = _slurm(podman) if "head" in alive else {}
    nodes = [
        NodeStatus(node.name, node.address, node.name in alive, states.get(node.name, ""))
        for node in settings.machines()
    ]
    if not places.deployed.exists():
        problems.append("Carme is not installed completely.")
    elif "head" in alive:
        for node in nodes:
            if node.name != "head" and node.slurm not in WORKING:
                problems.append(f"Slurm calls node {node.name} {node.slurm or 'unknown'}.")
        trouble = portal(settings)
        problems += [trouble] if trouble else []
    return Status(places.name, settings.url, nodes, services, problems)


def wait(podman: Podman, places: Places, settings: Settings, alive: set[str], seconds: float) -> Status:
    """Look until the demo is ready, or time is over.

    A service that has failed, or that a killed stop of the demo has left stopped, is started once more.
    """
    deadline = time.monotonic() + seconds
    retried: set[tuple[str, str]] = set()
    while True:
        status = of_demo(podman, places, settings, alive)
        down = {(each.node, each.name) for each in status.services if each.state in ("failed", "inactive")}
        if status.ready or down & retried or time.monotonic() > deadline:
            return status
        for node in sorted({node for node, _ in down}):
            # In one call, so that systemd keeps their order.
            units = sorted(f"{name}.service" for its_node, name in down if its_node == node)
            podman.execute(node, "systemctl", "restart", *units, check=False, timeout=120)
        retried |= down
        time.sleep(0.5)


def _services(podman: Podman, node: str) -> list[ServiceStatus]:
    try:
        list_units = (
            "systemctl",
            "list-unit-files",
            "--type=service",
            "--state=enabled",
            "--plain",
            "--no-legend",
        )
        listed = podman.execute(node, *list_units, *SERVICES, check=False, timeout=30).stdout.decode(
            errors="replace"
        )
        names = [line.split()[0] for line in listed.splitlines() if line.strip()]
        if not names:
            return []
        requested = podman.execute(node, "systemctl", "is-active", *names, check=False, timeout=30)
        states = requested.stdout.decode(errors="replace").split()
    except DemoError:
        return [ServiceStatus(node, "systemd", "silent")]
    return [
        ServiceStatus(node, name.removesuffix(".service"), state)
        for name, state in zip(names, states, strict=False)
    ]


def _slurm(podman: Podman) -> dict[str, str]:
    try:
        message = podman.execute(
            "head", "sinfo", "--noheader", "--Node", "--format=%N|%T", check=False, timeout=30
        )
    except DemoError:
        return {}
    return dict(re.findall(r"^(\w+)\|(\S+)$", message.stdout.decode(errors="replace"), re.MULTILINE))


def portal(settings: Settings) -> str:
    """A sentence on what is wrong with the portal, or nothing."""
    # The demo's certificate is its own; whether browsers could trust it is not the question here.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(f"https://127.0.0.1:{settings.port}/", timeout=10):
            return ""
    except urllib.error.HTTPError as error:
        return "" if error.code < 500 else f"The portal answers with error {error.code}."
    except (OSError, ValueError) as error:
        return f"The portal does not answer: {getattr(error, 'reason', error)}."
