"""Turns a model into the graph with its cost table, which partitioner, drawing and plans read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carme_runtime.graph import Graph, Links, Operator, Parameter, Timing, Value
from carme_runtime.onnx.files import temporary
from carme_runtime.onnx.library import library
from carme_runtime.onnx.loading import Model
from carme_runtime.onnx.nodes import needed
from carme_runtime.onnx.sessions import result_of, session

#: Handing a value over within a node is a range of shared memory; what it costs is the task more than bytes.
LINKS = Links(((0, 150.0), (1 << 20, 450.0)), "assumed: shared memory of a node")
#: Runs; each operator's shortest time counts.
ROUNDS = 3
#: For estimates: operations and bytes of one processor in a millisecond.
_OPERATIONS, _BYTES, _LEAST_MS = 60e6, 4e6, 0.003


def trace(model: Model, example: Mapping[str, Any], *, measure: bool = True) -> Graph:
    """The graph of a model, with the shapes that an example gives.

    Args:
        model: Which.
        example: An array for each input; see `example_of`.
        measure: Take each operator's time from ONNX Runtime's profile; False: estimate it from sizes.

    Raises:
        OnnxError: ONNX Runtime refuses the model or fails with the example.
    """
    values, times = _observed(model, example, ROUNDS if measure else 0)
    parameters = {each.name: each for each in model.proto.graph.initializer}
    sizes = {name: _size(tensor) for name, tensor in parameters.items()}
    samples = _samples(model, example)
    known = set(values)
    operators = []
    for node in model.nodes:
        used = needed(node)
        milliseconds = times.get(node.name, 0.0) if measure else _estimate(node, values, parameters)
        operators.append(
            Operator(
                name=node.name,
                kind=node.op_type,
                module=_layer(node.name),
                inputs=tuple(name for name in used if name in known),
                outputs=tuple(name for name in node.output if name),
                parameters=tuple(name for name in used if name in sizes),
                timings=(Timing(samples, milliseconds, 0.0),),
            )
        )
    growing = _is_dynamic(model)
    return Graph(
        source=f"ONNX, opset {model.opset}",
        device="cpu",
        samples=samples,
        inputs=tuple(each.name for each in model.inputs),
        results=model.outputs,
        values=tuple(_value(name, array, samples if growing else 0) for name, array in values.items()),
        operators=tuple(operators),
        parameters=tuple(Parameter(name, size, trainable=False) for name, size in sizes.items()),
        links=LINKS,
    )


def _observed(
    model: Model, example: Mapping[str, Any], rounds: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """All values of one run, and each node's shortest time in milliseconds."""
    onnx, runtime = library("onnx"), library("onnxruntime")
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    names = [name for node in model.nodes for name in node.output if name]
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    plain = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with temporary() as folder:
        source = as_source(proto, folder, "traced")
        profiled = session(
            source,
            name=model.name,
            graph_optimization_level=plain,
            enable_profiling=rounds > 0,
            profile_file_prefix=f"{folder}/profile",
        )
        results = result_of(profiled, names, dict(example), model.name)
        for _ in range(rounds):
            profiled.run(names, dict(example))
        times = _times(Path(profiled.end_profiling())) if rounds else {}
    return {**example, **dict(zip(names, results, strict=True))}, times


def as_source(proto: Any, folder: Path, name: str) -> Any:
    """What a session can be made from: bytes, or files where a model is too large for them."""
    if proto.ByteSize() < 1 << 30:
        return proto.SerializeToString()
    onnx = library("onnx")
    onnx.save(proto, folder / f"{name}.onnx", save_as_external_data=True, location=f"{name}.weights")
    return str(folder / f"{name}.onnx")


def _times(profile: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in json.loads(profile.read_text()):
        name, _, end = event.get("name", "").rpartition("_kernel_time")
        if event.get("cat") == "Node" and name and not end:
            found[name] = min(found.get(name, float("inf")), event["dur"] / 1000)
    return found


def _value(name: str, array: Any, samples: int) -> Value:
    shape = tuple(getattr(array, "shape", ()))
    size = int(getattr(array, "nbytes", 0))
    dtype = str(array.dtype) if hasattr(array, "dtype") else type(array).__name__
    return Value(name, shape, dtype, size, bool(samples and shape and shape[0] == samples), gradient=False)


def _is_dynamic(model: Model) -> bool:
    return bool(model.inputs) and all(
        each.shape and not isinstance(each.shape[0], int) for each in model.inputs
    )


def _samples(model: Model, example: Mapping[str, Any]) -> int:
    """The first dimension of the first input that has one."""
    for each in model.inputs:
        shape = example[each.name].shape
        if shape:
            return max(shape[0], 1)
    return 1


def _layer(name: str) -> str:
    """The layer that a node belongs to, where exporters write paths: /layer1/conv/Conv is of layer1/conv."""
    return ".".join(part for part in name.split("/")[:-1] if part)


def _size(tensor: Any) -> int:
    onnx = library("onnx")
    count = 1
    for each in tensor.dims:
        count *= each
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    return count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _estimate(node: Any, values: Mapping[str, Any], parameters: Mapping[str, Any]) -> float:
    """Milliseconds from the number of operations and bytes."""

    def shape(name: str) -> tuple[int, ...]:
        if name in parameters:
            return tuple(parameters[name].dims)
        return tuple(getattr(values.get(name), "shape", ()))

    moved = sum(int(getattr(values.get(name), "nbytes", 0)) for name in (*node.input, *node.output) if name)
    operations = 0
    if node.op_type in ("Conv", "MatMul", "Gemm", "ConvTranspose") and len(node.input) > 1:
        weights, out = shape(node.input[1]), shape(node.output[0])
        inner = 1
        for size in weights[1:] if node.op_type.startswith("Conv") else shape(node.input[0])[-1:]:
            inner *= size
        operations = 2 * inner
        for size in out:
            operations *= size
    return max(operations / _OPERATIONS + moved / _BYTES, _LEAST_MS)
