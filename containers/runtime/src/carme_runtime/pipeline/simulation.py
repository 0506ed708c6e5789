"""Schedules on paper: whether they end, how long they take, and how many slots their messages need."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from carme_runtime.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    Action,
    PlanError,
    Schedule,
    make,
)

Channel = tuple[int, int]  # from a piece, to a piece
# How long an action takes, and how long a message on a channel travels.
Duration = Callable[[Action], float]
Travel = Callable[[Channel], float]
#: Of how many schedules and sets of channels what follows from them is cached: neighbouring cuts share it.
_CACHED = 64


@dataclass(frozen=True)
class Run:
    """A schedule with times.

    Args:
        schedule: Which.
        times: When each action begins and ends.
    """

    schedule: Schedule
    times: Mapping[Action, tuple[float, float]]

    @property
    def length(self) -> float:
        """Until the last action ends."""
        return max(end for _, end in self.times.values())

    def idle(self, rank: int) -> float:
        """The share of a rank's time, from its first action to its last, in which it does nothing."""
        own = [self.times[action] for action in self.schedule.actions[rank]]
        window = own[-1][1] - own[0][0]
        return 1 - sum(end - begin for begin, end in own) / window if window else 0.0

    @property
    def bubble(self) -> float:
        """The largest share of idle time among the ranks."""
        return max(self.idle(rank) for rank in range(self.schedule.ranks))


def chain(pieces: int) -> tuple[Channel, ...]:
    """The channels of pieces in a row."""
    return tuple((piece, piece + 1) for piece in range(pieces - 1))


def back(schedule: Schedule, piece: int, micro: int) -> Action:
    """The action that makes the gradients of a piece's inputs."""
    return Action(INPUTS if schedule.split else BACKWARD, piece, micro)


def last(schedule: Schedule, piece: int, micro: int) -> Action:
    """The action after which nothing of a micro-batch is held."""
    return Action(WEIGHTS if schedule.split else BACKWARD, piece, micro)


def simulate(
    schedule: Schedule,
    channels: Iterable[Channel],
    duration: Duration = lambda action: 1.0,
    travel: Travel = lambda channel: 0.0,
    slots: Mapping[Channel, int] | None = None,
) -> Run:
    """Run a schedule on paper.

    Args:
        schedule: Which.
        channels: Between which pieces there are messages: values forward, gradients backward.
        duration: See the types.
        travel: Counts between ranks only.
        slots: How many messages of a channel, in each direction, may have arrived and not been given up; a
            forward message is given up after its receiver's last pass, a backward one when its gradients are
            used. None: as many as come.

    Raises:
        PlanError: Actions wait for each other in a circle, or are missing or doubled.
    """
    limits = tuple(sorted(slots.items())) if slots else ()
    steps = _steps(schedule, tuple(channels), limits)
    begins, ends, free = list[float](), list[float](), [0.0] * schedule.ranks
    for step in steps:
        arrivals = [ends[place] + (travel(channel) if channel else 0.0) for place, channel in step.waits]
        begin = max([free[step.rank], *arrivals])
        free[step.rank] = begin + duration(step.action)
        begins.append(begin)
        ends.append(free[step.rank])
    times = zip(begins, ends, strict=True)
    return Run(schedule, dict(zip((step.action for step in steps), times, strict=True)))


class _Step(NamedTuple):
    """An action in an order in which a schedule can run.

    Args:
        action: Which.
        rank: Of it.
        waits: The places, in that order, of the actions that must have ended before, each with the channel
            on which that is reported.
    """

    action: Action
    rank: int
    waits: tuple[tuple[int, Channel | None], ...]


@lru_cache(maxsize=_CACHED)
def _steps(
    schedule: Schedule, channels: tuple[Channel, ...], slots: tuple[tuple[Channel, int], ...]
) -> tuple[_Step, ...]:
    """The actions in an order in which they can run. Raises PlanError; see `simulate`.

    It does not depend on how long they take: a search for cuts needs it again for many of them.
    """
    _complete(schedule)
    needs = _needs(schedule, channels, dict(slots))
    numbers: dict[Action, int] = {}
    steps: list[_Step] = []
    places = [0] * schedule.ranks
    left = sum(map(len, schedule.actions))
    while left:
        before = left
        for rank, own in enumerate(schedule.actions):
            while places[rank] < len(own):
                action = own[places[rank]]
                if any(needed not in numbers for needed, _ in needs[action]):
                    break
                waits = tuple((numbers[needed], channel) for needed, channel in needs[action])
                numbers[action] = len(steps)
                steps.append(_Step(action, rank, waits))
                places[rank] += 1
                left -= 1
        if left == before:
            waiting = zip(schedule.actions, places, strict=True)
            stuck = [own[place] for own, place in waiting if place < len(own)]
            raise PlanError(
                f"The schedule {schedule.name} cannot end: {', '.join(map(_named, stuck))} wait for each "
                "other.",
                "Use another schedule.",
            )
    return tuple(steps)


def slots_needed(schedule: Schedule, channels: Iterable[Channel]) -> dict[Channel, int]:
    """How many slots each channel needs so that no message waits for one, where passes take equally long.

    With them the schedule is known to end, however long passes and messages take.
    """
    return dict(_slots_needed(schedule, tuple(channels)))


@lru_cache(maxsize=_CACHED)
def _slots_needed(schedule: Schedule, channels: tuple[Channel, ...]) -> dict[Channel, int]:
    run = simulate(schedule, channels)
    needed = {}
    for source, target in channels:
        forward, backward = [], []
        for micro in range(schedule.micro_batches):
            sent = run.times[Action(FORWARD, source, micro)][1]
            gradients = run.times[back(schedule, target, micro)][1]
            used = run.times[back(schedule, source, micro)][1]
            given_up = run.times[last(schedule, target, micro)][1]
            forward += [(sent, 1), (given_up, -1)]
            backward += [(gradients, 1), (used, -1)]
        needed[source, target] = max(_most(forward), _most(backward))
    simulate(schedule, channels, slots=needed)
    return needed


def _most(changes: list[tuple[float, int]]) -> int:
    """The highest level; what begins when something ends needs room beside it."""
    level = most = 0
    for _, change in sorted(changes, key=lambda each: (each[0], -each[1])):
        level += change
        most = max(most, level)
    return most


def held(schedule: Schedule) -> list[int]:
    """By piece: of how many micro-batches activations are held at once, at most."""
    return list(_held(schedule))


@lru_cache(maxsize=_CACHED)
def _held(schedule: Schedule) -> tuple[int, ...]:
    counts = [0] * len(schedule.holders)
    most = list(counts)
    last = WEIGHTS if schedule.split else BACKWARD
    for own in schedule.actions:
        for action in own:
            counts[action.piece] += {FORWARD: 1, last: -1}.get(action.kind, 0)
            most[action.piece] = max(most[action.piece], counts[action.piece])
    return tuple(most)


def _complete(schedule: Schedule) -> None:
    kinds = (FORWARD, INPUTS, WEIGHTS) if schedule.split else (FORWARD, BACKWARD)
    for rank, own in enumerate(schedule.actions):
        pieces = [piece for piece, holder in enumerate(schedule.holders) if holder == rank]
        wanted = {Action(k, p, m) for k in kinds for p in pieces for m in range(schedule.micro_batches)}
        if len(own) != len(wanted) or set(own) != wanted:
            odd = wanted.symmetric_difference(own) or {a for a in own if own.count(a) > 1}
            raise PlanError(
                f"The schedule {schedule.name} has {_named(min(odd))} not once on rank {rank}.",
                "Let each rank do each of its passes once.",
            )


def _needs(
    schedule: Schedule, channels: tuple[Channel, ...], slots: Mapping[Channel, int]
) -> dict[Action, list[tuple[Action, Channel | None]]]:
    """What must have ended before an action begins, and the channel on which that is heard of."""
    needs: dict[Action, list[tuple[Action, Channel | None]]] = {
        a: [] for own in schedule.actions for a in own
    }
    for micro in range(schedule.micro_batches):
        for piece in range(len(schedule.holders)):
            gradients = back(schedule, piece, micro)
            needs[gradients].append((Action(FORWARD, piece, micro), None))
            if schedule.split:
                needs[Action(WEIGHTS, piece, micro)].append((gradients, None))
        for source, target in channels:
            between = schedule.holders[source] != schedule.holders[target]
            channel = (source, target) if between else None
            needs[Action(FORWARD, target, micro)].append((Action(FORWARD, source, micro), channel))
            gradients, used = back(schedule, target, micro), back(schedule, source, micro)
            needs[used].append((gradients, channel))
            room = micro - slots[source, target] if slots and between else -1
            if room >= 0:
                needs[Action(FORWARD, source, micro)].append((last(schedule, target, room), channel))
                needs[gradients].append((back(schedule, source, room), channel))
    return needs


def _named(action: Action) -> str:
    return f"{action.kind} of piece {action.piece}, micro-batch {action.micro}"


class Schedules:
    """A plan's schedule, and ones like it for batches of fewer micro-batches.

    Args:
        planned: The schedule of a whole batch.
        channels: Between which pieces messages travel.
        slots: For messages, by channel.
    """

    def __init__(self, planned: Schedule, channels: Iterable[Channel], slots: Mapping[Channel, int]) -> None:
        self._planned, self._channels, self._slots = planned, tuple(channels), slots
        self._by_micro_batches: dict[int, Schedule] = {}

    def of(self, micro_batches: int) -> Schedule:
        """The one for so many micro-batches. Raises PlanError if it would not end."""
        if micro_batches not in self._by_micro_batches:
            schedule = make(self._planned.name, self._planned.ranks, micro_batches)
            simulate(schedule, self._channels, slots=self._slots)  # that it ends
            self._by_micro_batches[micro_batches] = schedule
        return self._by_micro_batches[micro_batches]
