"""Splits operators that take long over several workers: by output channels, or by rows with halos.

Operators that follow each other, each the only user of the last one's result, are split
together. By channels each part has its share of the first operator's weights (Conv, ConvTranspose, Gemm,
MatMul) and needs all of its input; element-wise operators, normalisation and pooling of these channels belong
to it. By rows each part computes some rows of the last result and reads the rows of the input that these
depend on: halos are computed twice, and nothing is exchanged between the operators; that also holds for
operators that branch and join again, as around residual sums. Both give the model's results to rounding.
Whether a split is worth while is decided by the plan's predicted time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from carme_runtime.graph import Graph, Operator, Parameter, Timing, Value
from carme_runtime.onnx.library import library
from carme_runtime.onnx.loading import Model
from carme_runtime.onnx.nodes import needed
from carme_runtime.onnx.rows import POOLS, ROW_AXIS, Piece, Rows, copied, number_of, slice_of, window

CHANNELS, ROWS = "channels", "rows"
#: Bytes that a processor copies in a millisecond, to take values apart and to join them.
COPIED = 4e6

#: Of these each number depends on one number of the first input; their other inputs are constants.
_POINTWISE = frozenset(
    (
        "Abs",
        "Cast",
        "Clip",
        "Elu",
        "Erf",
        "Exp",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "Mish",
        "Neg",
        "Relu",
        "Selu",
        "Sigmoid",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Tanh",
    )
)
_WITH_CONSTANT = frozenset(("Add", "Sub", "Mul", "Div"))
#: Of these, with several inputs that are not constants, each row depends on one row of each.
_JOINS = frozenset(("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Concat"))
_NORMALISED = "BatchNormalization"
#: The axis of output channels in the weights of these.
_WEIGHTS = {"Conv": 0, "ConvTranspose": 1}
_PRODUCTS = frozenset(("Gemm", "MatMul"))


@dataclass(frozen=True)
class Split:
    """Operators that follow each other and are split together.

    Args:
        operators: Their names.
        by: CHANNELS or ROWS.
        axis: Of the last one's result along which it is taken apart.
        parts: How many.
    """

    operators: tuple[str, ...]
    by: str
    axis: int
    parts: int

    def __str__(self) -> str:
        first, *rest = self.operators
        more = f" and the {len(rest)} after it" if rest else ""
        return f"{first}{more}: {self.parts} parts by {self.by}"


@dataclass(frozen=True)
class _WeightPart:
    name: str
    of: str
    axis: int
    begin: int
    end: int


@dataclass
class _Pieces:
    before: list[Piece] = field(default_factory=list)
    parts: list[list[Piece]] = field(default_factory=list)
    joined: list[Piece] = field(default_factory=list)
    weights: list[_WeightPart] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def all(self) -> list[Piece]:
        return [*self.before, *(piece for part in self.parts for piece in part), *self.joined]


class Splitter:
    """Knows which operators of a model can be split, and splits them.

    Args:
        model: Which.
        graph: Of it, with its costs.
    """

    def __init__(self, model: Model, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self._nodes = {node.name: node for node in model.nodes}
        self._weights = {each.name: tuple(each.dims) for each in model.proto.graph.initializer}
        self._operators = {each.name: each for each in graph.operators}
        proto = model.proto.graph
        self._known = {each.name: each for each in (*proto.value_info, *proto.input, *proto.output)}

    def candidates(self, parts: int) -> list[list[Split]]:
        """Groups of splits: each group is of operators in a row, and of one group some or all may be made."""
        seen, found = set[str](), []
        for operator in self.graph.operators:
            if operator.name in seen:
                continue
            row = self._row(operator.name)
            seen.update(row)
            found += self._groups(row, parts)
        found += self._across_joins(parts)
        return sorted(found, key=lambda group: -sum(map(self.milliseconds, group)))

    def milliseconds(self, split: Split) -> float:
        """What its operators take unsplit."""
        return sum(self._operators[name].forward_ms(self.graph.samples) for name in split.operators)

    def _row(self, name: str) -> list[str]:
        """The operators from this one on, as long as each is the only user of the last one's result."""
        row, operators = [name], self.graph.operators
        while True:
            outputs = self._operators[row[-1]].outputs
            users = self.graph.users[outputs[0]] if len(outputs) == 1 else ()
            if len(users) != 1 or users[0] == len(operators):
                return row
            row.append(operators[users[0]].name)

    def _groups(self, row: Sequence[str], parts: int) -> list[list[Split]]:
        found: list[list[Split]] = []
        by_rows = self._by_rows(row, parts)
        found += [[split] for split in by_rows]
        pieces = [piece for split in by_rows for piece in self._at_strides(split, parts)]
        found += [pieces] if len(pieces) > len(by_rows) else []
        channels = self._by_channels(row, parts)
        return [*found, *([channels] if channels else [])]

    def _by_rows(self, row: Sequence[str], parts: int) -> list[Split]:
        """The longest stretches that can be split by rows."""
        found: list[Split] = []
        stretch: list[str] = []
        for name in [*row, ""]:
            if name and self._is_local(name):
                stretch.append(name)
                continue
            split = self._rows(stretch, parts)
            found += [split] if split else []
            stretch = []
        return found

    def _at_strides(self, split: Split, parts: int) -> list[Split]:
        """The same operators, in a split of their own after each that makes fewer rows: halos begin anew."""
        found: list[Split | None] = []
        stretch: list[str] = []
        for name in split.operators:
            stretch.append(name)
            source_height, result_height = self._heights(name)
            if result_height < source_height:
                found.append(self._rows(stretch, parts))
                stretch = []
        return [each for each in (*found, self._rows(stretch, parts)) if each]

    def _across_joins(self, parts: int) -> list[list[Split]]:
        """Stretches by rows that branch and join again, as residual networks do."""
        found: list[list[Split]] = []
        for stretch in self._stretches():
            for ends in (self._makes_fewer_rows, self._has_join):
                splits: list[Split | None] = []
                names: list[str] = []
                for segment in stretch:
                    names += segment
                    if ends(segment):
                        splits.append(self._rows(names, parts))
                        names = []
                group = [each for each in (*splits, self._rows(names, parts)) if each]
                found += [group] if group else []
        return found

    def _stretches(self) -> list[list[list[str]]]:
        """Segments in a row that can be split by rows, where one of them has a join.

        A segment is what lies between two places at which a single value crosses.
        """
        found: list[list[list[str]]] = [[]]
        for begin, end in pairwise([0, *_narrow_places(self.graph), len(self.graph.operators)]):
            names = [each.name for each in self.graph.operators[begin:end]]
            if self._is_segment(names):
                found[-1].append(names)
            else:
                found.append([])
        return [stretch for stretch in found if any(map(self._has_join, stretch))]

    def _is_segment(self, names: Sequence[str]) -> bool:
        if not names or not all(self._is_local(name) or self._is_join(self._nodes[name]) for name in names):
            return False
        return len(self._sources([self._nodes[name] for name in names])) == 1

    def _has_join(self, names: Sequence[str]) -> bool:
        return any(self._is_join(self._nodes[name]) for name in names)

    def _makes_fewer_rows(self, names: Sequence[str]) -> bool:
        return self._heights(names[-1])[1] < self._heights(names[0])[0]

    def _is_join(self, node: Any) -> bool:
        """Whether it has several inputs, and each of their rows belongs to one row of what it makes."""
        inputs = list(node.input)
        if node.op_type not in _JOINS or node.domain or len(inputs) < 2:
            return False
        if any(name not in self.graph.value or not self._is_fixed(name) for name in inputs):
            return False
        shapes = {self.graph.value[name].shape for name in inputs}
        if node.op_type != "Concat":
            return len(shapes) == 1
        return number_of(node, "axis", 0) == 1 and len({shape[ROW_AXIS] for shape in shapes}) == 1

    def _rows(self, stretch: Sequence[str], parts: int) -> Split | None:
        if not any(self._nodes[name].op_type in _WEIGHTS for name in stretch):
            return None
        split = Split(tuple(stretch), ROWS, ROW_AXIS, min(parts, self._heights(stretch[-1])[1]))
        return split if split.parts > 1 and self._pieces(split) else None

    def _heights(self, name: str) -> tuple[int, int]:
        """Rows that an operator is given, and makes."""
        node, value = self._nodes[name], self.graph.value
        return value[node.input[0]].shape[ROW_AXIS], value[node.output[0]].shape[ROW_AXIS]

    def _is_local(self, name: str) -> bool:
        """Whether each row that it makes depends on rows nearby, and heights are the same for all inputs."""
        node = self._nodes[name]
        if not node.input or node.input[0] not in self.graph.value:
            return False
        value, kind = self.graph.value[node.input[0]], node.op_type
        if len(value.shape) <= ROW_AXIS or not self._is_fixed(value.name) or not self._is_plain(node):
            return False
        if kind in _WITH_CONSTANT:
            axis, size = self._constant_axis(node, ROW_AXIS)
            return axis < 0 or size == 1
        if kind in _POINTWISE or self._is_normalised(node):
            return True
        return (kind == "Conv" or kind in POOLS) and window(node, self._weights) is not None

    def _is_plain(self, node: Any) -> bool:
        """Whether it has one result, and all of its inputs but the first one are constants."""
        operands = [*node.input[1:], *(name for name in needed(node) if name != node.input[0])]
        outputs = [name for name in node.output if name]
        constant = all(name in self._weights for name in operands if name)
        return not node.domain and len(outputs) == 1 and constant

    def _is_fixed(self, name: str) -> bool:
        info = self._known.get(name)
        if info is None or not info.type.HasField("tensor_type"):
            return False
        dims = info.type.tensor_type.shape.dim
        return len(dims) > ROW_AXIS and dims[ROW_AXIS].dim_value > 0

    def _constant_axis(self, node: Any, axis: int) -> tuple[int, int]:
        """The axis of an element-wise operator's constant that goes along an axis of the other input."""
        dims, rank = self._weights[node.input[1]], len(self.graph.value[node.input[0]].shape)
        if len(dims) > rank:
            return 0, -1
        own = axis - rank + len(dims)
        return own, dims[own] if own >= 0 else 1

    def _by_channels(self, row: Sequence[str], parts: int) -> list[Split]:
        found: list[Split] = []
        place = 0
        while place < len(row):
            node = self._nodes[row[place]]
            place += 1
            axis = self._channel_axis(node)
            if axis is None:
                continue
            own = [node.name]
            while place < len(row) and self._follows(self._nodes[row[place]], axis):
                own.append(row[place])
                place += 1
            count = self.graph.value[node.output[0]].shape[axis]
            if min(parts, count) > 1:
                found.append(Split(tuple(own), CHANNELS, axis, min(parts, count)))
        return found

    def _channel_axis(self, node: Any) -> int | None:
        """The axis of output channels of an operator with weights; None where it cannot be split by them."""
        if (node.op_type not in _WEIGHTS and node.op_type not in _PRODUCTS) or not self._is_plain(node):
            return None
        shape = self.graph.value[node.output[0]].shape if node.output[0] in self.graph.value else ()
        if len(node.input) < 2 or node.input[0] not in self.graph.value or node.input[1] == node.input[0]:
            return None
        if node.op_type in _WEIGHTS:
            return 1 if len(shape) > 1 and number_of(node, "group", 1) == 1 else None
        dims = self._weights[node.input[1]]
        return len(shape) - 1 if len(dims) > 1 and len(shape) > 1 else None

    def _follows(self, node: Any, axis: int) -> bool:
        """Whether an operator works on each channel by itself."""
        if not self._is_plain(node) or node.input[0] not in self.graph.value:
            return False
        value, kind = self.graph.value[node.input[0]], node.op_type
        if kind in _WITH_CONSTANT:
            own, size = self._constant_axis(node, axis)
            return own < 0 or size in (1, value.shape[axis])
        pooled = kind in POOLS or kind.startswith("Global")
        if axis == 1 and len(value.shape) > 2 and (pooled or self._is_normalised(node)):
            return True
        return kind in _POINTWISE

    def _is_normalised(self, node: Any) -> bool:
        """A normalisation of each channel with constants."""
        own = node.op_type == _NORMALISED and not number_of(node, "training_mode", 0)
        return own and all(len(self._weights[name]) == 1 for name in node.input[1:])

    def _pieces(self, split: Split) -> _Pieces | None:
        """The nodes of a split; None where a part would have no rows of its own."""
        return self._row_pieces(split) if split.by == ROWS else self._channel_pieces(split)

    def _row_pieces(self, split: Split) -> _Pieces | None:
        pieces, nodes = _Pieces(), [self._nodes[name] for name in split.operators]
        (source,) = self._sources(nodes)
        values = {source, *(node.output[0] for node in nodes)}
        heights = {name: self.graph.value[name].shape[ROW_AXIS] for name in values}
        rows = Rows(nodes, source, heights, self._weights, self.model.opset)
        for part, span in enumerate(_bounds(heights[nodes[-1].output[0]], split.parts)):
            label = f"{nodes[0].output[0]}__rows{part}"
            found = rows.part(part, span, label, pieces.numbers)
            if found is None:
                return None
            own, (begin, end) = found
            cut = slice_of(source, label, self.model.opset, pieces.numbers, begin, end)
            taken = Piece(cut, "", 0.0, source, end - begin)
            if self.graph.maker[source] < 0:  # what a task is given by the program it takes apart itself
                own.insert(0, taken)
            else:
                pieces.before.append(taken)
            pieces.parts.append(own)
        self._join(pieces, split)
        return pieces

    def _sources(self, nodes: Sequence[Any]) -> list[str]:
        """Values that nodes are given by others."""
        outputs = {name for node in nodes for name in node.output}
        found = dict.fromkeys(name for node in nodes for name in needed(node) if name not in self._weights)
        return [name for name in found if name not in outputs]

    def _channel_pieces(self, split: Split) -> _Pieces:
        pieces, nodes = _Pieces(), [self._nodes[name] for name in split.operators]
        count = self.graph.value[nodes[0].output[0]].shape[split.axis]
        for part, (begin, end) in enumerate(_bounds(count, split.parts)):
            own = []
            for place, node in enumerate(nodes):
                copy = copied(node, part)
                if not place:
                    copy.input[0] = node.input[0]
                for input_index, axis in self._weight_axes(node, split.axis, count):
                    of = node.input[input_index]
                    weight = _WeightPart(f"{of}__axis{axis}_{begin}_{end}", of, axis, begin, end)
                    pieces.weights.append(weight)
                    copy.input[input_index] = weight.name
                share = (end - begin) / count
                own.append(Piece(copy, node.name, share, node.output[0], end - begin))
            pieces.parts.append(own)
        pieces.weights = list(dict.fromkeys(pieces.weights))
        self._join(pieces, split)
        return pieces

    def _weight_axes(self, node: Any, axis: int, count: int) -> list[tuple[int, int]]:
        """Which inputs of an operator are taken apart with the channels, and along which axis."""
        kind, dims = node.op_type, [self._weights.get(name, ()) for name in node.input]
        if kind in _WEIGHTS:
            return [(1, _WEIGHTS[kind]), *([(2, 0)] if len(dims) > 2 and dims[2] else [])]
        if kind in _PRODUCTS:
            columns = 0 if kind == "Gemm" and number_of(node, "transB", 0) else len(dims[1]) - 1
            bias = len(dims) > 2 and dims[2] and dims[2][-1] == count
            return [(1, columns), *([(2, len(dims[2]) - 1)] if bias else [])]
        if kind == _NORMALISED:
            return [(input_index, 0) for input_index in range(1, 5)]
        if kind in _WITH_CONSTANT:
            own, size = self._constant_axis(node, axis)
            return [(1, own)] if own >= 0 and size == count > 1 else []
        return []

    def _join(self, pieces: _Pieces, split: Split) -> None:
        last = self._nodes[split.operators[-1]].output[0]
        parts = [part[-1].node.output[0] for part in pieces.parts]
        node = library("onnx").helper.make_node("Concat", parts, [last], f"{last}__join", axis=split.axis)
        pieces.joined.append(Piece(node, "", 0.0, last, self.graph.value[last].shape[split.axis]))

    def split_graph(self, splits: Sequence[Split]) -> tuple[Graph, tuple[int, ...]]:
        """The graph with these operators split, and the places where their parts begin and are joined."""
        first, gone, values, parameters = self._replaced(splits)
        operators: list[Operator] = []
        cuts: list[int] = []
        for operator in self.graph.operators:
            if operator.name in first:
                split, pieces = first[operator.name]
                groups = pieces.before, [each for part in pieces.parts for each in part], pieces.joined
                for group in groups:
                    operators += [self._operator(each, split, pieces) for each in group]
                    cuts.append(len(operators))
                cuts.pop()
            elif operator.name not in gone:
                operators.append(operator)
        used = {name for each in operators for name in (*each.inputs, *each.outputs)}
        used.update(self.graph.inputs)
        known = {name for each in operators for name in each.parameters}
        whole = [each for each in self.graph.values if each.name in used]
        return replace(
            self.graph,
            values=(*whole, *values),
            operators=tuple(operators),
            parameters=tuple(each for each in (*self.graph.parameters, *parameters) if each.name in known),
        ), tuple(sorted({cut for cut in cuts if cut}))

    def _replaced(
        self, splits: Sequence[Split]
    ) -> tuple[dict[str, tuple[Split, _Pieces]], set[str], list[Value], list[Parameter]]:
        """By each split's first operator its nodes; the operators that go; new values and parameters."""
        first: dict[str, tuple[Split, _Pieces]] = {}
        gone, values, parameters = set[str](), dict[str, Value](), dict[str, Parameter]()
        for split in splits:
            pieces = self._pieces(split)
            assert pieces is not None
            first[split.operators[0]] = split, pieces
            gone.update(split.operators)
            for piece in pieces.all():
                whole, name = self.graph.value[piece.value], piece.node.output[0]
                if name != whole.name:
                    values[name] = _part_of(whole, name, split.axis, piece.size)
            for each in pieces.weights:
                share = (each.end - each.begin) / self._weights[each.of][each.axis]
                size = round(self.graph.parameter[each.of].bytes * share)
                parameters[each.name] = Parameter(each.name, size, trainable=False)
            parameters.update({name: Parameter(name, 8, trainable=False) for name in pieces.numbers})
        return first, gone, list(values.values()), list(parameters.values())

    def _operator(self, piece: Piece, split: Split, pieces: _Pieces) -> Operator:
        node, samples = piece.node, self.graph.samples
        whole = self._operators.get(piece.of)
        moved = 2 * _part_of(self.graph.value[piece.value], "", split.axis, piece.size).bytes / COPIED
        own = {*self._weights, *pieces.numbers, *(each.name for each in pieces.weights)}
        inputs = [name for name in dict.fromkeys(node.input) if name]
        return Operator(
            node.name,
            node.op_type,
            whole.module if whole else "",
            tuple(name for name in inputs if name not in own),
            tuple(node.output),
            tuple(name for name in inputs if name in own),
            (Timing(samples, whole.forward_ms(samples) * piece.share if whole else moved, 0.0),),
        )

    def split_model(self, splits: Sequence[Split]) -> Model:
        """The model with these operators split."""
        onnx = library("onnx")
        proto = type(self.model.proto)()
        proto.CopyFrom(self.model.proto)
        pieces_by_operator = {split.operators[0]: self._pieces(split) for split in splits}
        gone = {name for split in splits for name in split.operators}
        nodes: list[Any] = []
        for node in self.model.nodes:
            pieces = pieces_by_operator.get(node.name)
            nodes += [each.node for each in pieces.all()] if pieces else []
            nodes += [node] if node.name not in gone else []
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        whole = {each.name: each for each in self.model.proto.graph.initializer}
        found = [pieces for pieces in pieces_by_operator.values() if pieces]
        # Operators may share a weight, and cuts of it.
        for each in dict.fromkeys(weight for pieces in found for weight in pieces.weights):
            array = onnx.numpy_helper.to_array(whole[each.of])
            part = array[(slice(None),) * each.axis + (slice(each.begin, each.end),)]
            proto.graph.initializer.append(onnx.numpy_helper.from_array(part.copy(), each.name))
        for pieces in found:
            for name, number in pieces.numbers.items():
                array = library("numpy").array([number], "int64")
                proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return replace(self.model, proto=proto)


def _narrow_places(graph: Graph) -> list[int]:
    """Places before which a single value crosses: the result of the operator before it."""
    count, level, found = [0] * (len(graph.operators) + 2), 0, []
    for name, users in graph.users.items():
        if users:
            count[graph.maker[name] + 1] += 1
            count[users[-1] + 1] -= 1
    for place in range(len(graph.operators)):
        level += count[place]
        if place and level == 1 and any(graph.users[name] for name in graph.operators[place - 1].outputs):
            found.append(place)
    return found


def _bounds(count: int, parts: int) -> list[tuple[int, int]]:
    ends = [count * k // parts for k in range(parts + 1)]
    return list(pairwise(ends))


def _part_of(whole: Value, name: str, axis: int, size: int) -> Value:
    """A value that is shorter along an axis."""
    full = whole.shape[axis]
    shape = (*whole.shape[:axis], size, *whole.shape[axis + 1 :])
    return replace(whole, name=name, shape=shape, bytes=whole.bytes * size // max(full, 1))
