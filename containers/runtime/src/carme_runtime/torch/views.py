"""Which operators of a traced model make views of what they are given."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import operator
from collections.abc import Mapping

import torch
from torch import fx

from carme_runtime.torch.traced import Traced

# Their results depend on where the elements lie, and those of a message lie in order.
_BY_STRIDES = ("as_strided", "_reshape_alias")
_VIEW = torch.ops.aten.view.default


def viewed(node: fx.Node) -> fx.Node | None:
    """What a node's result is a view of; of one of a sequence of views, what has them all."""
    if node.target is operator.getitem:
        sequence = node.args[0]
        return sequence if isinstance(sequence, fx.Node) and viewed(sequence) is not None else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(result.alias_info is not None for result in schema.returns):
        return None
    return next((a for a in node.args if isinstance(a, fx.Node)), None)


def views_of(traced: Traced, within: Mapping[str, str]) -> dict[str, str]:
    """By name of a value: the one that it is a view of, where the view can be made again elsewhere.

    Elsewhere the value has come in a message. Views of what an operator changes in place do not count: which
    of them see the change depends on the memory that they share.

    Args:
        traced: The model.
        within: By name of a value, the one in whose memory it lay; see `Operator`.
    """
    changed = {each.beside for each in traced.graph.operators if each.beside and each.kind != "getitem"}
    found: dict[str, str] = {}
    roots: dict[str, str] = {}
    for node in traced.nodes:
        source = viewed(node)
        if source is None:
            continue
        root = roots[node.name] = roots.get(source.name, source.name)
        if within.get(node.name) and root not in changed and _is_pure(node):
            found[node.name] = source.name
    return found


def replaceable(traced: Traced) -> frozenset[str]:
    """Names of the `view` operators in whose place `reshape` does the same, and copies where it has to.

    `view` refuses strides that do not suit the shape. Behind a message strides differ from those in the whole
    model, as its elements lie in order. A copy will do unless an operator changes that memory afterwards.
    """
    operators = {each.name: each for each in traced.graph.operators}
    changed, found = set[str](), set[str]()
    for node in reversed(traced.nodes):
        known = operators.get(node.name)
        if known is not None and known.beside and known.kind != "getitem":
            changed.add(known.beside)
        if node.target is not _VIEW:
            continue
        root = node
        while (source := viewed(root)) is not None:
            root = source
        # Parameters and buffers have the strides that they had: no message brings them.
        if root.name not in changed and root.name not in traced.tensors and root.op != "get_attr":
            found.add(node.name)
    return frozenset(found)


def _is_pure(node: fx.Node) -> bool:
    """Whether it changes nothing, and its result depends on the elements alone."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or not (schema.is_mutable or schema.name.partition("::")[2] in _BY_STRIDES)
