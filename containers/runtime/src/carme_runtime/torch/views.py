"""Which operators of a traced model make views of what they are given."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import operator
from collections.abc import Mapping

from torch import fx

from carme_runtime.torch.traced import Traced

# Their results depend on where the elements lie, and those of a message lie in order.
_BY_STRIDES = ("as_strided", "_reshape_alias")


def viewed(node: fx.Node) -> fx.Node | None:
    """What a node's result is a view of; of one of several views, what has them all."""
    if node.target is operator.getitem:
        listed = node.args[0]
        return listed if isinstance(listed, fx.Node) and viewed(listed) is not None else None
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


def _is_pure(node: fx.Node) -> bool:
    """Whether it changes nothing, and its result depends on the elements alone."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or not (schema.is_mutable or schema.name.partition("::")[2] in _BY_STRIDES)
