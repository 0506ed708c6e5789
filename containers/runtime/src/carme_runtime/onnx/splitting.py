"""Splits operators that take long over several workers: by output channels, or by rows with halos.

Operators that follow each other and of which each is the only user of the last one's result are split
together. By channels each part has its share of the first operator's weights (Conv, ConvTranspose, Gemm,
MatMul) and needs all of its input; element-wise operators, normalisation and pooling of these channels belong
to it. By rows each part computes some rows of the last result and reads the rows of the input that these
depend on: halos are computed twice, and nothing is exchanged between the operators. Both give the model's
results to rounding. Whether a split is worth while is decided by the plan's predicted time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from carme_runtime.graph import Graph, Operator, Parameter, Timing, Value
from carme_runtime.onnx.library import library
from carme_runtime.onnx.loading import Model
from carme_runtime.onnx.nodes import needed

CHANNELS, ROWS = "channels", "rows"
#: Bytes that a processor copies in a millisecond, to take values apart and to join them.
COPIED = 4e6
_ROW_AXIS = 2
#: Of a Slice, whose bounds are inputs since opset 10.
_SLICE_OPSET = 10

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
_POOLS = frozenset(("MaxPool", "AveragePool"))
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
        ways: How many parts.
    """

    operators: tuple[str, ...]
    by: str
    axis: int
    ways: int

    def __str__(self) -> str:
        first, *others = self.operators
        more = f" and the {len(others)} after it" if others else ""
        return f"{first}{more}: {self.ways} parts by {self.by}"


@dataclass(frozen=True)
class _WeightPart:
    name: str
    of: str
    axis: int
    begin: int
    end: int


@dataclass
class _Piece:
    """A node of a split graph: `of` is the operator that it is a part of, or empty; `share` of its work."""

    node: Any
    of: str
    share: float
    made: str
    size: int


@dataclass
class _Pieces:
    before: list[_Piece] = field(default_factory=list)
    parts: list[list[_Piece]] = field(default_factory=list)
    joined: list[_Piece] = field(default_factory=list)
    weights: list[_WeightPart] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def all(self) -> list[_Piece]:
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

    def candidates(self, ways: int) -> list[list[Split]]:
        """Groups of splits: each group is of operators in a row, and of one group some or all may be made."""
        seen, found = set[str](), []
        for operator in self.graph.operators:
            if operator.name in seen:
                continue
            row = self._row(operator.name)
            seen.update(row)
            found += self._groups(row, ways)
        return sorted(found, key=lambda group: -sum(map(self.milliseconds, group)))

    def milliseconds(self, split: Split) -> float:
        """What its operators take unsplit."""
        return sum(self._operators[name].forward_ms(self.graph.samples) for name in split.operators)

    def _row(self, name: str) -> list[str]:
        """The operators from this one on of which each is the only one to use the last one's result."""
        row, operators = [name], self.graph.operators
        while True:
            outputs = self._operators[row[-1]].outputs
            users = self.graph.users[outputs[0]] if len(outputs) == 1 else ()
            if len(users) != 1 or users[0] == len(operators):
                return row
            row.append(operators[users[0]].name)

    def _groups(self, row: Sequence[str], ways: int) -> list[list[Split]]:
        found: list[list[Split]] = []
        by_rows = self._by_rows(row, ways)
        found += [[split] for split in by_rows]
        pieces = [piece for split in by_rows for piece in self._at_strides(split, ways)]
        found += [pieces] if len(pieces) > len(by_rows) else []
        channels = self._by_channels(row, ways)
        return [*found, *([channels] if channels else [])]

    def _by_rows(self, row: Sequence[str], ways: int) -> list[Split]:
        """The longest stretches that can be split by rows."""
        found: list[Split] = []
        stretch: list[str] = []
        for name in [*row, ""]:
            if name and self._is_local(name):
                stretch.append(name)
                continue
            split = self._rows(stretch, ways)
            found += [split] if split else []
            stretch = []
        return found

    def _at_strides(self, split: Split, ways: int) -> list[Split]:
        """The same operators, in a split of their own after each that makes fewer rows: halos begin anew."""
        found: list[Split | None] = []
        stretch: list[str] = []
        for name in split.operators:
            stretch.append(name)
            given, made = self._heights(name)
            if made < given:
                found.append(self._rows(stretch, ways))
                stretch = []
        return [each for each in (*found, self._rows(stretch, ways)) if each]

    def _rows(self, stretch: Sequence[str], ways: int) -> Split | None:
        if not any(self._nodes[name].op_type in _WEIGHTS for name in stretch):
            return None
        split = Split(tuple(stretch), ROWS, _ROW_AXIS, min(ways, self._heights(stretch[-1])[1]))
        return split if split.ways > 1 and self._pieces(split) else None

    def _heights(self, name: str) -> tuple[int, int]:
        """Rows that an operator is given, and makes."""
        node, value = self._nodes[name], self.graph.value
        return value[node.input[0]].shape[_ROW_AXIS], value[node.output[0]].shape[_ROW_AXIS]

    def _is_local(self, name: str) -> bool:
        """Whether each row that it makes depends on rows nearby, and heights are the same for all inputs."""
        node = self._nodes[name]
        if not node.input or node.input[0] not in self.graph.value:
            return False
        value, kind = self.graph.value[node.input[0]], node.op_type
        if len(value.shape) <= _ROW_AXIS or not self._is_fixed(value.name) or not self._is_plain(node):
            return False
        if kind in _WITH_CONSTANT:
            axis, size = self._constant_axis(node, _ROW_AXIS)
            return axis < 0 or size == 1
        if kind in _POINTWISE or self._is_normalised(node):
            return True
        return (kind == "Conv" or kind in _POOLS) and _window(node, self._weights) is not None

    def _is_plain(self, node: Any) -> bool:
        """Whether it has one result, and all of its inputs but the first one are constants."""
        others = [*node.input[1:], *(name for name in needed(node) if name != node.input[0])]
        outputs = [name for name in node.output if name]
        constant = all(name in self._weights for name in others if name)
        return not node.domain and len(outputs) == 1 and constant

    def _is_fixed(self, name: str) -> bool:
        info = self._known.get(name)
        if info is None or not info.type.HasField("tensor_type"):
            return False
        dims = info.type.tensor_type.shape.dim
        return len(dims) > _ROW_AXIS and dims[_ROW_AXIS].dim_value > 0

    def _constant_axis(self, node: Any, axis: int) -> tuple[int, int]:
        """The axis of an element-wise operator's constant that goes along an axis of the other input."""
        dims, rank = self._weights[node.input[1]], len(self.graph.value[node.input[0]].shape)
        if len(dims) > rank:
            return 0, -1
        own = axis - rank + len(dims)
        return own, dims[own] if own >= 0 else 1

    def _by_channels(self, row: Sequence[str], ways: int) -> list[Split]:
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
            if min(ways, count) > 1:
                found.append(Split(tuple(own), CHANNELS, axis, min(ways, count)))
        return found

    def _channel_axis(self, node: Any) -> int | None:
        """The axis of output channels of an operator with weights; None where it cannot be split by them."""
        if (node.op_type not in _WEIGHTS and node.op_type not in _PRODUCTS) or not self._is_plain(node):
            return None
        shape = self.graph.value[node.output[0]].shape if node.output[0] in self.graph.value else ()
        if len(node.input) < 2 or node.input[0] not in self.graph.value or node.input[1] == node.input[0]:
            return None
        if node.op_type in _WEIGHTS:
            return 1 if len(shape) > 1 and _number(node, "group", 1) == 1 else None
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
        pooled = kind in _POOLS or kind.startswith("Global")
        if axis == 1 and len(value.shape) > 2 and (pooled or self._is_normalised(node)):
            return True
        return kind in _POINTWISE

    def _is_normalised(self, node: Any) -> bool:
        """A normalisation of each channel with constants."""
        own = node.op_type == _NORMALISED and not _number(node, "training_mode", 0)
        return own and all(len(self._weights[name]) == 1 for name in node.input[1:])

    def _pieces(self, split: Split) -> _Pieces | None:
        """The nodes of a split; None where a part would have no rows of its own."""
        return self._row_pieces(split) if split.by == ROWS else self._channel_pieces(split)

    def _row_pieces(self, split: Split) -> _Pieces | None:
        made, nodes = _Pieces(), [self._nodes[name] for name in split.operators]
        given = nodes[0].input[0]
        for part, (begin, end) in enumerate(_bounds(self._heights(nodes[-1].name)[1], split.ways)):
            own: list[_Piece] = []
            for node in reversed(nodes):
                height, full = self._heights(node.name)
                window = _window(node, self._weights) or (1, 1, 0)
                reach, stride, pad = window
                low, high = begin * stride - pad, (end - 1) * stride + reach - pad
                pads = max(-low, 0), max(high - height, 0)
                share, rows = (end - begin) / full, end - begin
                begin, end = max(low, 0), min(high, height)
                if begin >= end:
                    return None
                copy = _copied(node, part)
                if node.op_type == "Conv" or node.op_type in _POOLS:
                    _set_row_pads(copy, self._weights, pads)
                own.append(_Piece(copy, node.name, share, node.output[0], rows))
            own.reverse()
            label = f"{nodes[0].output[0]}__rows{part}"
            cut = _slice(given, label, self.model.opset, made.numbers, begin, end)
            own[0].node.input[0] = cut.output[0]
            taken = _Piece(cut, "", 0.0, given, end - begin)
            if self.graph.maker[given] < 0:  # what a task is given by the program it takes apart itself
                own.insert(0, taken)
            else:
                made.before.append(taken)
            made.parts.append(own)
        self._join(made, split)
        return made

    def _channel_pieces(self, split: Split) -> _Pieces:
        made, nodes = _Pieces(), [self._nodes[name] for name in split.operators]
        count = self.graph.value[nodes[0].output[0]].shape[split.axis]
        for part, (begin, end) in enumerate(_bounds(count, split.ways)):
            own = []
            for place, node in enumerate(nodes):
                copy = _copied(node, part)
                if not place:
                    copy.input[0] = node.input[0]
                for which, axis in self._weight_axes(node, split.axis, count):
                    of = node.input[which]
                    weight = _WeightPart(f"{of}__axis{axis}_{begin}_{end}", of, axis, begin, end)
                    made.weights.append(weight)
                    copy.input[which] = weight.name
                share = (end - begin) / count
                own.append(_Piece(copy, node.name, share, node.output[0], end - begin))
            made.parts.append(own)
        made.weights = list(dict.fromkeys(made.weights))
        self._join(made, split)
        return made

    def _weight_axes(self, node: Any, axis: int, count: int) -> list[tuple[int, int]]:
        """Which inputs of an operator are taken apart with the channels, and along which axis."""
        kind, dims = node.op_type, [self._weights.get(name, ()) for name in node.input]
        if kind in _WEIGHTS:
            return [(1, _WEIGHTS[kind]), *([(2, 0)] if len(dims) > 2 and dims[2] else [])]
        if kind in _PRODUCTS:
            columns = 0 if kind == "Gemm" and _number(node, "transB", 0) else len(dims[1]) - 1
            bias = len(dims) > 2 and dims[2] and dims[2][-1] == count
            return [(1, columns), *([(2, len(dims[2]) - 1)] if bias else [])]
        if kind == _NORMALISED:
            return [(which, 0) for which in range(1, 5)]
        if kind in _WITH_CONSTANT:
            own, size = self._constant_axis(node, axis)
            return [(1, own)] if own >= 0 and size == count > 1 else []
        return []

    def _join(self, made: _Pieces, split: Split) -> None:
        last = self._nodes[split.operators[-1]].output[0]
        parts = [part[-1].node.output[0] for part in made.parts]
        node = library("onnx").helper.make_node("Concat", parts, [last], f"{last}__join", axis=split.axis)
        made.joined.append(_Piece(node, "", 0.0, last, self.graph.value[last].shape[split.axis]))

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
                whole, name = self.graph.value[piece.made], piece.node.output[0]
                if name != whole.name:
                    values[name] = _part_of(whole, name, split.axis, piece.size)
            for each in pieces.weights:
                share = (each.end - each.begin) / self._weights[each.of][each.axis]
                size = round(self.graph.parameter[each.of].bytes * share)
                parameters[each.name] = Parameter(each.name, size, trainable=False)
            parameters.update({name: Parameter(name, 8, trainable=False) for name in pieces.numbers})
        return first, gone, list(values.values()), list(parameters.values())

    def _operator(self, piece: _Piece, split: Split, pieces: _Pieces) -> Operator:
        node, samples = piece.node, self.graph.samples
        whole = self._operators.get(piece.of)
        moved = 2 * _part_of(self.graph.value[piece.made], "", split.axis, piece.size).bytes / COPIED
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
        made = {split.operators[0]: self._pieces(split) for split in splits}
        gone = {name for split in splits for name in split.operators}
        nodes: list[Any] = []
        for node in self.model.nodes:
            pieces = made.get(node.name)
            nodes += [each.node for each in pieces.all()] if pieces else []
            nodes += [node] if node.name not in gone else []
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        whole = {each.name: each for each in self.model.proto.graph.initializer}
        found = [pieces for pieces in made.values() if pieces]
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


def _bounds(count: int, ways: int) -> list[tuple[int, int]]:
    ends = [count * k // ways for k in range(ways + 1)]
    return list(pairwise(ends))


def _part_of(whole: Value, name: str, axis: int, size: int) -> Value:
    """A value of which there is less along an axis."""
    full = whole.shape[axis]
    shape = (*whole.shape[:axis], size, *whole.shape[axis + 1 :])
    return replace(whole, name=name, shape=shape, bytes=whole.bytes * size // max(full, 1))


def _copied(node: Any, part: int) -> Any:
    """The node of a part: what it is given first, and what it makes, are the part's."""
    copy = type(node)()
    copy.CopyFrom(node)
    copy.name = f"{node.name}__part{part}"
    copy.input[0] = f"{node.input[0]}__part{part}"
    for place, name in enumerate(node.output):
        copy.output[place] = f"{name}__part{part}" if name else ""
    return copy


def _slice(given: str, label: str, opset: int, numbers: dict[str, int], begin: int, end: int) -> Any:
    make = library("onnx").helper.make_node
    if opset < _SLICE_OPSET:
        bounds: dict[str, Any] = {"axes": [_ROW_AXIS], "starts": [begin], "ends": [end]}
        return make("Slice", [given], [label], label, **bounds)
    own = {f"{label}_start": begin, f"{label}_end": end, f"{label}_axis": _ROW_AXIS}
    numbers.update(own)
    return make("Slice", [given, *own], [label], label)


def _attributes(node: Any) -> dict[str, Any]:
    helper = library("onnx").helper
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def _number(node: Any, name: str, default: int) -> int:
    return int(_attributes(node).get(name, default))


def _window(node: Any, weights: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Rows on which a row depends, the step from row to row, and rows of padding before the first one.

    None where it does not pay to find out: rounding up, and padding that depends on the size.
    """
    if node.op_type != "Conv" and node.op_type not in _POOLS:
        return 1, 1, 0
    given = _attributes(node)
    if given.get("ceil_mode") or given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", b""):
        return None
    kernel = given.get("kernel_shape") or weights[node.input[1]][2:]
    dilation, stride = given.get("dilations", [1])[0], given.get("strides", [1])[0]
    return (kernel[0] - 1) * dilation + 1, stride, _pads(given, len(kernel))[0]


def _pads(given: Mapping[str, Any], rank: int) -> list[int]:
    return list(given.get("pads") or [0] * (2 * rank))


def _set_row_pads(node: Any, weights: Mapping[str, tuple[int, ...]], rows: tuple[int, int]) -> None:
    given = _attributes(node)
    rank = len(given.get("kernel_shape") or weights[node.input[1]][2:])
    pads = _pads(given, rank)
    pads[0], pads[rank] = rows
    for place in reversed(range(len(node.attribute))):
        if node.attribute[place].name in ("pads", "auto_pad"):
            del node.attribute[place]
    node.attribute.append(library("onnx").helper.make_attribute("pads", pads))
