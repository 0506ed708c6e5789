"""Two nodes on one machine: network namespaces that a pair of virtual Ethernet devices joins.

It is the kernel's whole TCP path, as containers on two nodes have it; only the wire is missing. `tc tbf`
gives each direction a rate. Needs root, and iproute2.
"""

import os
import shutil
import subprocess
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

    addresses = (f"{_NETWORK}1", f"{_NETWORK}2")

    def __init__(self, gbit: float | None, folder: Path, congestion_control: str = "cubic") -> None:
        self.gbit, self.congestion_control = gbit, congestion_control
        self._name = f"carme-bench-{os.getpid()}"
        self.agent = folder / "agent"
        self.agent.write_text(_AGENT.format(name=self._name))
        self.agent.chmod(0o700)

    def __enter__(self) -> "TwoNodes":
        nodes = [f"{self._name}-{number}" for number in (1, 2)]
        try:
            for node in nodes:
                _ip("netns", "add", node)
                _ip("-n", node, "link", "set", "lo", "up")
            _ip(
                *("link", "add", DEVICE, "netns", nodes[0], "type", "veth"),
                *("peer", "name", DEVICE, "netns", nodes[1]),
            )
            for number, (node, address) in enumerate(zip(nodes, self.addresses, strict=True)):
                _ip("-n", node, "address", "add", f"{address}/24", "dev", DEVICE)
                _ip("-n", node, "link", "set", DEVICE, "up")
                self._receive_on(node, number % (os.cpu_count() or 1))
                way = [f"{_NETWORK}0/24", "dev", DEVICE, "src", address]
                _ip("-n", node, "route", "change", *way, "congctl", self.congestion_control)
                if self.gbit:
                    burst = max(_LEAST_BURST, round(self.gbit * 1e9 / 8 * _BURST_SECONDS))
                    shape = [
                        "tbf",
                        "rate",
                        f"{round(self.gbit * 1000)}mbit",
                        "burst",
                        f"{burst}b",
                        "limit",
                        _QUEUE,
                    ]
                    _run("tc", "-n", node, "qdisc", "add", "dev", DEVICE, "root", *shape)
        except BaseException:
            self._take_away()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_away()

    def on(self, node: int) -> list[str]:
        """What a command on node 0 or 1 begins with."""
        named = ["sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh", f"node{node + 1}"]
        return ["ip", "netns", "exec", f"{self._name}-{node + 1}", "unshare", "--uts", *named]

    def wire_us(self, size: int) -> float | None:
        """Microseconds of `size` bytes on the wire, without any header; None where nothing is shaped."""
        return size * 8 / (self.gbit * 1000) if self.gbit else None

    def _receive_on(self, node: str, core: int) -> None:
        """Let one core take in what comes to a node, as a network card lets one core take each connection's.

        Else each packet is taken in by the core that sent it: they overtake one another, TCP takes that for
        losses and sends hundreds of them again, which no real wire makes it do.
        """
        file = f"/sys/class/net/{DEVICE}/queues/rx-0/rps_cpus"
        command = ["sh", "-c", 'printf %s "$1" > "$2"', "sh", f"{1 << core:x}", file]
        _run("ip", "netns", "exec", node, *command)

    def _take_away(self) -> None:
        for number in (1, 2):
            subprocess.run(["ip", "netns", "delete", f"{self._name}-{number}"], stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
