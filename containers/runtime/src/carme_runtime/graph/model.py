"""The graph: values, and operators in an order in which they can run, each with its measured cost."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from carme_runtime.errors import CarmeRuntimeError

VERSION = 3  # since operators have `accumulating_ms`


class GraphError(CarmeRuntimeError):
    """A graph that cannot be read or makes no sense."""


@dataclass(frozen=True)
class Value:
    """What an operator makes, or the model is given.

    Args:
        name: In the graph.
        shape: At the graph's number of samples; empty for a plain number.
        dtype: Such as float32; int for a plain number.
        bytes: At the graph's number of samples.
        per_sample: Whether it grows with the number of samples.
        gradient: Whether a gradient may flow through it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    per_sample: bool
    gradient: bool


@dataclass(frozen=True)
class Timing:
    """How long an operator takes with a number of samples, in milliseconds."""

    samples: int
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class Parameter:
    """A tensor that belongs to the model: trained, frozen, or a buffer such as a running mean.

    Two names of one tensor (tied weights) are one parameter under its first name.
    """

    name: str
    bytes: int
    trainable: bool


@dataclass(frozen=True)
class Operator:
    """One operation.

    Args:
        name: In the graph.
        kind: The framework's name of the operation.
        module: The path of the layer that it belongs to; empty for the model itself.
        inputs: Names of values, in order.
        outputs: Names of values.
        parameters: Names of parameters that it uses.
        timings: By number of samples, growing.
        held_bytes: What it keeps for its backward pass and nothing before it keeps already.
        workspace_bytes: What it takes for itself while it runs.
        backward_bytes: What its backward pass takes while it runs, with gradients that it gets and makes.
        holds: Values that it keeps for its backward pass, whether or not others before it keep them.
        within: The value in whose memory its output lies; empty: it has its own.
        beside: An earlier operator on whose device it must run, as it changes or takes apart what that one
            makes; or empty.
        draws_mask: Whether it is a Dropout layer that drops something. Its mask is drawn for a whole batch.
        accumulating_ms: What adding its parameters' gradients to those of an earlier micro-batch takes.
    """

    name: str
    kind: str
    module: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    timings: tuple[Timing, ...] = ()
    held_bytes: int = 0
    workspace_bytes: int = 0
    beside: str = ""
    backward_bytes: int = 0
    holds: tuple[str, ...] = ()
    within: str = ""
    draws_mask: bool = False
    accumulating_ms: float = 0.0

    def forward_ms(self, samples: int) -> float:
        """Its forward pass, between measured numbers of samples on a straight line."""
        return on_line([(t.samples, t.forward_ms) for t in self.timings], samples)

    def backward_ms(self, samples: int) -> float:
        """Its backward pass."""
        return on_line([(t.samples, t.backward_ms) for t in self.timings], samples)


@dataclass(frozen=True)
class Links:
    """What a message between two devices costs.

    Args:
        times: Bytes and microseconds, growing.
        source: Where that is from.
        within: The same between two ranks of one node; empty: nothing says that it differs.
    """

    times: tuple[tuple[int, float], ...] = ((0, 20.0), (1 << 20, 860.0))
    source: str = "assumed: Ethernet of 10 Gbit/s"
    within: tuple[tuple[int, float], ...] = ()

    def milliseconds(self, size: float, near: bool = False) -> float:
        """How long `size` bytes take; `near`: within a node."""
        return on_line(list((near and self.within) or self.times), size) / 1000


@dataclass(frozen=True)
class Graph:
    """A model.

    Args:
        source: How it was made: `torch.export`, or `modules` where only layers in a row were seen.
        device: On which it was measured.
        samples: To which the bytes refer.
        inputs: Names of the values that the model is given.
        results: Names of the values that it returns.
        values: All of them.
        operators: In an order in which they can run.
        parameters: All of them.
        links: Between devices.
    """

    source: str
    device: str
    samples: int
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    parameters: tuple[Parameter, ...]
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        known = set(self.inputs)
        names = {value.name for value in self.values}
        earlier: set[str] = set()
        parameters = {parameter.name for parameter in self.parameters}
        for operator in self.operators:
            unknown = [name for name in operator.inputs if name not in known]
            unknown += [name for name in operator.parameters if name not in parameters]
            unknown += [name for name in operator.outputs if name not in names]
            unknown += [operator.beside] if operator.beside and operator.beside not in earlier else []
            if unknown:
                raise GraphError(
                    f"Operator {operator.name} uses {unknown[0]}, which nothing before it makes.",
                    "Trace the model again.",
                )
            known.update(operator.outputs)
            earlier.add(operator.name)
        missing = [name for name in self.results if name not in known]
        if missing or not self.operators:
            raise GraphError(
                f"Nothing in the graph makes its result {missing[0]}." if missing else "The graph is empty.",
                "Trace the model again.",
            )

    @cached_property
    def value(self) -> dict[str, Value]:
        """Values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def parameter(self) -> dict[str, Parameter]:
        """Parameters by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def maker(self) -> dict[str, int]:
        """Which operator, by its place, makes a value; -1: the model is given it."""
        makers = dict.fromkeys(self.inputs, -1)
        for place, operator in enumerate(self.operators):
            makers.update(dict.fromkeys(operator.outputs, place))
        return makers

    @cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Which operators, by their places, use a value; the number of operators stands for the caller."""
        using: dict[str, list[int]] = {value.name: [] for value in self.values}
        for place, operator in enumerate(self.operators):
            for name in dict.fromkeys(operator.inputs):
                using[name].append(place)
        for name in dict.fromkeys(self.results):
            using[name].append(len(self.operators))
        return {name: tuple(places) for name, places in using.items()}

    @cached_property
    def plain(self) -> frozenset[str]:
        """Operators that compute numbers from sizes of the model's inputs: every piece can do so itself."""
        known, found = set(self.inputs), set[str]()
        for operator in self.operators:
            is_plain = all(self.value[name].dtype == "int" for name in operator.outputs)
            if is_plain and known.issuperset(operator.inputs):
                known.update(operator.outputs)
                found.add(operator.name)
        return frozenset(found)

    @cached_property
    def with_gradients(self) -> frozenset[str]:
        """Values through which gradients may flow."""
        reached: set[str] = set()
        for operator in self.operators:
            if reached.intersection(operator.inputs) or any(
                self.parameter[p].trainable for p in operator.parameters
            ):
                reached.update(operator.outputs)
        return frozenset(reached)

    @cached_property
    def own_held(self) -> tuple[int, ...]:
        """What each operator holds besides values: masks, indices and the like."""
        seen: set[str] = set()
        found = []
        for operator in self.operators:
            new = set(operator.holds) - seen
            seen |= new
            found.append(max(operator.held_bytes - sum(self.value[name].bytes for name in new), 0))
        return tuple(found)

    @cached_property
    def held_before(self) -> tuple[int, ...]:
        """What the operators before each place hold for their backward passes; at last all of them."""
        return tuple(itertools.accumulate((operator.held_bytes for operator in self.operators), initial=0))

    @cached_property
    def accumulating_before(self) -> tuple[float, ...]:
        """Milliseconds of adding up the gradients of the operators before each place; at last of all."""
        return tuple(itertools.accumulate((o.accumulating_ms for o in self.operators), initial=0.0))

    @cached_property
    def _times(self) -> dict[int, tuple[tuple[float, ...], tuple[float, ...]]]:
        return {}

    def times_before(self, samples: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Milliseconds of forward and of backward passes of the operators before each place; at last all."""
        if samples not in self._times:
            forward = (operator.forward_ms(samples) for operator in self.operators)
            backward = (operator.backward_ms(samples) for operator in self.operators)
            sums = (tuple(itertools.accumulate(times, initial=0.0)) for times in (forward, backward))
            self._times[samples] = (next(sums), next(sums))
        return self._times[samples]

    def value_bytes(self, name: str, samples: int) -> float:
        """The size of a value at another number of samples."""
        value = self.value[name]
        return value.bytes * samples / self.samples if value.per_sample else value.bytes

    def parameter_bytes(self, names: Iterable[str], trainable: bool = False) -> int:
        """Bytes of the named parameters, each counted once; of those alone that are trained, on request."""
        chosen = (self.parameter[name] for name in set(names))
        return sum(each.bytes for each in chosen if each.trainable or not trainable)

    def same_model(self, graph: "Graph", /) -> bool:
        """Whether both are of the same operators and parameters, whatever these cost."""

        def shape(graph: Graph) -> object:
            wired = [(o.name, o.kind, o.inputs, o.outputs, o.parameters) for o in graph.operators]
            return graph.inputs, graph.results, wired, graph.parameters

        return shape(self) == shape(graph)


def on_line(points: list[tuple[int, float]], at: float) -> float:
    """The value at `at` on lines between points that grow; the last two lead on, and nothing is negative."""
    if not points:
        return 0.0
    if len(points) == 1:
        size, value = points[0]
        return value * at / size if size else value
    after = min(max(bisect_left([size for size, _ in points], at), 1), len(points) - 1)
    (x, y), (x2, y2) = points[after - 1], points[after]
    return max(y + (y2 - y) * (at - x) / (x2 - x), 0.0)
