"""Fuses operators so that few bytes travel: cuts are made where little crosses, and nowhere else.

Operators run in one order, so parts of it that follow each other cannot need each other in a circle. Where
to cut is the choice of the pipeline's partitioner. Measured times scatter more than the times of two cuts of
about the same balance differ, so of all about as balanced cuts the one counts that the fewest bytes cross.
"""

from carme_runtime.graph import Graph
from carme_runtime.pipeline.partition import cheapest_cuts

#: How much longer the longest part may be than that of the most balanced cuts, where fewer bytes travel then.
LONGER = 1.05
#: What starting a task and taking its result costs, in milliseconds, and how much more a task has to do.
TASK_MS, WORTH = 0.15, 10
#: So many places at which one value crosses are considered before a join.
_NEAR = 8


def crossing(graph: Graph) -> list[float]:
    """Bytes of the values that cross a cut before each operator."""
    changes = [0.0] * (len(graph.operators) + 1)
    for name, users in graph.users.items():
        maker = graph.maker[name]
        if maker >= 0 and users and min(users[-1], len(graph.operators)) > maker:
            changes[maker + 1] += graph.value[name].bytes
            changes[min(users[-1], len(graph.operators))] -= graph.value[name].bytes
    levels, level = [], 0.0
    for change in changes[:-1]:
        level += change
        levels.append(level)
    return levels


def fed(graph: Graph) -> list[bool]:
    """Which operators depend on what the model is given; the others on constants alone, or on chance."""
    found: list[bool] = []
    for operator in graph.operators:
        found.append(any(graph.maker[name] < 0 or found[graph.maker[name]] for name in operator.inputs))
    return found


def allowed(graph: Graph) -> list[int]:
    """Places before which a part may begin: only arrays cross there, and each part is given something.

    For the latter no part ends with an operator that depends on constants alone.
    """
    fed_by_others = fed(graph)
    last = max((place for place, each in enumerate(fed_by_others) if each), default=-1)
    bad = [0] * (len(graph.operators) + 1)
    for name, users in graph.users.items():
        maker = graph.maker[name]
        if maker >= 0 and users and not _travels(graph, name):
            bad[maker + 1] += 1
            bad[min(users[-1], len(graph.operators) - 1) + 1] -= 1
    found, level = [], 0
    for place in range(len(graph.operators)):
        level += bad[place]
        if 0 < place <= last and fed_by_others[place - 1] and not level:
            found.append(place)
    return found


def _travels(graph: Graph, name: str) -> bool:
    return graph.value[name].dtype not in ("list", "dict", "NoneType")


def balanced_cuts(graph: Graph, parts: int) -> tuple[int, ...] | None:
    """Cuts into parts of about the same time at which the fewest bytes cross.

    Args:
        graph: With its costs.
        parts: How many.

    Returns:
        Places of operators; None where there are too few.
    """
    return cheapest_cuts(graph, allowed(graph), parts, LONGER)


def branch_cuts(graph: Graph) -> tuple[int, ...]:
    """Cuts around branches that can run side by side: after what they share, and before what joins them."""
    places = {0, *allowed(graph)}
    cuts: set[int] = set()
    for place, operator in enumerate(graph.operators):
        makers = {graph.maker[name] for name in operator.inputs} - {-1}
        if len(makers) > 1 and place in places:
            begin = _fork(graph, place)
            if begin in places:
                cuts |= {begin, place}
    return tuple(sorted(cuts - {0}))


def _fork(graph: Graph, join: int) -> int:
    """Where the branches begin that an operator joins: one value at most crosses there; -1: nowhere near."""
    needs = {name for name in graph.operators[join].inputs if graph.maker[name] >= 0}
    examined = 0
    for begin in range(join - 1, -1, -1):
        operator = graph.operators[begin]
        needs.difference_update(operator.outputs)
        needs.update(name for name in operator.inputs if graph.maker[name] >= 0)
        if len(needs) <= 1:
            examined += 1
            if len(components(graph, begin, join)) > 1:
                return begin
            if examined == _NEAR:
                break
    return -1


def components(graph: Graph, begin: int, end: int) -> list[list[int]]:
    """Operators of a part in groups that need nothing of each other.

    Small groups join the largest, as do those that depend on constants alone: nothing would start their task.
    """
    leader = {place: place for place in range(begin, end)}

    def top(place: int) -> int:
        while leader[place] != place:
            place = leader[place]
        return place

    for place in range(begin, end):
        for name in graph.operators[place].inputs:
            if graph.maker[name] >= begin:
                leader[top(place)] = top(graph.maker[name])
    groups: dict[int, list[int]] = {}
    for place in range(begin, end):
        groups.setdefault(top(place), []).append(place)
    if len(groups) == 1:
        return list(groups.values())

    def time(group: list[int]) -> float:
        return sum(graph.operators[place].forward_ms(graph.samples) for place in group)

    fed_by_others = fed(graph)

    def starts(group: list[int]) -> bool:
        return any(fed_by_others[place] for place in group)

    ordered = sorted(groups.values(), key=lambda group: (starts(group), time(group)), reverse=True)
    first, separate = ordered[0], []
    for group in ordered[1:]:
        if starts(group) and time(group) >= WORTH * TASK_MS:
            separate.append(group)
        else:
            first = sorted([*first, *group])
    return sorted([first, *separate])
