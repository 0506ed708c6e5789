"""One step on paper: buckets of gradients travel while backpropagation still runs."""

from dataclasses import dataclass, replace
from statistics import NormalDist

from carme_runtime.graph import Links
from carme_runtime.scaling.network import MIB, Machine, allreduce_ms
from carme_runtime.scaling.profiles import MOST_FILLED, Profile

_LANES = 2  # buckets that travel between nodes at once, as in carme_runtime.torch.parallel
_MOST_SPREAD = 0.3
_SHARE = 0.5  # of a core that reducing gets beside computing, if it needs as much: two threads share it


@dataclass(frozen=True)
class Change:
    """What is otherwise than measured, to see what it would bring.

    Args:
        compute: Factor of all computing.
        links: Factor of the time of every message; 0: they cost nothing.
        input: Factor of the input's time; 0: it costs nothing.
        full_matrices: A sample costs in each batch what it does in the largest measured one.
        fixed: Factor of what a step takes whatever its batch.
    """

    compute: float = 1.0
    links: float = 1.0
    input: float = 1.0
    full_matrices: bool = False
    fixed: float = 1.0


AS_MEASURED = Change()


@dataclass(frozen=True)
class Step:
    """A step of all ranks, in milliseconds.

    Args:
        ms: The whole of it.
        compute: Forward and backward pass of the slowest rank.
        communication: What is left of reducing when the backward pass is over.
        input: For which the ranks wait for data.
        fixed: What takes its time whatever the batch.
    """

    ms: float
    compute: float
    communication: float
    input: float
    fixed: float


def simulate(
    profile: Profile, ranks: int, batch: float, machine: Machine, change: Change = AS_MEASURED
) -> Step:
    """A step of `ranks`, each with `batch` samples."""
    forward, backward = profile.forward_ms(batch), profile.backward_ms(batch)
    if change.full_matrices:
        most = profile.timings[-1].samples
        forward = min(forward, profile.forward_ms(most) * batch / most)
        backward = min(backward, profile.backward_ms(most) * batch / most)
    slower = change.compute * (1 + straggling(profile.spread, ranks))
    forward, backward = forward * slower, backward * slower
    exposed = 0.0
    if ranks > 1 and change.links > 0:
        exposed = _exposed(profile, ranks, batch, _slowed(machine, change.links), backward)
    compute, fixed = forward + backward, profile.fixed_ms * change.fixed
    busy = compute + exposed + fixed
    waiting = _input_wait(profile, batch, busy) if change.input else 0.0
    return Step(busy + waiting * change.input, compute, exposed, waiting * change.input, fixed)


def straggling(spread: float, ranks: int) -> float:
    """By how much the slowest of the ranks is slower than the middle one, in parts of a step."""
    if ranks < 2:
        return 0.0
    # Blom's approximation of the largest of `ranks` normal variables.
    return min(spread, _MOST_SPREAD) * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _input_wait(profile: Profile, batch: float, busy: float) -> float:
    """For how long a rank waits for its batch; workers load it while the last one is computed."""
    rate = profile.input.samples_per_s
    if not rate:
        return 0.0
    loading = batch / rate * 1000
    return max(loading - busy, 0.0) if profile.input.workers else loading


def _slowed(machine: Machine, factor: float) -> Machine:
    if factor == 1:
        return machine

    def slower(links: Links) -> Links:
        return replace(links, times=tuple((size, time * factor) for size, time in links.times))

    return replace(
        machine,
        links=slower(machine.links),
        near=slower(machine.near),
        host_ms_per_mib=machine.host_ms_per_mib * factor,
        gathering_ms_per_mib=machine.gathering_ms_per_mib * factor,
    )


def _exposed(profile: Profile, ranks: int, batch: float, machine: Machine, backward: float) -> float:
    """How long reducing goes on after the backward pass."""
    each = machine.ranks_per_node
    near = ranks <= each
    free, ends, last = 0.0, [], 0.0
    host, costs = 0.0, dict[tuple[int, float], tuple[float, float]]()  # many buckets are of one size
    # A node sends the sum over its ranks, and sums to which all other nodes added theirs.
    summed = max(ranks - each, each)
    filled = [1.0] * len(buckets(profile, batch, near)) if near else _filled(profile, batch, summed)
    for (size, ready), part in zip(buckets(profile, batch, near), filled, strict=True):
        if (size, part) not in costs:
            costs[size, part] = allreduce_ms(machine, ranks, size, part)
        took, latency = costs[size, part]
        # Ranks that share a node add up zeros, too.
        worked = size * part if each == 1 else size
        work = machine.host_ms_per_mib * worked * machine.wire / MIB
        host += machine.gathering_ms_per_mib * size / MIB
        begin = max(backward * ready + host, free)
        if len(ends) >= _LANES:
            begin = max(begin, ends[-_LANES])
        # Ranks of one node reduce in a thread that computes, those of several in one beside it.
        beside = took if near else max(took, work / _SHARE)
        ends.append(_end(begin, took, beside, backward + host + work))
        # The next one's first byte need not wait for this one's last answer.
        free = ends[-1] - latency
        last = max(last, ends[-1])
        host += work
    return max(last - backward, host, 0.0)


def _end(begin: float, took: float, beside: float, until: float) -> float:
    """When a bucket is reduced that takes `beside` while the rank computes, `until` then and `took` after."""
    slow = min(max(until - begin, 0.0), beside)
    return begin + slow + (took * (1 - slow / beside) if beside else 0.0)


def _filled(profile: Profile, batch: float, summed: int) -> list[float]:
    """The part of each bucket between nodes that travels: zeros in the sum of `summed` ranks do not."""

    def part(number: int) -> float:
        # What other ranks have is taken to be elsewhere, so that sums over many of them are full.
        union = 1 - (1 - profile.filled(profile.gradients[number], batch)) ** summed
        return union if union <= MOST_FILLED else 1.0

    known = profile.filled_buckets
    if (batch, summed) not in known:
        known[batch, summed] = [
            sum(profile.gradients[number].bytes * part(number) for number in numbers) / max(size, 1)
            for size, numbers in profile.far_buckets
        ]
    return known[batch, summed]


def buckets(profile: Profile, batch: float, near: bool) -> list[tuple[int, float]]:
    """Bytes of each bucket and the share of the backward pass after which it is full, in their order."""
    known = profile.full_buckets  # the same for all networks and draws
    if (batch, near) not in known:
        known[batch, near] = [
            (size, max(profile.ready(profile.gradients[number], batch) for number in numbers))
            for size, numbers in (profile.near_buckets if near else profile.far_buckets)
        ]
    return known[batch, near]
