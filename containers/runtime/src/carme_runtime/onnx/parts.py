"""Takes a model apart: each fused task becomes a model of its own, and all share one file of weights.

Weights that lie in another file than their model are mapped by ONNX Runtime, so the workers of a node have
in memory once those weights that it does not copy into another order.
"""

from pathlib import Path
from typing import Any

from carme_runtime.onnx.files import replaced
from carme_runtime.onnx.library import library
from carme_runtime.onnx.loading import Model
from carme_runtime.onnx.nodes import needed
from carme_runtime.onnx.plans import Plan, Task
from carme_runtime.onnx.splitting import Splitter

#: Smaller weights stay in the models: ONNX's shape inference needs to see some of them.
_INLINE, _ALIGN = 1024, 4096
WEIGHTS = "weights.bin"


def split_model(model: Model, found: Plan) -> Model:
    """The model with the operators split that its plan splits."""
    return Splitter(model, found.unsplit).split_model(found.splits) if found.unsplit else model


def write_parts(model: Model, found: Plan, folder: Path) -> list[Path]:
    """Write a model file for each task of a plan, and their weights.

    Args:
        model: That was planned, with its operators split.
        found: Its plan.
        folder: That gets the files.
    """
    onnx = library("onnx")
    weights = {each.name: each for each in model.proto.graph.initializer}
    nodes = {node.name: node for node in model.nodes}
    used = {name for node in model.nodes for name in needed(node)}
    with replaced(folder / WEIGHTS) as file:
        placed = {name: _place(onnx, weights[name], file) for name in weights if name in used}
    types = _types(onnx, model, found)
    paths = []
    for task in found.tasks:
        proto = _part(onnx, model, task, [nodes[name] for name in task.operators], placed, types)
        path = folder / f"{task.name}.onnx"
        with replaced(path) as file:
            file.write(proto.SerializeToString())
        paths.append(path)
    return paths


def _place(onnx: Any, tensor: Any, file: Any) -> Any:
    """The tensor, its bytes in the file of weights where they are many."""
    strings = tensor.data_type == onnx.TensorProto.STRING
    if strings or tensor.ByteSize() < _INLINE:
        return tensor
    data = tensor.raw_data or onnx.numpy_helper.to_array(tensor).tobytes()
    file.write(b"\0" * (-file.tell() % _ALIGN))
    external = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    external.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", WEIGHTS), ("offset", file.tell()), ("length", len(data))):
        external.external_data.add(key=key, value=str(value))
    file.write(data)
    return external


def _types(onnx: Any, model: Model, found: Plan) -> dict[str, Any]:
    """What to declare each value as: what is known of it whatever the inputs, and else its rank."""
    graph = model.proto.graph
    known = {each.name: each for each in (*graph.value_info, *graph.input, *graph.output)}
    for name, value in found.graph.value.items():
        info = known.get(name)
        if info is not None and info.type.HasField("tensor_type") and info.type.tensor_type.elem_type:
            continue
        if value.dtype in ("list", "dict", "NoneType"):
            continue
        dtype = library("numpy").dtype("O" if value.dtype == "object" else value.dtype)
        kind = onnx.helper.np_dtype_to_tensor_dtype(dtype)
        known[name] = onnx.helper.make_tensor_value_info(name, kind, [None] * len(value.shape))
    return known


def _part(
    onnx: Any, model: Model, task: Task, nodes: list[Any], placed: dict[str, Any], types: dict[str, Any]
) -> Any:
    used = dict.fromkeys(name for node in nodes for name in needed(node))
    graph = onnx.helper.make_graph(
        nodes,
        task.name,
        [types[name] for name in task.inputs],
        [types.get(name) or onnx.ValueInfoProto(name=name) for name in task.outputs],
        [placed[name] for name in used if name in placed],
    )
    return onnx.helper.make_model(
        graph, opset_imports=model.proto.opset_import, ir_version=max(model.proto.ir_version, 4)
    )
