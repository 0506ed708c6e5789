"""Where to cut: dynamic programming over the order of operators, under each device's memory.

The slowest stage decides how fast a pipeline is, so that is made as fast as can be; then cuts move as long as
the step on paper becomes shorter.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from carme_runtime.graph import Graph
from carme_runtime.graph.show import size_text
from carme_runtime.pipeline.devices import Device, devices_of_stages
from carme_runtime.pipeline.pieces import cut_places, fewest_bytes, first_of
from carme_runtime.pipeline.plans import Plan
from carme_runtime.pipeline.schedules import KINDS, PlanError, Schedule, make
from carme_runtime.pipeline.simulation import held
from carme_runtime.pipeline.stages import Disk
from carme_runtime.strategies import AUTO, DATA, HYBRID, PIPELINE

_MOST_PLACES = 240
_FEW = 150
#: What a step takes, or exceeds the memory by, after a move that is worth it, as a part of that before.
_GAIN = 0.999
_TIGHTER = 0.93
_ENDLESS = float("inf")


@dataclass(frozen=True)
class Request:
    """What is requested; None: to be chosen.

    Args:
        ranks: How many there are.
        samples: Of each rank's batch.
        stages: Ranks of one pipeline.
        micro_batches: How many.
        schedule: Its name.
        memory: Bytes of each device, or of the one that has least.
        cut_points: Names of layers with which stages begin.
        state_factor: See `Plan`.
        batch_norm: See `Plan`.
        strategy: See `carme_runtime.strategies`.
        whole: Whether `samples` are those of all replicas together.
        may_recompute: Whether stages that do not fit can compute forward passes again.
        disk: Where what does not fit can go; None: nowhere.
        devices: What each rank has; empty: all are alike, and have `memory`.

    Raises:
        PlanError: `stages` or `micro_batches` is not a whole number.
    """

    ranks: int
    samples: int
    stages: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    memory: int | None = None
    cut_points: tuple[str, ...] = ()
    state_factor: float = 2.0
    batch_norm: str = ""
    strategy: str = AUTO
    whole: bool = False
    may_recompute: bool = False
    disk: Disk | None = None
    devices: tuple[Device, ...] = ()

    def __post_init__(self) -> None:
        check_counts(self.stages, self.micro_batches)


def check_counts(stages: object, micro_batches: object) -> None:
    """Raise PlanError where one is given that is not a whole number."""
    for name, value in (("stages", stages), ("micro_batches", micro_batches)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise PlanError(f"{name}={value!r} is not a whole number.", f"Write, for example, {name}=2.")


def plan(graph: Graph, request: Request) -> Plan:
    """The plan for a request that is fastest on paper. Raises PlanError with the nearest that works."""
    _check(graph, request)
    best: Plan | None = None
    failure: PlanError | None = None
    whole = request
    for stages in _stages(graph, request):
        if whole.whole:
            replicas = request.ranks // stages
            request = replace(whole, samples=-(-whole.samples // replicas), whole=False)
            try:
                _check(graph, request)
            except PlanError as error:  # with other stages the replicas' shares of the batch may divide
                failure = failure or error
                continue
        for micro_batches in _micro_batches(request, stages):
            name = request.schedule or "1f1b"
            try:
                found = _planned(graph, request, make(name, stages, micro_batches))
            except PlanError as error:
                failure = failure or error
                continue
            if best is None or _rate(found) > _rate(best):
                best = found
    if best is None:
        raise failure or PlanError("There is no plan.", "Ask for fewer stages.")
    return best


def cheapest_cuts(graph: Graph, places: Sequence[int], pieces: int, longer: float) -> tuple[int, ...] | None:
    """Of all cuts that are about balanced, those at which the fewest bytes cross, and then the most balanced.

    Messages and memory do not count. The same graph and costs have the same cuts.

    Args:
        graph: With its costs.
        places: Of operators before which a cut may be, growing.
        pieces: Into how many.
        longer: The most that the longest piece may take, in parts of the most balanced cuts' longest one.

    Returns:
        A place for each piece but the first; None where there are too few.
    """
    if len(places) < pieces - 1:
        return None
    n = graph.samples
    ends = [0, *_fewer(graph, list(places), pieces), len(graph.operators)]
    times = _sums((o.forward_ms(n) + o.backward_ms(n) for o in graph.operators), ends)
    crossing = _crossing(graph, n)
    crossed = [0.0, *(crossing[end] for end in ends[1:-1]), 0.0]
    # Pieces that are filled one after the other are never longer than this, so longer ones need no look.
    most = (times[-1] / pieces + max(end - begin for begin, end in itertools.pairwise(times))) * 1.001
    shortest = _bounded(pieces, times, [0.0] * len(ends), most)[1]
    return tuple(ends[at] for at in _bounded(pieces, times, crossed, longer * shortest)[2][:-1])


def _bounded(
    pieces: int, times: list[float], crossed: list[float], most: float
) -> tuple[float, float, tuple[int, ...]]:
    """Bytes, the time of the longest piece, and the ends of pieces, each at most `most` long.

    Dynamic programming over the ends of the first, the second and all other pieces.
    """
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(pieces):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for begin, (sent, longest, cuts) in best.items():
            for end in range(begin + 1, len(times)):
                took = times[end] - times[begin]
                if took > most:
                    break
                found = (sent + crossed[end], max(longest, took), (*cuts, end))
                if end not in following or found < following[end]:
                    following[end] = found
        best = following
    return best[len(times) - 1]


def _rate(found: Plan) -> float:
    """Samples per millisecond of all ranks, with the sum of gradients over replicas."""
    gradients = max(s.parameter_bytes for s in found.stages) if found.replicas > 1 else 0
    reduced = found.graph.links.milliseconds(2 * gradients) if gradients else 0.0
    return found.samples * found.replicas / (found.step_ms + reduced)


def _check(graph: Graph, request: Request) -> None:
    stages, micro, samples = request.stages, request.micro_batches, request.samples
    if stages is not None and (stages < 1 or request.ranks % stages):
        fitting = [n for n in range(1, request.ranks + 1) if request.ranks % n == 0]
        nearest = min(fitting, key=lambda n: (abs(n - stages), n))
        raise PlanError(
            f"{request.ranks} ranks do not divide into pipelines of {stages} stages.",
            f"Use stages={nearest}, or start another number of ranks.",
        )
    if micro is not None and not request.whole and (micro < 1 or samples % micro):
        fitting = [n for n in range(1, samples + 1) if samples % n == 0]
        nearest = min(fitting, key=lambda n: (abs(n - micro), n))
        raise PlanError(
            f"A batch of {samples} samples does not divide into {micro} micro-batches.",
            f"Use micro_batches={nearest}, or another batch.",
        )
    if request.batch_norm == "exact" and micro not in (None, 1):
        raise PlanError(
            f"BatchNorm over the whole batch (exact) and {micro} micro-batches exclude each other.",
            "Use micro_batches=1, or batch_norm='deferred'.",
        )
    for layer in request.cut_points:
        if first_of(graph, layer) is None:
            known = ", ".join(dict.fromkeys(o.module.split(".")[0] for o in graph.operators if o.module))
            raise PlanError(f"The model has no layer '{layer}' to cut at.", f"Its layers are {known}.")


def _stages(graph: Graph, request: Request) -> list[int]:
    if request.cut_points:
        chunks = KINDS[request.schedule].chunks if request.schedule in KINDS else 1
        pieces = len(request.cut_points) + 1
        wanted = request.stages or max(pieces // chunks, 1)
        if wanted * chunks != pieces or request.ranks % wanted:
            possible = [n for n in range(1, wanted + 1) if request.ranks % n == 0]
            number = (request.stages or possible[-1]) * chunks - 1
            raise PlanError(
                f"{len(request.cut_points)} cut points make {pieces} pieces, which {wanted} stages of "
                f"{request.ranks} ranks cannot hold.",
                f"Name {number} cut points." if number else "Leave the cut points out.",
            )
        return _stages_of_strategy(replace(request, stages=wanted))
    return _stages_of_strategy(request)


def _stages_of_strategy(request: Request) -> list[int]:
    """The numbers of stages among those requested that are of the strategy. Raises PlanError."""
    ranks, strategy = request.ranks, request.strategy
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
    allowed = {
        AUTO: fitting,
        DATA: [1],
        PIPELINE: [ranks],
        HYBRID: [n for n in fitting if 1 < n < ranks],
    }[strategy]
    if not allowed:
        raise PlanError(
            f"{ranks} ranks cannot train as a hybrid: it needs several replicas of several stages each.",
            "Start 4, 6 or 8 ranks, or use the strategy data or pipeline.",
        )
    if request.stages is None:
        return allowed
    if request.stages not in allowed:
        raise PlanError(
            f"stages={request.stages} and the strategy {strategy} exclude each other with {ranks} ranks.",
            f"Use stages={allowed[0]}, or the strategy auto.",
        )
    return [request.stages]


def _micro_batches(request: Request, stages: int) -> list[int]:
    if request.micro_batches is not None:
        return [request.micro_batches]
    if request.batch_norm == "exact" or stages == 1:
        # One stage gains nothing from micro-batches but memory.
        return [1] if request.batch_norm == "exact" or request.memory is None else _divisors(request, stages)
    return _divisors(request, stages)


def _divisors(request: Request, stages: int) -> list[int]:
    kind = KINDS.get(request.schedule or "1f1b")
    step = stages if kind and kind.multiple_of_ranks else 1
    found = [m for m in range(1, request.samples + 1) if request.samples % m == 0 and m % step == 0]
    return [m for m in found if m <= 8 * stages] or [1]


def _planned(graph: Graph, request: Request, schedule: Schedule) -> Plan:
    draft = Plan(
        graph,
        (),
        schedule,
        request.samples,
        request.ranks // schedule.ranks,
        request.state_factor,
        request.batch_norm,
        memory=request.memory or 0,
        may_recompute=request.may_recompute,
        disk=request.disk,
        devices=devices_of_stages(request.devices, schedule.ranks),
    )
    pieces = len(schedule.holders)
    if request.cut_points:
        found = replace(draft, cuts=_named_cuts(graph, request.cut_points)).fitted()
    else:
        places = cut_places(graph)
        if len(places) < pieces - 1:
            raise _too_few(request, schedule, len(places))
        found = _cut(draft, _fewer(graph, places, pieces))
    if (stage := found.exceeding) is not None:
        least = found.over if request.cut_points else _least_memory(draft, cut_places(graph))
        raise PlanError(
            f"A stage needs {size_text(found.over)}, and a device has "
            f"{size_text(found.memory_of(stage.rank))}.",
            f"Give memory={least} bytes ({size_text(least)}) at least, more stages, or more micro-batches.",
        )
    return found


def _too_few(request: Request, schedule: Schedule, places: int) -> PlanError:
    pieces = len(schedule.holders)
    chunks = pieces // schedule.ranks
    most = (places + 1) // chunks
    fitting = [n for n in range(1, min(most, request.ranks) + 1) if request.ranks % n == 0]
    if not fitting:
        remedy = "Use schedule='1f1b'."
    elif request.strategy in (PIPELINE, HYBRID) and fitting[-1] == 1:
        remedy = "Use the strategy data." if most < 2 else f"Start {most} ranks, or use the strategy data."
    elif request.strategy == PIPELINE:
        remedy = f"Start {most} ranks, or use stages={fitting[-1]} and the strategy hybrid."
    else:
        remedy = f"Use stages={fitting[-1]}."
    return PlanError(
        f"The model can be cut at {places} places, which is too few for {pieces} pieces.", remedy
    )


def _named_cuts(graph: Graph, cut_points: Sequence[str]) -> tuple[int, ...]:
    allowed = cut_places(graph)
    cuts = []
    for layer in cut_points:
        place = first_of(graph, layer)
        if place not in allowed:
            near = min(allowed, key=lambda a: abs(a - (place or 0)), default=None)
            name = graph.operators[near].module if near is not None else ""
            raise PlanError(
                f"No stage can begin with layer '{layer}': it is the first one, or changes in place what the "
                "layer before it makes.",
                f"Use the layer '{name}' instead." if name else "Leave it out.",
            )
        cuts.append(place)
    if cuts != sorted(set(cuts)):
        raise PlanError("The cut points are not in the order in which the model runs.", "Sort them.")
    return tuple(cuts)


def _fewer(graph: Graph, places: list[int], pieces: int) -> list[int]:
    """The best places, where there are many: of neighbours that take little time, where least crosses."""
    most = max(_MOST_PLACES, 4 * pieces)
    if len(places) <= most:
        return places
    n = graph.samples
    times = [o.forward_ms(n) + o.backward_ms(n) for o in graph.operators]
    total = sum(times) or 1.0
    crossing = _crossing(graph, n)
    chosen: dict[int, int] = {}
    done, at = 0.0, 0
    for place in places:
        done += sum(times[at:place])
        at = place
        group = int(most * done / total)
        if group not in chosen or crossing[place] < crossing[chosen[group]]:
            chosen[group] = place
    # Where nearly all time is in a few operators, most places are neighbours of each other.
    return sorted(chosen.values()) if len(chosen) >= pieces - 1 else places


def _crossing(graph: Graph, samples: int) -> list[float]:
    """Bytes that would cross a cut before each operator."""
    changes = [0.0] * (len(graph.operators) + 2)
    families: dict[str, list[str]] = defaultdict(list)  # by value: itself, if it is used later, and its views
    for name, users in graph.users.items():
        root = name
        while root in graph.views:
            root = graph.views[root]
        if users and graph.maker[name] >= 0:
            families[root].append(name)
    for root, family in families.items():
        spans = {name: _span(graph, name) for name in family}
        before = 0.0
        for place in sorted({end for span in spans.values() for end in (span.start, span.stop)}):
            used = [name for name in family if place in spans[name]]
            sent = used if family == [root] else fewest_bytes(graph, used, lambda _: 0)
            size = sum(graph.value_bytes(name, samples) for name in sent)
            changes[place] += size - before
            before = size
    levels, level = [], 0.0
    for change in changes[:-1]:
        level += change
        levels.append(level)
    return levels


def _span(graph: Graph, name: str) -> range:
    """Before which operators a cut would be crossed by a value."""
    last = min(graph.users[name][-1], len(graph.operators) - 1)
    return range(graph.maker[name] + 1, last + 1)


def _cut(draft: Plan, places: list[int]) -> Plan:
    """The best of what is found from several beginnings, or what comes nearest to the limit of memory."""
    if not draft.memory:
        return _moved(replace(draft, cuts=_best_cuts(draft, places) or ()).fitted(), places)
    found: list[Plan] = []
    part = 1.0
    for _ in range(12):
        cuts = _best_cuts(draft, places, part)
        if cuts is None:
            break
        beginning = replace(draft, cuts=cuts).fitted()
        # Beginnings that exceed the memory by more than what is found lead nowhere else, mostly.
        if not found or _badness(beginning) < min(map(_badness, found)):
            found.append(_moved(beginning, places))
            if not found[-1].over:
                break
        part *= _TIGHTER
    if not (found and found[-1].fits_by_itself):
        # Cuts that need little memory, whatever they take; and, if any fit, those that are fast otherwise.
        for part, by_memory in ((1.0, True), (_ENDLESS, False)):
            cuts = _best_cuts(draft, places, part, by_memory)
            if cuts is not None and (by_memory or not all(each.over for each in found)):
                found.append(_moved(replace(draft, cuts=cuts).fitted(), places))
    return min(found, key=_badness)


def _least_memory(draft: Plan, places: list[int]) -> int:
    """Bytes with which there is a plan: what the largest stage needs of the cuts that need least."""
    places = _fewer(draft.graph, places, len(draft.schedule.holders))
    # With next to no memory each stage does whatever needs least.
    draft = replace(draft, memory=1, disk=None, devices=())
    cuts = _best_cuts(draft, places, by_memory=True) or ()
    return max(stage.memory_bytes for stage in replace(draft, cuts=cuts).fitted().stages)


def _best_cuts(
    draft: Plan, places: list[int], part: float = 1.0, by_memory: bool = False
) -> tuple[int, ...] | None:
    """Cuts that make the costliest piece as cheap as can be; None where each has one over the limit.

    Args:
        draft: The plan without cuts.
        places: Where cuts may be.
        part: Of each device's memory that its pieces may take.
        by_memory: Whether memory is what a piece costs, as a part of what its device has.
    """
    holders = draft.schedule.holders
    pieces = len(holders)
    ends = [0, *places, len(draft.graph.operators)]
    costs = _Costs(draft, ends)
    has = [draft.memory_of(rank) or _ENDLESS for rank in range(draft.schedule.ranks)]
    limits = [part * size / (pieces // draft.schedule.ranks) for size in has]
    scales = [1.0 if size == _ENDLESS else size for size in has]

    def cost(piece: int, begin: int, end: int) -> float:
        if by_memory:
            return costs.memory(piece, begin, end) / scales[holders[piece]]
        return costs.within(piece, begin, end, limits[holders[piece]])

    best = [[_ENDLESS] * len(ends) for _ in range(pieces + 1)]
    source = [[-1] * len(ends) for _ in range(pieces + 1)]
    best[0][0] = 0.0
    for piece in range(pieces):
        for end in range(piece + 1, len(ends)):
            for begin in range(end - 1, piece - 1, -1):
                if best[piece][begin] >= best[piece + 1][end]:
                    continue
                worst = max(best[piece][begin], cost(piece, begin, end))
                if worst < best[piece + 1][end]:
                    best[piece + 1][end], source[piece + 1][end] = worst, begin
    at, cuts = len(ends) - 1, []
    for piece in range(pieces, 0, -1):
        at = source[piece][at]
        if at < 0:
            return None
        cuts.append(ends[at])
    return tuple(reversed(cuts[:-1]))


class _Costs:
    """Times and bytes of what is between two places, from sums up to each of them."""

    def __init__(self, draft: Plan, ends: list[int]) -> None:
        graph, n = draft.graph, draft.micro_samples
        crossing = _crossing(graph, n)
        edges, holders = {0, len(graph.operators)}, draft.schedule.holders
        sizes = [None if end in edges else crossing[end] for end in ends]
        # By piece: what crosses a cut before it takes, for each of the places.
        self._travel = [
            [0.0 if size is None else draft.travel_ms(size, before, holder) for size in sizes]
            for before, holder in itertools.pairwise((holders[0], *holders, holders[-1]))
        ]
        forward, backward = graph.times_before(n)
        self._forward = [forward[end] for end in ends]
        # Of a micro-batch; the first one's gradients of parameters are added to nothing.
        added_share, adding = 1 - 1 / draft.schedule.micro_batches, graph.accumulating_before
        self._times = [forward[end] + backward[end] + added_share * adding[end] for end in ends]
        share = n / graph.samples
        self._held = [share * graph.held_before[end] for end in ends]
        seen: set[str] = set()
        weights = []
        for operator in graph.operators:
            new = set(operator.parameters) - seen
            seen |= new
            trained = graph.parameter_bytes(new, trainable=True)
            weights.append(graph.parameter_bytes(new) + (1 + draft.state_factor) * trained)
        self._weights = _sums(weights, ends)
        self._counts = held(draft.schedule)
        self._recomputes = draft.may_recompute and not draft.schedule.split
        self._disk = draft.disk
        self._slowness = [draft.slowness_of(holder) for holder in holders]

    def time(self, piece: int, begin: int, end: int) -> float:
        """With what is sent forward and back."""
        own = self._slowness[piece] * (self._times[end] - self._times[begin])
        return own + self._travel[piece][begin] + self._travel[piece + 1][end]

    def within(self, piece: int, begin: int, end: int, limit: float) -> float:
        """The time with the cheapest method to stay within the limit; endless where there is none."""
        time = self.time(piece, begin, end)
        weights, held = self._weights[end] - self._weights[begin], self._held[end] - self._held[begin]
        over = weights + self._counts[piece] * held - limit
        if over <= 0:
            return time
        times = [_ENDLESS]
        if self._recomputes and weights + held <= limit:
            again = self._slowness[piece] * (self._forward[end] - self._forward[begin])
            times.append(time + again * (piece + 1 < len(self._counts)))
        if self._disk is not None:
            times.append(max(time, self._disk.milliseconds(over) / self._counts[piece]))
        return min(times)

    def memory(self, piece: int, begin: int, end: int) -> float:
        """The least, without messages and workspace."""
        count = 1 if self._recomputes else self._counts[piece]
        return self._weights[end] - self._weights[begin] + count * (self._held[end] - self._held[begin])


def _sums(values: Iterable[float], ends: list[int]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [sums[end] for end in ends]


def _moved(found: Plan, places: list[int]) -> Plan:
    """Move one cut after the other to a neighbouring place, as long as that makes the step shorter.

    Where stages exceed their memory, first as long as they exceed it by less. Where there are few ways to
    cut, look at all of them.
    """
    if math.comb(len(places), len(found.cuts)) <= _FEW:
        cuts = itertools.combinations(places, len(found.cuts))
        return min((replace(found, cuts=each).fitted() for each in cuts), key=_badness, default=found)
    better = True
    while better:
        better = False
        for cuts in _neighbours(found, places):
            moved = replace(found, cuts=cuts).fitted()
            if _is_better(moved, found):
                found, better = moved, True
                break
    return found


def _is_better(moved: Plan, found: Plan) -> bool:
    """Whether a plan is better by a part that is worth another round of looking at its neighbours."""
    if not found.over:
        return moved.step_ms < _GAIN * found.step_ms and not moved.over
    (worst, total, _), (worst_before, total_before, _) = _badness(moved), _badness(found)
    return worst < _GAIN * worst_before or (worst <= worst_before and total < _GAIN * total_before)


def _badness(found: Plan) -> tuple[float, float, float]:
    """By what the stages exceed their memory: the worst one, and all; then how long the step takes."""
    limits = [(found.memory_of(stage.rank), stage.present_bytes) for stage in found.stages]
    excess = [present - memory for memory, present in limits if 0 < memory < present]
    return max(excess, default=0), sum(excess), 0.0 if excess else found.step_ms


def _neighbours(found: Plan, places: list[int]) -> Iterator[tuple[int, ...]]:
    """Plans with one cut elsewhere; with a limit of memory, then those with two cuts in a row elsewhere."""
    at = [places.index(cut) for cut in found.cuts]
    for number in range(len(at)):
        for distance in (1, 2, 3, 5, 8):
            yield from _shifted(places, at, {number: -distance})
            yield from _shifted(places, at, {number: distance})
    for number in range(len(at) - 1) if found.memory else ():
        for first, second in itertools.product((-2, -1, 1, 2), repeat=2):
            yield from _shifted(places, at, {number: first, number + 1: second})


def _shifted(places: list[int], at: list[int], distances: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """The cuts at these indices of places, with some moved by some places; nothing where that cannot be."""
    moved = [index + distances.get(number, 0) for number, index in enumerate(at)]
    if moved[0] >= 0 and moved[-1] < len(places) and all(a < b for a, b in itertools.pairwise(moved)):
        yield tuple(places[index] for index in moved)
