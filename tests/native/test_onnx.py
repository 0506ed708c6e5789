"""ONNX models train on several ranks as on one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper


def dense() -> onnx.ModelProto:
    """Two layers and a softmax, without anything that depends on how a batch is divided."""
    chance = np.random.default_rng(2)
    sizes = {"w1": (8, 16), "b1": (16,), "w2": (16, 3), "b2": (3,)}
    tensors = [
        numpy_helper.from_array((0.3 * chance.standard_normal(shape)).astype(np.float32), name)
        for name, shape in sizes.items()
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Gemm", ["t", "w2", "b2"], ["s"]),
        helper.make_node("Softmax", ["s"], ["y"]),
    ]
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 8])
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 3])
    graph = helper.make_graph(nodes, "dense", [given], [result], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_ranks_train_a_model_together(launcher: Any, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(dense(), model)
    losses, weights = [], []
    for nodes in ([0], [0, 0], [0, 1]):
        target = tmp_path / f"{len(nodes)}-{sum(nodes)}.onnx"
        ranks = launcher.run("onnx_fit", nodes, str(model), str(target))
        losses.append(json.loads(ranks.outputs[0].strip().splitlines()[-1]))
        weights.append({t.name: numpy_helper.to_array(t) for t in onnx.load(target).graph.initializer})
    assert losses[0][-1] < losses[0][0]
    for other, theirs in zip(losses[1:], weights[1:], strict=True):
        assert other == pytest.approx(losses[0], rel=1e-5)
        for name, array in weights[0].items():
            np.testing.assert_allclose(theirs[name], array, rtol=1e-5, atol=1e-6)
