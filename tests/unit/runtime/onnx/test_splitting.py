"""Operators that take long are split over workers where that is quicker, and give what they gave."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import carme_runtime.onnx as carme_onnx
import onnx_models
from carme_runtime.graph import Graph, Timing
from carme_runtime.onnx import Model, Runner
from carme_runtime.onnx.splitting import CHANNELS, ROWS, Splitter

HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def traced(model: Model, x: Any, milliseconds: float = 100.0) -> Graph:
    """The graph, in which what has weights takes so long."""
    graph = carme_onnx.trace(model, {"x": x}, measure=False)
    timed = (
        replace(each, timings=(Timing(1, milliseconds if each.kind in HEAVY else 0.01, 0.0),))
        for each in graph.operators
    )
    return replace(graph, samples=1, operators=tuple(timed))


def node(kind: str, given: str, created: str, *constants: str, **attributes: Any) -> Any:
    return helper.make_node(kind, [given, *constants], [created], name=f"node_{created}", **attributes)


def image(opset: int = 17, height: Any = 19) -> Any:
    """Convolutions, pooling and what is element-wise, of all kinds of windows; once transposed."""
    weights = onnx_models.weights
    pool: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
    nodes = [
        node("Conv", "x", "a", "w1", "b1", pads=[1, 2, 2, 1]),
        node("BatchNormalization", "a", "b", "scale", "shift", "mean", "variance"),
        node("LeakyRelu", "b", "c"),
        node("MaxPool", "c", "d", **pool),
        node("Conv", "d", "e", "w2", dilations=[2, 1], pads=[2, 1, 2, 1], group=2),
        node("Add", "e", "f", "each"),
        node("AveragePool", "f", "g", kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=1),
        node("Conv", "g", "h", "w3", strides=[2, 1], auto_pad="VALID"),
        node("ConvTranspose", "h", "i", "w4", "b4", strides=[2, 2]),
        node("Mul", "i", "j", "each4"),
        node("GlobalAveragePool", "j", "y"),
    ]
    tensors = [
        weights("w1", 6, 3, 4, 4), weights("b1", 6), weights("w2", 8, 3, 3, 3), weights("w3", 7, 8, 2, 2),
        weights("w4", 7, 5, 3, 3), weights("b4", 5), weights("each", 8, 1, 1), weights("each4", 5, 1, 1),
        weights("scale", 6), weights("shift", 6), weights("mean", 6),
        numpy_helper.from_array(np.linspace(0.5, 2, 6, dtype=np.float32), "variance"),
    ]  # fmt: skip
    return onnx_models.model(nodes, {"x": (2, 3, height, 17)}, ["y"], tensors, opset)


def products() -> Any:
    """Matrix products with what follows them; the last one's columns are joined on its third axis."""
    weights = onnx_models.weights
    nodes = [
        node("Gemm", "x", "a", "w1", "b1", transB=1, alpha=0.5, beta=2.0),
        node("Relu", "a", "b"),
        node("Gemm", "b", "c", "w2", "b2"),
        node("MatMul", "c", "d", "w3"),
        node("Add", "d", "e", "b3"),
        node("Sigmoid", "e", "f"),
        node("Unsqueeze", "f", "g", "axes"),
        node("MatMul", "g", "y", "w4"),
    ]
    tensors = [
        weights("w1", 9, 12), weights("b1", 9), weights("w2", 9, 7), weights("b2", 3, 1),
        weights("w3", 7, 11),
        weights("b3", 11), weights("w4", 3, 11, 5), numpy_helper.from_array(np.array([1]), "axes"),
    ]  # fmt: skip
    return onnx_models.model(nodes, {"x": (3, 12)}, ["y"], tensors)


def squares() -> Any:
    """Operators both of whose inputs are the same result."""
    nodes = [
        node("Conv", "x", "a", "w", pads=[1] * 4),
        node("Mul", "a", "b", "a"),
        node("Add", "b", "c", "b"),
        node("Conv", "c", "y", "w", pads=[1] * 4),
    ]
    return onnx_models.model(nodes, {"x": (1, 4, 8, 8)}, ["y"], [onnx_models.weights("w", 4, 4, 3, 3)])


def residual() -> Any:
    """Blocks whose input is added to their result, one with a stride on both ways, and branches in a row."""
    weights = onnx_models.weights
    nodes = [
        node("Conv", "x", "a", "w3", pads=[1] * 4),
        node("Relu", "a", "b"),
        node("Conv", "b", "c", "w1"),
        node("Conv", "c", "d", "w5", pads=[2] * 4),
        node("Add", "d", "e", "b"),
        node("Relu", "e", "f"),
        node("Conv", "f", "g", "w6", pads=[1] * 4, strides=[2, 2]),
        node("Conv", "f", "h", "w7", strides=[2, 2]),
        node("Add", "g", "i", "h"),
        node("Conv", "i", "j", "w8", pads=[1] * 4),
        node("MaxPool", "i", "k", kernel_shape=[5, 3], pads=[2, 1, 2, 1]),
        node("Concat", "j", "l", "k", "i", axis=1),
        node("GlobalAveragePool", "l", "y"),
    ]
    tensors = [
        weights("w3", 4, 3, 3, 3), weights("w1", 4, 4, 1, 1), weights("w5", 4, 4, 5, 5),
        weights("w6", 6, 4, 3, 3), weights("w7", 6, 4, 1, 1), weights("w8", 6, 6, 3, 3),
    ]  # fmt: skip
    return onnx_models.model(nodes, {"x": (2, 3, 23, 17)}, ["y"], tensors)


def tied() -> Any:
    """A weight of several operators, which take it apart along different axes."""
    nodes = [
        node("Gemm", "x", "a", "w"),
        node("Relu", "a", "b"),
        node("Gemm", "b", "c", "w", transB=1),
        node("Gemm", "c", "y", "w"),
    ]
    return onnx_models.model(nodes, {"x": (3, 8)}, ["y"], [onnx_models.weights("w", 8, 8)])


def check(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    ("proto", "shape"),
    [
        (image(), (2, 3, 19, 17)),
        (image(opset=9), (2, 3, 19, 17)),
        (products(), (3, 12)),
        (squares(), (1, 4, 8, 8)),
        (residual(), (2, 3, 23, 17)),
        (tied(), (3, 8)),
    ],
    ids=["image", "opset 9", "products", "squares", "residual", "tied"],
)
def test_each_split_gives_what_the_whole_gives(proto: Any, shape: tuple[int, ...], parts: int):
    model, x = carme_onnx.load(proto), onnx_models.random(*shape)
    splitter = Splitter(model, traced(model, x))
    wanted = onnx_models.expected(proto, {"x": x})["y"]
    groups = splitter.candidates(parts)
    assert groups
    for group in groups:
        split = splitter.split_model(group)
        assert len(split.nodes) > len(model.nodes)
        names = [each.name for each in split.proto.graph.initializer]
        assert len(set(names)) == len(names)
        check(onnx_models.expected(split.proto, {"x": x})["y"], wanted)
        graph, cuts = splitter.split_graph(group)
        assert [each.name for each in graph.operators] == [each.name for each in split.nodes]
        assert sum(graph.operators[place].kind == "Concat" for place in cuts) == len(group)


def test_what_is_split_follows_each_other():
    model = carme_onnx.load(image())
    splitter = Splitter(model, traced(model, onnx_models.random(2, 3, 19, 17)))
    splits = {split for group in splitter.candidates(2) for split in group}
    rows = [split.operators for split in splits if split.by == ROWS]
    assert tuple(f"node_{name}" for name in "abcdefgh") in rows
    channels = {split.operators for split in splits if split.by == CHANNELS}
    assert {("node_a", "node_b", "node_c", "node_d"), ("node_h",), ("node_i", "node_j", "node_y")} == channels


def test_rows_are_split_across_what_branches_and_joins_again():
    model = carme_onnx.load(residual())
    splitter = Splitter(model, traced(model, onnx_models.random(2, 3, 23, 17)))
    rows = [[each.operators for each in group] for group in splitter.candidates(2) if group[0].by == ROWS]
    names = [tuple(f"node_{name}" for name in part) for part in ("abcdefghi", "jkl", "abcde", "fghi")]
    assert names[:2] in rows and [names[2], names[3], names[1]] in rows


def test_rows_are_split_only_where_all_inputs_have_the_same_height():
    model = carme_onnx.load(image(height="H"))
    splitter = Splitter(model, traced(model, onnx_models.random(2, 3, 19, 17)))
    splits = {split for group in splitter.candidates(2) for split in group}
    assert splits and {split.by for split in splits} == {CHANNELS}
    split = splitter.split_model(sorted(splits, key=str))
    for height in (19, 31):
        x = onnx_models.random(2, 3, height, 17)
        wanted = onnx_models.expected(model.proto, {"x": x})["y"]
        check(onnx_models.expected(split.proto, {"x": x})["y"], wanted)


@pytest.mark.parametrize(
    ("proto", "shape"), [(image(), (2, 3, 19, 17)), (products(), (3, 12)), (residual(), (2, 3, 23, 17))]
)
def test_a_plan_splits_what_takes_long_and_gives_what_the_whole_gives(
    proto: Any, shape: tuple[int, ...], tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    model, x = carme_onnx.load(proto), onnx_models.random(*shape)
    graph = traced(model, x)
    whole = carme_onnx.plan(graph, 2)
    found = carme_onnx.plan(graph, 2, model=model)
    assert found.splits and found.predicted_ms < 0.9 * whole.predicted_ms
    assert found.one_worker_ms == whole.one_worker_ms and found.unfused_bytes == whole.unfused_bytes
    text, content = str(found), json.loads(found.to_json())
    assert f"Split: {found.splits[0]}.\n" in text and f"{len(graph.operators)} operators in" in text
    assert content["splits"][0]["parts"] == 2
    runner = Runner(model, 2, compiled=found)
    ((result,),) = ([each["y"] for each in runner.run([{"x": x}])],)
    check(result, onnx_models.expected(proto, {"x": x})["y"])


def test_nothing_is_split_where_that_is_not_quicker():
    model, x = carme_onnx.load(image()), onnx_models.random(2, 3, 19, 17)
    graph = traced(model, x)
    assert not carme_onnx.plan(graph, 1, model=model).splits
    assert not carme_onnx.plan(graph, 2, micro_batches=16, model=model).splits
    assert not carme_onnx.plan(graph, 2, tasks=2, model=model).splits
    assert not carme_onnx.plan(traced(model, x, 0.1), 2, model=model).splits
