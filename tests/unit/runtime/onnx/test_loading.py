"""ONNX models are read and checked: one sentence for each fault, with the node or the file named."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import carme_runtime.onnx as carme_onnx
import onnx_models
from carme_runtime.onnx import OnnxError, folding


def refusal(source: Any) -> str:
    with pytest.raises(OnnxError) as caught:
        carme_onnx.load(source)
    assert caught.value.remedy
    return caught.value.message


def test_a_model_says_what_it_takes_and_gives():
    model = carme_onnx.load(onnx_models.branches().SerializeToString())
    assert [str(each) for each in model.inputs] == ["x (float32[N, 3, 64, 64])"]
    assert model.outputs == ("y", "z") and model.opset == 17


def test_an_invalid_model_is_refused(tmp_path: Path):
    text = tmp_path / "readme.txt"
    text.write_text("no model")
    assert refusal(text) == "readme.txt is not an ONNX model: there is no graph with nodes in it."
    assert refusal(tmp_path / "none.onnx").endswith("cannot be read: No such file or directory.")
    assert "not an ONNX model" in refusal(b"")


def test_a_cycle_is_named_by_its_node():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="start"),
        helper.make_node("Add", ["a", "c"], ["b"], name="around"),
        helper.make_node("Relu", ["b"], ["c"], name="back"),
    ]
    message = refusal(onnx_models.model(nodes, {"x": (1,)}, ["c"]))
    assert message.startswith("The graph of The model has a cycle: node around needs")


def test_nodes_in_another_order_are_sorted():
    proto = onnx_models.chain(3)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(proto.graph.node)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    model = carme_onnx.load(proto)
    assert [node.name for node in model.nodes][:3] == ["matmul0", "relu0", "matmul1"]


def test_missing_weights_are_named_with_the_node_that_uses_them():
    proto = onnx_models.chain(3)
    del proto.graph.initializer[1]
    assert refusal(proto).startswith("Node matmul1 of The model uses w1, which nothing makes")


def test_weights_in_another_file_are_read_and_missed(tmp_path: Path):
    proto, x = onnx_models.chain(3), onnx_models.random(2, 64)
    wanted = onnx_models.expected(proto, {"x": x})
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="model.weights", size_threshold=0)
    found = carme_onnx.run(path, {"x": x}, workers=1)
    np.testing.assert_allclose(found["r2"], wanted["r2"], atol=1e-5)
    with pytest.raises(OnnxError, match="Load the model from its file"):
        carme_onnx.load(path.read_bytes())
    (tmp_path / "model.weights").write_bytes(b"short")
    assert "are missing" in refusal(path) and str(tmp_path / "model.weights") in refusal(path)
    (tmp_path / "model.weights").unlink()
    assert "are missing" in refusal(path)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A model in Hugging Face's cache: its files are links to those of `blobs`."""
    model = tmp_path / "hub" / "models--maker--chain"
    created = model / "snapshots" / "0a1b" / "onnx"
    (model / "blobs").mkdir(parents=True)
    created.mkdir(parents=True)
    proto = onnx_models.chain(2)
    onnx.save(
        proto,
        created / "model.onnx",
        save_as_external_data=True,
        location="model.onnx_data",
        size_threshold=0,
    )
    for number, name in enumerate(("model.onnx", "model.onnx_data")):
        (created / name).rename(model / "blobs" / f"hash{number}")
        (created / name).symlink_to(f"../../../blobs/hash{number}")
    return created


def test_links_within_a_cache_of_models_are_followed(snapshot: Path):
    proto, x = onnx_models.chain(2), onnx_models.random(2, 64)
    wanted = onnx_models.expected(proto, {"x": x})
    found = carme_onnx.run(snapshot / "model.onnx", {"x": x}, workers=1)
    np.testing.assert_allclose(found["r1"], wanted["r1"], atol=1e-5)
    (snapshot / "model.onnx_data").resolve().write_bytes(b"short")
    assert "are missing" in refusal(snapshot / "model.onnx")


@pytest.mark.parametrize(
    "target",
    ["models--other--model/blobs/hash", "models--maker--chain/secret", "models--maker--chain/blobs/a/b"],
)
def test_links_out_of_a_models_own_cache_are_refused(snapshot: Path, tmp_path: Path, target: str):
    link, secret = snapshot / "model.onnx_data", tmp_path / "hub" / target
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_bytes(link.read_bytes())
    link.unlink()
    link.symlink_to(secret)
    assert "are in model.onnx_data, which is outside of the folder" in refusal(snapshot / "model.onnx")


def test_a_folder_that_resembles_a_cache_is_refused(snapshot: Path, tmp_path: Path):
    """Its name is the model's author's to choose; the cache's is not."""
    (tmp_path / "hub" / "models--maker--chain").rename(tmp_path / "hub" / "chain")
    path = tmp_path / "hub" / "chain" / snapshot.relative_to(tmp_path / "hub" / "models--maker--chain")
    assert "are in model.onnx_data, which is outside of the folder" in refusal(path / "model.onnx")


def test_weights_outside_of_the_models_folder_are_refused(tmp_path: Path):
    """A model of somebody else does not choose which files are read."""
    path = tmp_path / "models" / "model.onnx"
    path.parent.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(1 << 20))
    onnx.save(
        onnx_models.chain(1), path, save_as_external_data=True, location="model.weights", size_threshold=0
    )
    weights = path.with_name("model.weights")
    weights.unlink()
    weights.symlink_to(secret)
    outside = "outside of the folder of the model"
    assert refusal(path).startswith("The weights w0 of model.onnx are in model.weights, which is outside of")
    proto = onnx.load(path, load_external_data=False)
    for location in ("../secret", str(secret)):
        for tensor in proto.graph.initializer:
            next(each for each in tensor.external_data if each.key == "location").value = location
        path.write_bytes(proto.SerializeToString())
        assert f"are in {location}, which is {outside}" in refusal(path)


def test_versions_that_nobody_knows_are_refused():
    proto = onnx_models.chain(1)
    proto.opset_import[0].version = 999
    assert refusal(proto).startswith("The model is of opset 999, and onnx")
    proto = onnx_models.chain(1)
    proto.ir_version = 99
    assert refusal(proto).startswith("The model is of IR version 99, and onnx")


def test_an_operator_that_the_opset_lacks_is_named():
    nodes = [helper.make_node("Gelu", ["x"], ["y"], name="new")]
    message = refusal(onnx_models.model(nodes, {"x": (1,)}, ["y"], opset=17))
    assert message == "Node new of The model is a Gelu, which opset 17 of ai.onnx does not have."
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="foreign", domain="org.example")]
    assert "Node foreign" in refusal(onnx_models.model(nodes, {"x": (1,)}, ["y"]))


def test_contradicting_shapes_are_refused():
    tensors = [onnx_models.weights("w", 5, 6)]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    assert "contradict each other" in refusal(onnx_models.model(nodes, {"x": (2, 4)}, ["y"], tensors))


def test_what_depends_on_constants_alone_is_computed_before():
    nodes = [
        helper.make_node("Constant", [], ["shape"], value=numpy_helper.from_array(np.array([4, 4]))),
        helper.make_node(
            "ConstantOfShape", ["shape"], ["w"], value=numpy_helper.from_array(np.array([0.5], np.float32))
        ),
        helper.make_node("Mul", ["w", "w"], ["w2"]),
        helper.make_node("MatMul", ["x", "w2"], ["y"], name="product"),
        helper.make_node("Identity", ["w2"], ["fixed"]),
    ]
    model = carme_onnx.load(onnx_models.model(nodes, {"x": (1, 4)}, ["y", "fixed"]))
    assert [node.op_type for node in model.nodes] == ["MatMul", "Identity"]
    found = carme_onnx.run(model, {"x": np.ones((1, 4), np.float32)}, workers=1)
    np.testing.assert_allclose(found["y"], np.full((1, 4), 1.0))
    np.testing.assert_allclose(found["fixed"], np.full((4, 4), 0.25))


def test_inputs_that_do_not_fit_are_named():
    model = carme_onnx.load(onnx_models.branches(batch=1))
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "needs the input x"),
        ({"x": np.ones((1, 3, 64, 64)), "more": 1}, "has no input more"),
        ({"x": np.ones((1, 3, 64, 32), np.float32)}, "has the shape [1, 3, 64, 32]"),
        ({"x": np.ones((1, 3, 64), np.float32)}, "has the shape [1, 3, 64]"),
        ({"x": np.ones((1, 3, 64, 64), complex)}, "is complex128, and the model takes float32"),
    ]
    for inputs, message in cases:
        with pytest.raises(OnnxError, match="x") as caught:
            carme_onnx.run(model, inputs, workers=1)
        assert message in caught.value.message


def test_open_dimensions_need_an_example():
    model = carme_onnx.load(
        onnx_models.model([helper.make_node("Relu", ["x"], ["y"])], {"x": ("N", "W")}, ["y"])
    )
    with pytest.raises(OnnxError, match="leaves open"):
        carme_onnx.example_of(model)
    assert carme_onnx.example_of(model, {"x": (2, 3)})["x"].shape == (2, 3)


def test_constants_that_cannot_be_computed_are_left_to_the_run_with_a_notice():
    nodes = [
        helper.make_node("Gather", ["w", "place"], ["c"], name="bad"),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    tensors = [onnx_models.weights("w", 4), numpy_helper.from_array(np.array([30]), "place")]
    model = carme_onnx.load(onnx_models.model(nodes, {"x": ("N", 4)}, ["y"], tensors))
    assert any("Constants are not computed before the model runs" in each for each in model.notices)


def test_constants_that_are_too_large_are_left_to_the_run():
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"], name="large"),
        helper.make_node("ReduceSum", ["zeros"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(np.array([1 << 20, 1 << 12]), "shape")]
    model = carme_onnx.load(onnx_models.model(nodes, {"x": ("N", 4)}, ["y"], tensors))
    assert model.nodes[0].name == "large" and model.proto.ByteSize() < 1 << 16


def test_constants_that_fit_are_computed_where_others_are_too_large(monkeypatch: pytest.MonkeyPatch):
    """What is too large is computed right before its only user: no cut ahead of that has to send it."""
    monkeypatch.setattr(folding, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(folding, "_LEAST_BYTES", 1 << 20)
    nodes = [
        helper.make_node("ConstantOfShape", ["larger_shape"], ["larger"], name="larger"),
        helper.make_node("ConstantOfShape", ["large_shape"], ["large"], name="large"),
        helper.make_node("Relu", ["x"], ["r"], name="first"),
        helper.make_node("MatMul", ["r", "large"], ["h"], name="second"),
        helper.make_node("MatMul", ["h", "larger"], ["y"], name="third"),
    ]
    tensors = [
        numpy_helper.from_array(np.array(shape), f"{name}_shape")
        for name, shape in (("large", [64, 2560]), ("larger", [2560, 80]))
    ]
    proto = onnx_models.model(nodes, {"x": (1, 64)}, ["y"], tensors)
    model = carme_onnx.load(proto)
    assert [node.name for node in model.nodes] == ["first", "second", "larger", "third"]
    assert "large" in {each.name for each in model.proto.graph.initializer}
    assert any("do not fit into 1 MiB" in each for each in model.notices)


def test_what_a_constant_too_large_is_made_of_stays_with_it(monkeypatch: pytest.MonkeyPatch):
    """A node with two results, one that fits and one that does not, is computed as a whole."""
    monkeypatch.setattr(folding, "_MOST_BYTES", 1 << 12)
    monkeypatch.setattr(folding, "_LEAST_BYTES", 1 << 12)
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"], name="zeros"),
        helper.make_node("Split", ["zeros", "sizes"], ["few", "many"], name="split", axis=0),
        helper.make_node("Exp", ["many"], ["ones"], name="ones"),
        helper.make_node("Sign", ["many"], ["signs"], name="signs"),
        helper.make_node("Add", ["x", "few"], ["a"], name="first"),
        helper.make_node("Add", ["a", "ones"], ["b"], name="second"),
        helper.make_node("Add", ["b", "signs"], ["y"], name="third"),
    ]
    tensors = [
        numpy_helper.from_array(np.array(values), name)
        for name, values in (("shape", [701, 1]), ("sizes", [1, 700]))
    ]
    proto, x = onnx_models.model(nodes, {"x": (700, 1)}, ["y"], tensors), onnx_models.random(700, 1)
    model = carme_onnx.load(proto)
    assert {node.name for node in model.nodes} == {"zeros", "split", "signs", "first", "second", "third"}
    found = carme_onnx.run(model, {"x": x}, workers=1)
    np.testing.assert_allclose(found["y"], onnx_models.expected(proto, {"x": x})["y"], rtol=1e-6)
