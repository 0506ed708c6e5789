"""Nodes on one machine: network namespaces that virtual devices join, or the demo's nodes.

It is the kernel's whole TCP path, as containers on two nodes have it; only the wire is missing. `tc tbf`
gives each direction a rate. Needs root, and iproute2.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

DEVICE = "link0"
_NETWORK = "198.18.77."  # for benchmarks of networks (RFC 2544)
# Far below large messages, and at least a whole packet of the kernel's, which has up to 64 KiB. With less,
# timers and not the rate are in charge. What waits for the rate is kept, as in front of a network card.
_BURST_SECONDS, _LEAST_BURST, _QUEUE = 200e-6, 80_000, "16mb"

# Open MPI and MPICH start ranks on another host by a command like ssh: this is it. Options of ssh come first.
_AGENT = """#!/bin/sh
while true; do case "$1" in -*) shift ;; *) break ;; esac; done
host=$1; shift
exec ip netns exec "{name}-${{host##*.}}" unshare --uts sh -c 'hostname "$1"; shift; exec sh -c "$*"' sh \\
  "node${{host##*.}}" "$@"
"""


def can_be_made() -> bool:
    """Whether this machine lets this process make them."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "unshare"))


class TwoNodes:
    """Made on entering, taken away on leaving.

    Args:
        gbit: Rate of each direction in Gbit/s; None: as fast as it goes.
        folder: Where the agent is written that starts commands on a node.
        congestion_control: TCP's of all connections between them that choose none.
    """

    device = DEVICE
    network = f"{_NETWORK}0/24"
    addresses: tuple[str, ...] = (f"{_NETWORK}1", f"{_NETWORK}2")

    def __init__(self, gbit: float | None, folder: Path, congestion_control: str = "cubic") -> None:
        self.gbit, self.congestion_control = gbit, congestion_control
        self._name = f"carme-bench-{os.getpid()}"
        self.agent = folder / "agent"
        self.agent.write_text(_AGENT.format(name=self._name))
        self.agent.chmod(0o700)

    def __enter__(self) -> "TwoNodes":
        nodes = [self._node(number) for number in range(len(self.addresses))]
        try:
            self._make(nodes)
            for number, node in enumerate(nodes):
                self._receive_on(node, _core(number))
                self._route(node, number, "congctl", self.congestion_control)
                self._shape(node, self.device)
        except BaseException:
            self._take_away()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_away()

    def on(self, node: int) -> list[str]:
        """What a command on a node begins with; the first one is node 0."""
        named = ["sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh", f"node{self._number(node)}"]
        return ["ip", "netns", "exec", self._node(node), "unshare", "--uts", *named]

    def wire_us(self, size: int) -> float | None:
        """Microseconds of `size` bytes on the wire, without any header; None where nothing is shaped."""
        return size * 8 / (self.gbit * 1000) if self.gbit else None

    def _number(self, node: int) -> str:
        return self.addresses[node].rpartition(".")[2]

    def _node(self, node: int) -> str:
        return f"{self._name}-{self._number(node)}"

    def _make(self, nodes: list[str]) -> None:
        for node in nodes:
            _ip("netns", "add", node)
            _ip("-n", node, "link", "set", "lo", "up")
        pair = ["type", "veth", "peer", "name", self.device, "netns", nodes[1]]
        _ip("link", "add", self.device, "netns", nodes[0], *pair)
        for node, address in zip(nodes, self.addresses, strict=True):
            _ip("-n", node, "address", "add", f"{address}/24", "dev", self.device)
            _ip("-n", node, "link", "set", self.device, "up")

    def _route(self, node: str, number: int, *options: str) -> None:
        """Give the route to the other node these options."""
        route = [self.network, "dev", self.device, "proto", "kernel", "src", self.addresses[number]]
        _ip("-n", node, "route", "change", *route, *options)

    def _shape(self, node: str, device: str) -> None:
        """Give what a device sends its rate."""
        if self.gbit:
            burst = max(_LEAST_BURST, round(self.gbit * 1e9 / 8 * _BURST_SECONDS))
            rate = ["rate", f"{round(self.gbit * 1000)}mbit", "burst", f"{burst}b", "limit", _QUEUE]
            _run("tc", "-n", node, "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def _receive_on(self, node: str, core: int | None, device: str = "") -> None:
        """Let one core take in what comes to a node, as a network card lets one core take each connection's.

        Else each packet is taken in by the core that sent it: they overtake one another, TCP takes that for
        losses and sends hundreds of them again, which no real wire makes it do.
        """
        file = f"/sys/class/net/{device or self.device}/queues/rx-0/rps_cpus"
        command = ["sh", "-c", 'printf %s "$1" > "$2"', "sh", f"{0 if core is None else 1 << core:x}", file]
        _run("ip", "netns", "exec", node, *command)

    def _take_away(self) -> None:
        for number in range(len(self.addresses)):
            subprocess.run(["ip", "netns", "delete", self._node(number)], stderr=subprocess.DEVNULL)


class SwitchedNodes(TwoNodes):
    """Any number of nodes at a switch: a bridge in a network namespace of its own.

    The switch sends to each node at the rate, too, as several may send to one at the same time.

    Args:
        count: Nodes.
        gbit, folder, congestion_control: As of two nodes.
    """

    def __init__(
        self, count: int, gbit: float | None, folder: Path, congestion_control: str = "cubic"
    ) -> None:
        super().__init__(gbit, folder, congestion_control)
        self.addresses = tuple(f"{_NETWORK}{number}" for number in range(1, count + 1))
        self._switch = f"{self._name}-switch"

    def _make(self, nodes: list[str]) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, (node, address) in enumerate(zip(nodes, self.addresses, strict=True)):
            port = f"port{number}"
            _ip("netns", "add", node)
            _ip("-n", node, "link", "set", "lo", "up")
            pair = ["type", "veth", "peer", "name", port, "netns", self._switch]
            _ip("link", "add", self.device, "netns", node, *pair)
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", node, "address", "add", f"{address}/24", "dev", self.device)
            _ip("-n", node, "link", "set", self.device, "up")
            self._receive_on(self._switch, _core(number), port)
            self._shape(self._switch, port)

    def _take_away(self) -> None:
        super()._take_away()
        subprocess.run(["ip", "netns", "delete", self._switch], stderr=subprocess.DEVNULL)


class DemoNodes(TwoNodes):
    """The network of the demo's n1 and n2, which `./demo up` has made; they keep their own file systems.

    Both are joined by a bridge. While it lasts the demo's own traffic is shaped, too.
    """

    device = "eth0"

    def __init__(self, gbit: float | None, folder: Path, congestion_control: str = "cubic") -> None:
        self.network, self._pids, self.addresses = find_demo_nodes()
        super().__init__(gbit, folder, congestion_control)

    def _make(self, nodes: list[str]) -> None:
        for node, pid in zip(nodes, self._pids, strict=True):
            _ip("netns", "attach", node, str(pid))

    def _take_away(self) -> None:
        for number in (0, 1):
            node = self._node(number)
            shape = ["tc", "-n", node, "qdisc", "del", "dev", self.device, "root"]
            subprocess.run(shape, stderr=subprocess.DEVNULL)
            try:
                self._receive_on(node, None)
                self._route(node, number)
            except subprocess.CalledProcessError as error:
                print(f"{node} could not be set back: {error}", file=sys.stderr)
        super()._take_away()


def find_demo_nodes() -> tuple[str, tuple[int, int], tuple[str, str]]:
    """The demo's network, and the processes and addresses of its first two compute nodes.

    Raises SystemExit where they do not run.
    """
    if (folder := str(Path(__file__).resolve().parents[2] / "ansible/demo")) not in sys.path:
        sys.path.insert(0, folder)
    from carme_demo.errors import DemoError
    from carme_demo.podman import Podman, host_runtime
    from carme_demo.settings import DEFAULT_NAME, Places, load

    try:
        places = Places(os.environ.get("CARME_DEMO", DEFAULT_NAME))
        settings = load(places)
        containers = Podman(places, host_runtime()).containers() if settings else []
    except DemoError as error:
        raise SystemExit(str(error)) from None
    running = {each.name: each.pid for each in containers if each.is_alive}
    pids = [running.get(f"{places.name}-{name}") for name in ("n1", "n2")]
    if settings is None or pids[0] is None or pids[1] is None:
        raise SystemExit("The demo's nodes n1 and n2 do not run. Use: sudo ./demo up --no-run")
    addresses = {machine.name: machine.address for machine in settings.machines()}
    return settings.subnet, (pids[0], pids[1]), (addresses["n1"], addresses["n2"])


def _core(number: int) -> int:
    """Which core takes in what comes to a node."""
    return number % (os.cpu_count() or 1)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
