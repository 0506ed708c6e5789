"""Some rows of what operators compute together, and the nodes that compute these alone.

A node reads those rows of its inputs on which its own depend. Where several nodes read the same result, one
more row than the other perhaps, it has the rows of all of them, and each gets its own by a Slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carme_runtime.onnx.library import library

ROW_AXIS = 2
POOLS = frozenset(("MaxPool", "AveragePool"))
#: Of a Slice, whose bounds are inputs since opset 10.
_SLICE_OPSET = 10

Span = tuple[int, int]


@dataclass
class Piece:
    """A node of a split graph.

    Attributes:
        node: The node.
        of: The operator that it is a part of, or empty.
        share: Of that one's work.
        value: The value that it computes a part of.
        size: Of the part, along the axis of the split.
    """

    node: Any
    of: str
    share: float
    value: str
    size: int


@dataclass(frozen=True)
class Rows:
    """What is needed to compute some rows.

    Attributes:
        nodes: In an order in which they can run; what they have no weights for is a result of others among
            them, or `source`.
        source: The one value that comes from outside.
        heights: Of all values.
        weights: Shapes of constants.
        opset: Of the model.
    """

    nodes: Sequence[Any]
    source: str
    heights: Mapping[str, int]
    weights: Mapping[str, tuple[int, ...]]
    opset: int

    def part(
        self, number: int, rows: Span, label: str, numbers: dict[str, int]
    ) -> tuple[list[Piece], Span] | None:
        """The nodes that compute some rows of the last result.

        Args:
            number: Of the part.
            rows: The first one, and the one after the last.
            label: Of the rows of `source` that they read.
            numbers: Gets constants that they need.

        Returns:
            The nodes, and the rows of `source`; None where one of them would have none.
        """
        found = self._needed(rows)
        if found is None:
            return None
        spans, reads = found
        pieces: list[Piece] = []
        cuts = set[str]()

        def cut(name: str, wanted: Span) -> str:
            own, span = label if name == self.source else f"{name}__part{number}", spans[name]
            if wanted == span:
                return own
            part_name = f"{own}__rows{wanted[0]}_{wanted[1]}"
            if part_name not in cuts:
                cuts.add(part_name)
                begin, end = wanted[0] - span[0], wanted[1] - span[0]
                piece = slice_of(own, part_name, self.opset, numbers, begin, end)
                pieces.append(Piece(piece, "", 0.0, name, end - begin))
            return part_name

        for node in self.nodes:
            copy, (low, high) = copied(node, number), reads[node.name]
            for place, name in enumerate(node.input):
                if name in self.heights:
                    copy.input[place] = cut(name, (max(low, 0), min(high, self.heights[name])))
            if node.op_type == "Conv" or node.op_type in POOLS:
                pads = max(-low, 0), max(high - self.heights[node.input[0]], 0)
                _set_row_pads(copy, self.weights, pads)
            begin, end = spans[node.output[0]]
            share = (end - begin) / self.heights[node.output[0]]
            pieces.append(Piece(copy, node.name, share, node.output[0], end - begin))
        return pieces, spans[self.source]

    def _needed(self, rows: Span) -> tuple[dict[str, Span], dict[str, Span]] | None:
        """The rows of each value, and those that each node reads, with padding; None: one would have none."""
        spans, reads = {self.nodes[-1].output[0]: rows}, {}
        for node in reversed(self.nodes):
            begin, end = spans[node.output[0]]
            reach, stride, pad = window(node, self.weights) or (1, 1, 0)
            low, high = begin * stride - pad, (end - 1) * stride + reach - pad
            reads[node.name] = low, high
            for name in node.input:
                if name not in self.heights:
                    continue
                first, last = max(low, 0), min(high, self.heights[name])
                if first >= last:
                    return None
                known = spans.get(name, (first, last))
                spans[name] = min(first, known[0]), max(last, known[1])
        return spans, reads


def copied(node: Any, part: int) -> Any:
    """The node of a part: what it is given first, and what it makes, are the part's."""
    copy = type(node)()
    copy.CopyFrom(node)
    copy.name = f"{node.name}__part{part}"
    copy.input[0] = f"{node.input[0]}__part{part}"
    for place, name in enumerate(node.output):
        copy.output[place] = f"{name}__part{part}" if name else ""
    return copy


def slice_of(value: str, label: str, opset: int, numbers: dict[str, int], begin: int, end: int) -> Any:
    """A node that takes rows of a value.

    Args:
        value: Its name.
        label: Of the rows.
        opset: Of the model.
        numbers: Gets constants that it needs.
        begin: The first row.
        end: The one after the last.
    """
    make = library("onnx").helper.make_node
    if opset < _SLICE_OPSET:
        bounds: dict[str, Any] = {"axes": [ROW_AXIS], "starts": [begin], "ends": [end]}
        return make("Slice", [value], [label], label, **bounds)
    own = {f"{label}_start": begin, f"{label}_end": end, f"{label}_axis": ROW_AXIS}
    numbers.update(own)
    return make("Slice", [value, *own], [label], label)


def _attributes(node: Any) -> dict[str, Any]:
    helper = library("onnx").helper
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def number_of(node: Any, name: str, default: int) -> int:
    """An attribute that is a whole number."""
    return int(_attributes(node).get(name, default))


def window(node: Any, weights: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Rows on which a row depends, the step from row to row, and rows of padding before the first one.

    None where it does not pay to find out: rounding up, and padding that depends on the size.
    """
    if node.op_type != "Conv" and node.op_type not in POOLS:
        return 1, 1, 0
    attributes = _attributes(node)
    if attributes.get("ceil_mode") or attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", b""):
        return None
    kernel = attributes.get("kernel_shape") or weights[node.input[1]][2:]
    dilation, stride = attributes.get("dilations", [1])[0], attributes.get("strides", [1])[0]
    return (kernel[0] - 1) * dilation + 1, stride, _pads(attributes, len(kernel))[0]


def _pads(attributes: Mapping[str, Any], rank: int) -> list[int]:
    return list(attributes.get("pads") or [0] * (2 * rank))


def _set_row_pads(node: Any, weights: Mapping[str, tuple[int, ...]], rows: tuple[int, int]) -> None:
    attributes = _attributes(node)
    rank = len(attributes.get("kernel_shape") or weights[node.input[1]][2:])
    pads = _pads(attributes, rank)
    pads[0], pads[rank] = rows
    for place in reversed(range(len(node.attribute))):
        if node.attribute[place].name in ("pads", "auto_pad"):
            del node.attribute[place]
    node.attribute.append(library("onnx").helper.make_attribute("pads", pads))
