"""Small ONNX models, built where they are needed."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]


def weights(name: str, *shape: int, seed: int = 0) -> Any:
    """An initializer of random numbers that keep the size of what they are multiplied with."""
    random = np.random.default_rng([seed, *name.encode()])
    scale = np.sqrt(2 / max(int(np.prod(shape[1:])), 1))
    return numpy_helper.from_array((scale * random.standard_normal(shape)).astype(np.float32), name)


def model(
    nodes: list[Any], inputs: dict[str, Any], outputs: list[str], tensors: Any = (), opset: int = 17
) -> Any:
    """A model of float32 inputs with these shapes."""
    given = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)) for name, shape in inputs.items()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    for each in results:
        each.type.tensor_type.elem_type = TensorProto.FLOAT
    graph = helper.make_graph(nodes, "test", given, results, list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def chain(layers: int = 8, batch: Any = "N", width: int = 64, narrow: int = 8, at: int = 4) -> Any:
    """Matrix products and ReLUs; the output of layer `at` is narrow, all others are wide."""
    nodes, tensors, name, size = [], [], "x", width
    for layer in range(layers):
        out = narrow if layer == at else width
        tensors.append(weights(f"w{layer}", size, out))
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [f"m{layer}"], name=f"matmul{layer}"))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"], name=f"relu{layer}"))
        name, size = f"r{layer}", out
    return model(nodes, {"x": (batch, width)}, [name], tensors)


def branches(count: int = 2, batch: Any = "N", channels: int = 16, size: int = 64) -> Any:
    """Convolutions side by side, twice, joined by Concat; a second output uses an early value late."""
    nodes, tensors, name, wide = [], [], "x", 3
    for block in range(2):
        ends = []
        for branch in range(count):
            label = f"{block}_{branch}"
            tensors.append(weights(f"w{label}", channels, wide, 3, 3))
            nodes.append(
                helper.make_node(
                    "Conv", [name, f"w{label}"], [f"c{label}"], name=f"conv{label}", pads=[1] * 4
                )
            )
            nodes.append(helper.make_node("Relu", [f"c{label}"], [f"b{label}"], name=f"relu{label}"))
            ends.append(f"b{label}")
        nodes.append(helper.make_node("Concat", ends, [f"j{block}"], name=f"join{block}", axis=1))
        name, wide = f"j{block}", count * channels
    nodes.append(helper.make_node("Add", [name, "j0"], ["sum"], name="skip"))
    nodes.append(helper.make_node("GlobalAveragePool", ["sum"], ["y"], name="pool"))
    nodes.append(helper.make_node("Sigmoid", ["b0_0"], ["z"], name="late"))
    return model(nodes, {"x": (batch, 3, size, size)}, ["y", "z"], tensors)


def choice() -> Any:
    """An If whose bodies use what is outside of them."""
    bodies: dict[str, Any] = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(kind, ["h", "h"], [f"{name}_out"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)],
        )
        for name, kind in (("then", "Add"), ("else", "Mul"))
    }
    nodes = [
        helper.make_node("Relu", ["x"], ["h"], name="first"),
        helper.make_node("ReduceSum", ["h"], ["total"], name="total", keepdims=0),
        helper.make_node("Greater", ["total", "limit"], ["large"], name="compare"),
        helper.make_node("If", ["large"], ["chosen"], name="choose", **bodies),
        helper.make_node("Neg", ["chosen"], ["y"], name="last"),
    ]
    return model(nodes, {"x": (2, 4)}, ["y"], [numpy_helper.from_array(np.array(1.0, np.float32), "limit")])


def expected(proto: Any, inputs: dict[str, Array]) -> dict[str, Array]:
    """What ONNX Runtime gives for the whole model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # others would spin
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_outputs()]
    found: Any = session.run(names, inputs)
    return dict(zip(names, found, strict=True))


def random(*shape: int, seed: int = 1) -> Array:
    """Random inputs for a model."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
