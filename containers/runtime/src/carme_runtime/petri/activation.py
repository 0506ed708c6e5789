"""The marking, and which transition can start with which tokens. It starts nothing itself.

Tasks that run at the same time must end in a marking that they could reach one after the other, in the
order in which they end. So what a task takes, reads, or gives is reserved from its start to its end: tokens
that are read stay, room is kept in places with a capacity, and nothing is given to a place that a task
needs empty.
"""

import pickle
from collections import Counter, deque
from collections.abc import Collection, Iterator
from itertools import combinations
from typing import Any

from carme_runtime.petri.definition import Definition
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.memory import Range, guarding
from carme_runtime.petri.model import Arc, Place, Transition, group

_UNSET = object()
#: What a generator gives is unknown until it ends.
_ANY_NUMBER = 1 << 40


class Token:
    """A value in a place, as bytes; it becomes an object again only for guards."""

    __slots__ = ("_value", "attempts", "data", "failures", "number")

    def __init__(self, number: int, data: bytes, attempts: int = 0) -> None:
        self.number = number
        self.data = data
        self.attempts = attempts  # starts of tasks that have not ended well
        self.failures = 0
        self._value: Any = _UNSET

    @property
    def value(self) -> Any:
        """The object."""
        if self._value is _UNSET:
            self._value = pickle.loads(self.data)
        return self._value


class Task:
    """A transition that has its tokens."""

    __slots__ = ("attempt", "number", "read", "rule", "taken", "tokens")

    def __init__(self, number: int, rule: "Rule", taken: list[Token]) -> None:
        self.number = number
        self.rule = rule
        self.taken = taken
        self.tokens = taken  # with those read, in the order of the arcs
        self.read: list[Token] = []
        self.attempt = 1


class State:
    """A place while the net runs."""

    __slots__ = ("count", "empties", "free", "place", "reading", "reserved", "takers", "tracked", "waiters")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.free: deque[Token] = deque()
        self.reading: dict[int, tuple[Token, int]] = {}  # with the number of readers
        self.takers: list[Rule] = []
        self.waiters: list[Rule] = []  # for room or for emptiness
        self.tracked = place.capacity is not None
        self.count = 0  # of all its tokens; where it is tracked, as what follows
        self.reserved = 0
        self.empties: list[int] = []  # weights of inhibitor arcs of tasks that run

    def limit(self) -> int:
        """How many tokens it may come to hold now."""
        least = self.place.capacity if self.place.capacity is not None else _ANY_NUMBER * 2
        return min(least, *(weight - 1 for weight in self.empties)) if self.empties else least


class Rule:
    """A transition while the net runs."""

    def __init__(self, transition: Transition, states: list[State]) -> None:
        self.transition = transition
        self.index = transition.index
        self.queued = False
        self.arguments = transition.flow.arguments
        arcs = [(arc, states[arc.place.index]) for arc in transition.flow.inputs]
        self.empties = [(state, arc.weight) for arc, state in arcs if arc.kind == "empty"]
        self.inputs = [(arc, state) for arc, state in arcs if arc.kind != "empty"]
        self.counts = [state for arc, state in arcs if arc.kind == "count"]
        self.reads = bool(self.counts) or any(arc.kind == "read" for arc, _ in self.inputs)
        self.takes = Counter({state: 0 for _, state in self.inputs})
        for arc, state in self.inputs:
            self.takes[state] += arc.weight if arc.kind == "take" else 0
        gives: Counter[State] = Counter()
        for arc in transition.flow.outputs:
            gives[states[arc.place.index]] += _ANY_NUMBER if transition.generates else arc.weight
        self.gives = list(gives.items())
        #: Of what can start the highest does.
        self.rank = transition.priority, transition.preference
        self.rejected: set[int] = set()
        self.simple = self.follows = False
        #: Whether it waits until all nodes have reported which ranges they have.
        self.uses_ranges = transition.wants_memory or any(
            arc.place.type is Range for arc in (*transition.flow.inputs, *transition.flow.outputs)
        )

    def settle(self) -> None:
        """See what the quick path can do, once all places are known."""
        touched = [*self.takes, *(state for state, _ in self.gives)]
        waits = self.reads or self.empties or self.transition.needs or any(state.tracked for state in touched)
        self.simple = not waits and not self.transition.guard
        single_input = len(self.inputs) == 1 and self.inputs[0][0].weight == 1
        self.single = self.simple and single_input
        #: Whether a worker could start it with a token that it has, if it knows that the guard passes.
        self.follows = not waits and single_input
        self.tracked_takes = [
            (state, count) for state, count in self.takes.items() if state.tracked and count
        ]
        self.tracked_gives = [(state, count) for state, count in self.gives if state.tracked]


def followers(net: Definition) -> dict[int, list[Transition]]:
    """Transitions that a worker may start itself, by the place whose tokens nobody else can want.

    Such a transition has that one input and the highest priority, and waits for nothing else but a guard.
    It has no limit (the coordinator has to know which task was ended), does not request its attempt (which
    the coordinator counts), and uses no ranges (for which the coordinator chooses the node). Where a place
    has several, each has a guard: the worker goes on if one alone passes.
    """
    activation = Activation(net, {})
    highest = max((rule.rank for rule in activation.rules), default=(0, 0))
    found = {}
    for state in activation.states:
        takers = state.takers
        has_choice = len(takers) == 1 or all(rule.transition.guard for rule in takers)
        if takers and has_choice and all(_may_follow(rule, highest) for rule in takers):
            found[state.place.index] = [rule.transition for rule in takers]
    return found


def _may_follow(rule: Rule, highest: tuple[int, int]) -> bool:
    transition = rule.transition
    counted = transition.wants_attempt or transition.limit is not None
    return rule.follows and rule.rank == highest and not counted and not rule.uses_ranges


class Activation:
    """The marking of a run."""

    def __init__(self, net: Definition, units: dict[str, int]) -> None:
        self.states = [State(place) for place in net.places.values()]
        self.rules = [Rule(transition, self.states) for transition in net.transitions.values()]
        self.units = dict(units)
        self.running: dict[int, Task] = {}
        self._tasks = 0
        self._queues = {rank: deque[Rule]() for rank in sorted({rule.rank for rule in self.rules})}
        self._order = list(reversed(self._queues.values()))
        for rule in self.rules:
            for state in (*rule.counts, *(state for state, _ in rule.empties)):
                state.tracked = True
        for rule in self.rules:
            rule.settle()
            for state in {state for _, state in rule.inputs}:
                state.takers.append(rule)
            waited = [*rule.counts, *(state for state, _ in (*rule.tracked_gives, *rule.empties))]
            for state in set(waited):
                state.waiters.append(rule)
            self._wake(rule)

    def add(self, place: int, token: Token) -> None:
        """Put a token into a place."""
        state = self.states[place]
        state.free.append(token)
        if state.tracked:
            state.count += 1
        for rule in state.takers:
            if not rule.queued:
                self._wake(rule)

    def has_room(self, place: int) -> bool:
        """Whether a place can take one more token from outside."""
        state = self.states[place]
        capacity = state.place.capacity
        return capacity is None or state.count + state.reserved < capacity

    def holds(self, place: int) -> bool:
        """Whether a place has a token that no task has."""
        return bool(self.states[place].free)

    def free(self, place: int) -> list[Token]:
        """The tokens of a place that no task has."""
        return list(self.states[place].free)

    def take(self, place: int) -> list[Token]:
        """Take all tokens that no task has out of a place: they leave the net."""
        state = self.states[place]
        tokens = list(state.free)
        state.free.clear()
        if state.tracked:
            state.count -= len(tokens)
        for waiter in state.waiters:
            self._wake(waiter)
        return tokens

    def next(self, skipped: Collection[int] = ()) -> Task | None:
        """Start a task, of the highest priority that can, and in turn among equals.

        Args:
            skipped: Numbers of transitions that are not to start now.
        """
        if skipped:
            return self._next_but(skipped)
        for queue in self._order:
            while queue:
                rule = queue[0]
                task = self._start(rule)
                if task is not None:
                    if len(queue) > 1:
                        queue.rotate(-1)
                    return task
                queue.popleft()
                rule.queued = False
        return None

    def _next_but(self, skipped: Collection[int]) -> Task | None:
        for queue in self._order:
            for rule in list(queue):
                if rule.index in skipped:
                    continue
                queue.remove(rule)
                task = self._start(rule)
                if task is not None:
                    queue.append(rule)
                    return task
                rule.queued = False
        return None

    def follow(self, rule: Rule, token: Token) -> Task:
        """Start a task of `followers` with the token that it follows on, which no place has seen."""
        return self._run(rule, [token])

    def finish(self, task: Task, gives: list[tuple[int, Token]]) -> None:
        """A task has ended well: what it took is gone, what it gave is there."""
        del self.running[task.number]
        rule = task.rule
        if not rule.simple:
            for state, count in rule.tracked_takes:
                state.count -= count
            if rule.rejected and len(rule.rejected) > 1000:
                rule.rejected.intersection_update(t.number for _, state in rule.inputs for t in state.free)
            self._release(task)
        for place, token in gives:
            self.add(place, token)

    def give_back(self, task: Task, begun: bool = True) -> None:
        """A task has not ended well, or not even `begun`: its tokens can be taken again."""
        if not begun:
            for token in task.taken:
                token.attempts -= 1
        del self.running[task.number]
        rule, rest = task.rule, iter(task.taken)
        for arc, state in rule.inputs:
            if arc.kind == "take":
                state.free.extendleft([next(rest) for _ in range(arc.weight)][::-1])
                for taker in state.takers:
                    self._wake(taker)
        if not rule.simple:
            self._release(task)
        self._wake(rule)

    def marking(self) -> dict[str, list[Token]]:
        """All tokens; those that a running task has taken are still there."""
        found = {
            state.place.name: [*(token for token, _ in state.reading.values()), *state.free]
            for state in self.states
        }
        for task in self.running.values():
            rest = iter(task.taken)
            for arc, state in task.rule.inputs:
                if arc.kind == "take":
                    found[state.place.name].extend(next(rest) for _ in range(arc.weight))
        return found

    def _wake(self, rule: Rule) -> None:
        if not rule.queued:
            rule.queued = True
            self._queues[rule.rank].append(rule)

    def _start(self, rule: Rule) -> Task | None:
        if rule.single:
            free = rule.inputs[0][1].free
            if not free:
                return None
            return self._run(rule, [free.popleft()])
        if not rule.simple and not self._allowed(rule):
            return None
        if any(len(state.free) < count for state, count in rule.takes.items()):
            return None
        if rule.reads or rule.transition.guard:
            return self._search(rule)
        return self._run(
            rule, [state.free.popleft() for arc, state in rule.inputs for _ in range(arc.weight)]
        )

    def _run(self, rule: Rule, taken: list[Token], tokens: list[Token] | None = None) -> Task:
        self._tasks += 1
        task = Task(self._tasks, rule, taken)
        if tokens is not None:
            task.tokens = tokens
        self.running[task.number] = task
        attempt = 0
        for token in taken:
            token.attempts += 1
            if token.attempts > attempt:
                attempt = token.attempts
        task.attempt = attempt or 1
        if not rule.simple:
            self._reserve(task)
        return task

    def _allowed(self, rule: Rule) -> bool:
        """Whether resources, inhibitors and room let a transition start."""
        for name, count in rule.transition.needs.items():
            if self.units.get(name, 0) < count:
                return False
        for state, weight in rule.empties:
            if state.count + state.reserved >= weight:
                return False
        for state, weight in rule.tracked_gives:
            if weight >= _ANY_NUMBER:
                if state.empties:
                    return False
            elif state.count + state.reserved % _ANY_NUMBER - rule.takes[state] + weight > state.limit():
                return False
        return True

    def _reserve(self, task: Task) -> None:
        for name, count in task.rule.transition.needs.items():
            self.units[name] -= count
        for state, weight in task.rule.tracked_gives:
            state.reserved += weight
        for state, weight in task.rule.empties:
            state.empties.append(weight)

    def _release(self, task: Task) -> None:
        rule = task.rule
        for state, weight in rule.tracked_gives:
            state.reserved -= weight
        for state, weight in rule.empties:
            state.empties.remove(weight)
        woken = {*rule.tracked_gives, *rule.empties, *rule.tracked_takes}
        for state in {state for state, _ in woken}:
            for waiter in state.waiters:
                self._wake(waiter)
        for token in task.read:
            self._stop_reading(rule, token)
        if rule.transition.needs:
            for name, count in rule.transition.needs.items():
                self.units[name] += count
            for waiting in self.rules:
                if waiting.transition.needs:
                    self._wake(waiting)

    def _stop_reading(self, rule: Rule, token: Token) -> None:
        for _, state in rule.inputs:
            if token.number in state.reading:
                readers = state.reading[token.number][1] - 1
                if readers:
                    state.reading[token.number] = (token, readers)
                else:
                    del state.reading[token.number]
                    state.free.appendleft(token)
                for taker in state.takers:
                    self._wake(taker)
                return

    def _search(self, rule: Rule) -> Task | None:
        """Start with the first tokens that the guard takes."""
        guard = rule.transition.guard
        alone = len(rule.inputs) == 1 and rule.inputs[0][0].weight == 1 and not rule.counts
        for chosen in self._choices(rule.inputs, set()):
            if guard is not None:
                if alone and chosen[0].number in rule.rejected:
                    continue
                if not self._passes(rule, chosen):
                    if alone:
                        rule.rejected.add(chosen[0].number)
                    continue
            return self._take(rule, chosen)
        return None

    def _choices(self, inputs: list[tuple[Arc, State]], used: set[int]) -> Iterator[list[Token]]:
        if not inputs:
            yield []
            return
        (arc, state), rest = inputs[0], inputs[1:]
        if arc.kind == "count":
            number = Token(0, pickle.dumps(state.count))
            for following in self._choices(rest, used):
                yield [number, *following]
            return
        available: list[Token] = list(state.free)
        if arc.kind == "read":
            available = [*(token for token, _ in state.reading.values()), *available]
        available = [token for token in available if token.number not in used]
        for chosen in combinations(available, arc.weight):
            for following in self._choices(rest, used | {token.number for token in chosen}):
                yield [*chosen, *following]

    def _passes(self, rule: Rule, chosen: list[Token]) -> bool:
        try:
            with guarding():
                return bool(rule.transition.guard(*group(rule.arguments, [token.value for token in chosen])))  # type: ignore[misc]
        except Exception as error:
            raise PetriError(
                f"The guard of transition {rule.transition.name} failed: {type(error).__name__}: {error}.",
                "Mend it and resume the run.",
            ) from error

    def _take(self, rule: Rule, chosen: list[Token]) -> Task:
        taken, read, rest = [], [], iter(chosen)
        for arc, state in rule.inputs:
            for token in (next(rest) for _ in range(arc.weight)):
                if arc.kind == "count":
                    continue
                if arc.kind == "read":
                    readers = state.reading.get(token.number, (token, 0))[1]
                    if not readers:
                        state.free.remove(token)
                    state.reading[token.number] = (token, readers + 1)
                    read.append(token)
                else:
                    state.free.remove(token)
                    taken.append(token)
        task = self._run(rule, taken, chosen)
        task.read = read
        return task
