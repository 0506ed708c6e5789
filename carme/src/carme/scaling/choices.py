"""What else could be chosen, with what each takes and costs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from carme.errors import InvalidRequest
from carme.scaling.curves import Curve, Row

__all__ = ["Choice", "choices", "marks"]

_MOST = 8


@dataclass(frozen=True)
class Choice:
    """Some nodes with GPUs.

    Args:
        nodes: How many.
        gpus_per_node: On each.
        row: What is predicted.
        steps: Of the whole training; None: not known.
    """

    nodes: int
    gpus_per_node: int
    row: Row
    steps: int | None = None

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def hours(self) -> float | None:
        """That the training takes, where its steps are known."""
        return self.steps * self.row.step_ms / 3.6e6 if self.steps else None

    @property
    def cost(self) -> float:
        """GPU-hours, or node-hours without GPUs; a multiple of those of one where the steps are not known."""
        return self.row.cost if self.hours is None else self.hours * self.row.ranks


def choices(
    curve: Curve,
    most_nodes: int,
    most_gpus: int,
    chosen: tuple[int, int],
    steps: int | None = None,
    is_possible: Callable[[int, int], bool] = lambda nodes, gpus: True,
) -> list[Choice]:
    """What could be chosen, from the smallest to the largest: powers of two, as few nodes as possible.

    Args:
        most_nodes: That one may ask for.
        most_gpus: Of a node; 0: none has any.
        chosen: Nodes and GPUs of each that are requested; they are in the list. Without
            GPUs: choose among nodes alone.
        steps: Of the whole training.
        is_possible: Whether the site can start so many nodes with so many GPUs of each. What it cannot start
            fills only the room that the others leave.
    """
    sizes = {chosen}
    # Where no node has any, what is requested is shown all the same; its field says what is wrong.
    gpus = [*_powers_of_two(most_gpus), most_gpus] if chosen[1] and most_gpus else [chosen[1]]
    sizes |= {(1, each) for each in gpus}
    sizes |= {(nodes, gpus[-1]) for nodes in (*_powers_of_two(most_nodes), most_nodes)}
    found = []
    for nodes, each in sorted(sizes, key=lambda size: (size[0] * max(size[1], 1), size[0])):
        try:
            found.append(Choice(nodes, each, curve.row(nodes, each), steps))
        except InvalidRequest:
            continue
    return _shortlist(found, chosen, is_possible)


def marks(several: Sequence[Choice]) -> tuple[Choice, Choice]:
    """The cheapest and the fastest."""
    cheapest = min(several, key=lambda choice: (choice.cost, choice.row.step_ms))
    return cheapest, min(several, key=lambda choice: (choice.row.step_ms, choice.cost))


def _powers_of_two(most: int) -> Iterable[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2


def _shortlist(
    several: list[Choice], chosen: tuple[int, int], is_possible: Callable[[int, int], bool]
) -> list[Choice]:
    """As many as a form has room for: those that matter, and the smallest of the rest."""
    if len(several) <= _MOST:
        return several
    possible = [each for each in several if is_possible(each.nodes, each.gpus_per_node)]
    best = marks(possible) if possible else ()
    needed = [each for each in several if each in best or (each.nodes, each.gpus_per_node) == chosen]
    candidates = [*possible, *(each for each in several if each not in possible)]
    rest = [each for each in candidates if each not in needed][: _MOST - len(needed)]
    return [each for each in several if each in needed or each in rest]
