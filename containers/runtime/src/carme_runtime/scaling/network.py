"""What an allreduce costs: over links between nodes, and within a node."""

import re
from dataclasses import dataclass, field

from carme_runtime.graph import Links
from carme_runtime.scaling.errors import ScalingError

MIB = 1 << 20
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(bit|b|bps|B)(?:it)?(?:/s)?", re.IGNORECASE)
_DELAY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|μs|ms)")
_UNITS = {"": 1e-6, "K": 1e-3, "M": 1.0, "G": 1e3, "T": 1e6}  # Mbit/s
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3}
_USUAL_DELAY = 20.0  # microseconds of TCP over Ethernet

#: Copies within a node: what one core of a usual server does.
NEAR = Links(((0, 5.0), (MIB, 110.0)), "assumed: memory of 10 GB/s")


def parse_network(text: str) -> Links:
    """Links of a description such as "100 Gbit/s, 2 us". Raises ScalingError."""
    parts = [part.strip() for part in text.split(",")]
    rate, delay = _RATE.fullmatch(parts[0]), None
    if len(parts) == 2:
        delay = _DELAY.fullmatch(parts[1])
    if not rate or len(parts) > 2 or (len(parts) == 2 and not delay) or not float(rate[1]) > 0:
        raise ScalingError(
            f"The network '{text}' cannot be read.", 'Write its rate and its latency: "100 Gbit/s, 2 us".'
        )
    mbit = float(rate[1]) * _UNITS[rate[2].upper()] * (8 if rate[3] == "B" else 1)
    latency = float(delay[1]) * _MICROSECONDS[delay[2]] if delay else _USUAL_DELAY
    return Links(((0, latency), (MIB, latency + MIB * 8 / mbit)), f"given: {text.strip()}")


@dataclass(frozen=True)
class Machine:
    """Where the ranks are to run.

    Args:
        links: Between nodes.
        ranks_per_node: Ranks of each node, as a rule its GPUs.
        near: Copies within a node.
        wire: Bytes that travel for each byte of a gradient: 0.5 with bf16.
        host_ms_per_mib: What a MiB of gradients takes from the computing of its rank, where the host computes
            and has no core left over.
        gathering_ms_per_mib: What bringing a MiB of them into its bucket takes from it, of zeros too,
            whatever travels.
    """

    links: Links = field(default_factory=Links)
    ranks_per_node: int = 1
    near: Links = NEAR
    wire: float = 1.0
    host_ms_per_mib: float = 0.0
    gathering_ms_per_mib: float = 0.0


def best(links: Links, nodes: int, size: float) -> tuple[str, float]:
    """The way to reduce `size` bytes over nodes that ends first, and its milliseconds.

    As `link_model.hpp` of the core has it: everybody to everybody, around a ring, or by recursive halving and
    doubling. Links are taken to work both ways at once.
    """
    if nodes < 2:
        return "none", 0.0
    by_algorithm = _milliseconds_by_algorithm(links, nodes, size)
    name = min(by_algorithm, key=by_algorithm.__getitem__)  # the first of equal ones, as in the core
    return name, by_algorithm[name]


def _milliseconds_by_algorithm(links: Links, nodes: int, size: float) -> dict[str, float]:
    """The milliseconds of each way to reduce `size` bytes over two nodes or more."""
    cost = links.milliseconds
    power, part, halving = 1, size, 0.0
    while power * 2 <= nodes:
        power, part = power * 2, part / 2
        halving += 2 * cost(part)
    if power != nodes:
        halving += 2 * cost(size)
    by_algorithm = {"direct": cost((nodes - 1) * size), "ring": 2 * (nodes - 1) * cost(size / nodes)}
    return by_algorithm | {"halving": halving}


def allreduce_ms(machine: Machine, ranks: int, size: float, part: float = 1.0) -> tuple[float, float]:
    """How long an allreduce takes in milliseconds, and how much of that is latency.

    Ranks of a node reduce among themselves first, each its share, which it then reduces with its like of the
    other nodes. All shares of a node travel over the same link.

    Args:
        machine: Where the ranks are.
        ranks: On all nodes.
        size: Bytes that are reduced.
        part: How much of them travels between nodes, which send no zeros. Within a node, all is copied.
    """
    near = min(ranks, machine.ranks_per_node)
    nodes = -(-ranks // machine.ranks_per_node)
    whole = latency = 0.0
    if near > 1:
        # Each reads the shares of the others and is read by them.
        whole += machine.near.milliseconds(2 * size * (near - 1) / near)
        latency += machine.near.milliseconds(0)
    if nodes > 1:
        algorithm, _ = best(machine.links, nodes, size * machine.wire)  # chosen before zeros are looked for
        took = _milliseconds_by_algorithm(machine.links, nodes, size * machine.wire * part)[algorithm]
        rounds = {"direct": 1, "ring": 2 * (nodes - 1), "halving": 2 * (nodes - 1).bit_length()}[algorithm]
        whole += took
        latency += rounds * machine.links.milliseconds(0)
    return whole, min(latency, whole)
