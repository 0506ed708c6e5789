"""Schedules of pipelines as data: what each rank does in which order, in one table.

A model is cut into pieces; each rank holds one or, in a looped schedule, two of them. `F` is the forward pass
of a micro-batch through a piece, `B` the whole backward pass; zero-bubble schedules divide that into `I`, the
gradients of the piece's inputs, and `W`, those of its weights.

Sources: GPipe (Huang et al. 2019), 1F1B (Narayanan et al., PipeDream, 2019), interleaved (Narayanan et al.,
Megatron-LM, 2021), ZB1P and ZBV (Qi et al., Zero Bubble Pipeline Parallelism, 2023; Pipeline Parallelism with
Controllable Memory, 2024).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from carme_runtime.errors import CarmeRuntimeError

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"


class PlanError(CarmeRuntimeError):
    """A pipeline that cannot be as it was requested."""


class Action(NamedTuple):
    """One pass of one micro-batch through one piece."""

    kind: str
    piece: int
    micro: int


@dataclass(frozen=True)
class Kind:
    """An entry of the table.

    Args:
        actions: From ranks and micro-batches: each rank's actions.
        rank_of: From a piece and ranks: who holds the piece.
        chunks: Pieces per rank.
        split: Whether backward passes are divided.
        bubble: From ranks and micro-batches: the share of a rank's time, from its first to its last action,
            in which the rank with the most idle time idles; where all passes take equally long.
        multiple_of_ranks: Whether micro-batches must be a multiple of the ranks.
        holds_from: From ranks: with fewer micro-batches ranks idle longer than the formula says.
    """

    actions: Callable[[int, int], list[list[Action]]]
    rank_of: Callable[[int, int], int]
    chunks: int
    split: bool
    bubble: Callable[[int, int], float]
    multiple_of_ranks: bool = False
    holds_from: Callable[[int], int] = lambda ranks: 1


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does in a step.

    Args:
        name: Of the kind.
        ranks: How many.
        micro_batches: How many.
        actions: Of each rank, in order.
        holders: The rank of each piece.
    """

    name: str
    ranks: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    holders: tuple[int, ...]

    @property
    def split(self) -> bool:
        """Whether backward passes are divided."""
        return KINDS[self.name].split

    @property
    def bubble(self) -> float:
        """The share of idle time by formula; see `Kind`."""
        return KINDS[self.name].bubble(self.ranks, self.micro_batches)


def make(name: str, ranks: int, micro_batches: int) -> Schedule:
    """A schedule from the table. Raises PlanError with the nearest one that works."""
    kind = KINDS.get(name)
    if kind is None:
        raise PlanError(f"There is no schedule '{name}'.", f"Choose from {', '.join(KINDS)}.")
    if ranks < 1 or micro_batches < 1:
        raise PlanError(
            f"A pipeline cannot have {ranks} stages and {micro_batches} micro-batches.", "Give at least 1."
        )
    if kind.multiple_of_ranks and micro_batches % ranks:
        nearest = max(round(micro_batches / ranks), 1) * ranks
        raise PlanError(
            f"The schedule {name} takes micro-batches in groups of {ranks}, one per stage; "
            f"{micro_batches} are none.",
            f"Use micro_batches={nearest}, or schedule='1f1b'.",
        )
    holders = tuple(kind.rank_of(piece, ranks) for piece in range(ranks * kind.chunks))
    actions = tuple(tuple(own) for own in kind.actions(ranks, micro_batches))
    return Schedule(name, ranks, micro_batches, actions, holders)


def _in_line(piece: int, ranks: int) -> int:
    return piece % ranks


def _in_v(piece: int, ranks: int) -> int:
    return min(piece, 2 * ranks - 1 - piece)


def _gpipe(ranks: int, micro_batches: int) -> list[list[Action]]:
    micros = range(micro_batches)
    return [
        [Action(FORWARD, rank, m) for m in micros] + [Action(BACKWARD, rank, m) for m in micros]
        for rank in range(ranks)
    ]


def _one_forward_one_backward(ranks: int, micro_batches: int) -> list[list[Action]]:
    return [
        _alternating(
            [(rank, m) for m in range(micro_batches)],
            [(rank, m) for m in range(micro_batches)],
            min(ranks - 1 - rank, micro_batches),
        )
        for rank in range(ranks)
    ]


def _interleaved(ranks: int, micro_batches: int) -> list[list[Action]]:
    """Groups of as many micro-batches as ranks go through a rank's first piece, then through its second."""
    lists = []
    for rank in range(ranks):
        forwards, backwards = [], []
        for first in range(0, micro_batches, ranks):
            group = range(first, first + ranks)
            forwards += [(chunk * ranks + rank, m) for chunk in (0, 1) for m in group]
            backwards += [(chunk * ranks + rank, m) for chunk in (1, 0) for m in group]
        ahead = 2 * (ranks - 1 - rank) + ranks
        lists.append(_alternating(forwards, backwards, min(ahead, len(forwards))))
    return lists


def _alternating(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], ahead: int
) -> list[Action]:
    """Some forward passes, then one of each in turn."""
    actions = [Action(FORWARD, *each) for each in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [Action(FORWARD, *forward), Action(BACKWARD, *backward)]
    return actions + [Action(BACKWARD, *each) for each in backwards[len(forwards) - ahead :]]


def _zb1p(ranks: int, micro_batches: int) -> list[list[Action]]:
    """As 1F1B, but rank r makes the gradients of weights r micro-batches later, and idles less at the end."""
    lists = []
    for rank in range(ranks):
        own = _Counting(micro_batches)
        own.add(FORWARD, rank, times=ranks - 1 - rank)
        while own.count(INPUTS, rank) < micro_batches:
            own.add(FORWARD, rank)
            own.add(INPUTS, rank)
            if own.count(INPUTS, rank) > rank:
                own.add(WEIGHTS, rank)
        own.add(WEIGHTS, rank, times=micro_batches)
        lists.append(own.actions)
    return lists


def _zbv(ranks: int, micro_batches: int) -> list[list[Action]]:
    """The pieces go from the first rank to the last and back, so the last piece is beside the first one."""
    lists = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        own = _Counting(micro_batches)
        own.add(FORWARD, down, times=2 * (ranks - rank) - 1)
        for _ in range(rank):
            own.add(FORWARD, up)
            own.add(FORWARD, down)
        for _ in range(ranks - rank):
            own.add_each(up, FORWARD, INPUTS, WEIGHTS)
        while min(own.count(FORWARD, down), own.count(FORWARD, up)) < micro_batches:
            own.add_each(down, FORWARD, INPUTS, WEIGHTS)
            own.add_each(up, FORWARD, INPUTS, WEIGHTS)
        for _ in range(rank):
            own.add(INPUTS, down)
            own.add(INPUTS, up)
        for _ in range(ranks - rank):
            own.add_each(down, INPUTS, WEIGHTS)
        for piece in (up, down):
            for _ in range(micro_batches):
                own.add_each(piece, INPUTS, WEIGHTS)
        lists.append(own.actions)
    return lists


class _Counting:
    """The actions of a rank. A pass that cannot be yet, or has been for all micro-batches, is left out."""

    def __init__(self, micro_batches: int) -> None:
        self.actions: list[Action] = []
        self._micro_batches = micro_batches
        self._counts: dict[tuple[str, int], int] = {}

    def count(self, kind: str, piece: int) -> int:
        return self._counts.get((kind, piece), 0)

    def add(self, kind: str, piece: int, times: int = 1) -> None:
        before = {FORWARD: "", INPUTS: FORWARD, WEIGHTS: INPUTS}[kind]
        for _ in range(times):
            done = self.count(kind, piece)
            if done < (self.count(before, piece) if before else self._micro_batches):
                self.actions.append(Action(kind, piece, done))
                self._counts[kind, piece] = done + 1

    def add_each(self, piece: int, *kinds: str) -> None:
        for kind in kinds:
            self.add(kind, piece)


KINDS: dict[str, Kind] = {
    "gpipe": Kind(_gpipe, _in_line, 1, False, lambda p, m: (p - 1) / (m + p - 1)),
    "1f1b": Kind(_one_forward_one_backward, _in_line, 1, False, lambda p, m: (p - 1) / (m + p - 1)),
    "interleaved": Kind(
        _interleaved, _in_line, 2, False, lambda p, m: (p - 1) / (2 * m + p - 1), multiple_of_ranks=True
    ),
    "zb1p": Kind(_zb1p, _in_line, 1, True, lambda p, m: (p - 1) / (3 * m + p - 1), holds_from=lambda p: p),
    "zbv": Kind(_zbv, _in_v, 2, True, lambda p, m: 0.0, holds_from=lambda p: 2 * p - 1),
}
