"""Computes what depends on constants alone, once, and removes what nobody uses."""

from typing import Any

from carme_runtime.onnx.library import library
from carme_runtime.onnx.nodes import RANDOM, graphs, late_constants, needed

#: What a model may take with what is computed, and what is computed may take beside large weights: a file of
#: protobuf ends at 2 GiB.
_MOST_BYTES, _LEAST_BYTES = 1 << 30, 64 << 20


def fold_constants(proto: Any, notices: list[str]) -> Any:
    """A model whose constant parts are initializers.

    Constants become initializers and unused nodes go by passes of onnx-ir; ONNX Runtime, which is to run the
    rest, computes what depends on constants alone. What is too large for the model stays a node, right before
    the first one that uses it.
    """
    before = len(proto.graph.node)
    proto = _passes(proto)
    try:
        _compute(proto, notices)
    except Exception as error:  # of ONNX Runtime, of protobuf: what is wrong shows when the model runs
        reason = " ".join(str(error).split())[:300]
        notices.append(f"Constants are not computed before the model runs: {reason}")
    proto = _passes(proto)
    _reorder(proto.graph, late_constants(list(proto.graph.node), {e.name for e in proto.graph.initializer}))
    _detach_outputs(proto.graph)
    if before != len(proto.graph.node):
        notices.append(f"{before} nodes became {len(proto.graph.node)} by constant folding.")
    return proto


def _passes(proto: Any) -> Any:
    ir, common = library("onnx_ir"), library("onnx_ir.passes.common")
    model = ir.from_proto(proto)
    for each in (
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.RemoveUnusedNodesPass(),
    ):
        model = each(model).model
    return ir.to_proto(model)


def _compute(proto: Any, notices: list[str]) -> None:
    """Nothing is changed where it fails."""
    onnx = library("onnx")
    graph = proto.graph
    most = max(_MOST_BYTES - proto.ByteSize(), _LEAST_BYTES)
    large = _large(graph, most)
    constant = {each.name for each in graph.initializer}
    types = {each.name: each.type for each in graph.value_info}
    chosen = []
    for node in graph.node:
        inner = any(a.HasField("g") or a.graphs for a in node.attribute)
        plain = node.op_type not in RANDOM and not inner and node.domain in ("", "ai.onnx")
        if plain and constant.issuperset(needed(node)) and large.isdisjoint(node.output):
            if any(name in types and not types[name].HasField("tensor_type") for name in node.output):
                continue
            chosen.append(node)
            constant.update(node.output)
    if not chosen:
        return
    own = {name for node in chosen for name in node.output if name}
    used = {name for node in graph.node if node not in chosen for name in needed(node)}
    used |= {each.name for each in graph.output}
    wanted = sorted(own & used)
    inputs = {name for node in chosen for name in needed(node)}
    part = onnx.helper.make_graph(
        chosen,
        "constants",
        [],
        [onnx.ValueInfoProto(name=name) for name in wanted],
        [each for each in graph.initializer if each.name in inputs],
    )
    model = onnx.helper.make_model(
        part, opset_imports=proto.opset_import, ir_version=max(proto.ir_version, 4)
    )
    values = dict(zip(wanted, _run(model), strict=True))
    small, staying = _fitting(chosen, values, most)
    if len(small) < len(values):
        notices.append(f"Constants that do not fit into {most >> 20} MiB are computed when the model runs.")
    names = {node.name for node in chosen} - staying
    _reorder(graph, [node for node in graph.node if node.name not in names])
    graph.initializer.extend(onnx.numpy_helper.from_array(values[name], name) for name in small)


def _fitting(chosen: list[Any], values: dict[str, Any], most: int) -> tuple[list[str], set[str]]:
    """The values to keep, the smallest first, and the names of the nodes that make the others."""
    small, total = set[str](), 0
    for name in sorted(values, key=lambda each: (values[each].nbytes, each)):
        total += values[name].nbytes
        if total <= most:
            small.add(name)
    missing, staying = set(values) - small, set[str]()
    for node in reversed(chosen):
        if missing.intersection(node.output):
            staying.add(node.name)
            small.difference_update(node.output)
            missing.update(name for name in needed(node) if name not in small)
    return sorted(small), staying


def _reorder(graph: Any, nodes: list[Any]) -> None:
    """Let a graph have these of its nodes, in this order."""
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _large(graph: Any, most: int) -> set[str]:
    """Values that are known to be too large for the model."""
    onnx = library("onnx")
    found = set()
    for each in (*graph.value_info, *graph.output):
        tensor = each.type.tensor_type
        if not tensor.elem_type or not tensor.HasField("shape"):
            continue
        size = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
        for dimension in tensor.shape.dim:
            size *= dimension.dim_value if dimension.HasField("dim_value") else 1
        if size > most:
            found.add(each.name)
    return found


def _run(model: Any) -> list[Any]:
    runtime = library("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {})


def _detach_outputs(graph: Any) -> None:
    """Let a node make each output that is a constant: it goes through an Identity."""
    onnx = library("onnx")
    outputs = {each.name for each in graph.output}
    for tensor in graph.initializer:
        if tensor.name in outputs:
            name, tensor.name = tensor.name, f"{tensor.name}__constant"
            for inner in graphs(graph):
                _rename(inner, name, tensor.name, outputs=inner is not graph)
            graph.node.append(onnx.helper.make_node("Identity", [tensor.name], [name], name=f"output_{name}"))


def _rename(graph: Any, old: str, new: str, outputs: bool) -> None:
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name == old:
                node.input[place] = new
    for each in graph.output if outputs else ():
        if each.name == old:
            each.name = new
