"""ONNX models as PyTorch modules: each operator gives what ONNX Runtime gives, and models train."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import carme_runtime.onnx as carme_onnx
import onnx_models
from carme_runtime.onnx import OnnxError

if TYPE_CHECKING:
    import torch

X = onnx_models.random(2, 3, 9, 7)
ROW = onnx_models.random(5, 4, 6)
POSITIVE = np.abs(ROW) + 0.1
INTS = np.array([2, -1, 0])


@pytest.fixture(scope="module", autouse=True)
def _pytorch() -> None:
    """PyTorch, as `torch`: not everybody who collects these tests runs them, and it takes seconds."""
    import torch

    torch.set_num_threads(1)  # with more, they wait for each other on a machine that is busy
    globals()["torch"] = torch


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def recurrent(gates: int, directions: int, size: int = 6, hidden: int = 3) -> list[Any]:
    shapes = [(gates * hidden, size), (gates * hidden, hidden), (2 * gates * hidden,)]
    return [ROW, *(onnx_models.random(directions, *shape, seed=k) for k, shape in enumerate(shapes))]


# Operator, attributes, inputs, opset, and how many outputs, where these are more than one.
CASES: list[tuple[Any, ...]] = [
    *((name, {}, [ROW], 17) for name in (
        "Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu",
        "Elu", "Selu", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Tanh",
        "Softmax", "Flatten", "Transpose", "Shape", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceSum",
        "LogSoftmax", "GlobalAveragePool", "GlobalMaxPool",
    )),
    *((name, {}, [POSITIVE], 17) for name in ("Log", "Sqrt")),
    *((name, {}, [ROW, onnx_models.random(6)], 17) for name in (
        "Add", "Sub", "Mul", "Div", "Greater", "Less", "Max", "Min", "Sum", "Mean", "PRelu",
    )),
    ("Softmax", {}, [ROW], 9),
    ("Softmax", {"axis": 2}, [ROW], 11),
    ("Div", {}, [ints(7, -7, 5), ints(2, 2, -3)], 17),
    ("Pow", {}, [POSITIVE, floats(2.5)], 17),
    ("Equal", {}, [ints(1, 2), ints(1, 3)], 17),
    ("And", {}, [np.array([True, False]), np.array([True, True])], 17),
    ("Where", {}, [ROW > 0, ROW, -ROW], 17),
    ("Cast", {"to": TensorProto.INT64}, [ROW * 4], 17),
    ("Clip", {}, [ROW, np.float32(-0.5), np.float32(0.5)], 17),
    ("Clip", {"min": -0.5}, [ROW], 9),
    ("ArgMax", {"axis": 1}, [ROW], 17),
    ("ArgMin", {"axis": 1, "keepdims": 0}, [ROW], 17),
    ("CumSum", {"reverse": 1, "exclusive": 1}, [ROW, ints(1).reshape(())], 17),
    ("ReduceMean", {"axes": [0, 2], "keepdims": 0}, [ROW], 13),
    ("ReduceSum", {"keepdims": 0}, [ROW, ints(1)], 13),
    ("Reshape", {}, [ROW, ints(0, -1, 3)], 17),
    ("Unsqueeze", {"axes": [0, 4]}, [ROW], 9),
    ("Unsqueeze", {}, [ROW, ints(1, -1)], 17),
    ("Squeeze", {}, [ROW[:1], ints(0)], 17),
    ("Squeeze", {}, [ROW[:1]], 9),
    ("Transpose", {"perm": [1, 2, 0]}, [ROW], 17),
    ("Flatten", {"axis": 2}, [X], 17),
    ("Flatten", {"axis": 3}, [ROW], 17),
    ("Flatten", {"axis": -1}, [ROW], 17),
    ("IsInf", {"detect_negative": 0}, [floats(np.inf, -np.inf, 1)], 17),
    ("IsInf", {"detect_positive": 0}, [floats(np.inf, -np.inf, 1)], 17),
    ("Dropout", {}, [ROW], 17, 2),
    ("Concat", {"axis": -1}, [ROW, ROW], 17),
    ("Slice", {"starts": [1], "ends": [-1], "axes": [2]}, [ROW], 9),
    ("Slice", {}, [ROW, ints(-1, 0), ints(-(1 << 62), 9), ints(0, 2), ints(-1, 2)], 17),
    ("Split", {"axis": 2}, [ROW, ints(2, 4)], 17, 2),
    ("Split", {"axis": 1}, [ROW], 11, 2),
    ("Gather", {"axis": 1}, [ROW, np.array([[0, -1], [2, 1]])], 17),
    ("Gather", {"axis": 1}, [ROW, np.array(2)], 17),
    ("GatherElements", {"axis": 0}, [ROW, np.array([[[0, 1]], [[4, -2]]])], 17),
    ("ScatterElements", {"axis": 0}, [floats(1, 2, 3), ints(2, 0), floats(7, 8)], 17),
    ("Expand", {}, [ROW[:1], ints(5, 1, 6)], 17),
    ("Tile", {}, [ROW, ints(1, 2, 1)], 17),
    ("ConstantOfShape", {"value": numpy_helper.from_array(floats(2.5))}, [ints(2, 3)], 17),
    ("Range", {}, [np.array(2), np.array(9), np.array(3)], 17),
    ("Pad", {"pads": [0, 1, 0, 2, 0, 0], "value": 1.5}, [ROW], 9),
    ("Pad", {"mode": "reflect"}, [ROW, ints(0, 1, 2, 0, 1, 3)], 17),
    ("Pad", {"mode": "edge"}, [ROW, ints(0, 1, 2, 0, 1, 3)], 17),
    ("Pad", {"mode": "wrap"}, [ROW, ints(0, 1, 2, 0, 1, 3)], 19),
    ("Conv", {"pads": [1, 1, 1, 1], "strides": [2, 1]}, [X, onnx_models.random(4, 3, 3, 3)], 17),
    ("Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, [X, onnx_models.random(4, 3, 2, 2)], 17),
    ("Conv", {"pads": [2, 0, 1, 0], "group": 3},
     [X, onnx_models.random(6, 1, 3, 3), onnx_models.random(6)], 17),
    ("Conv", {"dilations": [2]}, [ROW, onnx_models.random(2, 4, 2)], 17),
    ("ConvTranspose", {"strides": [2, 2], "pads": [1, 0, 0, 1], "output_padding": [1, 0]},
     [X, onnx_models.random(3, 2, 3, 3)], 17),
    ("ConvTranspose", {"strides": [2, 2], "auto_pad": "SAME_UPPER"}, [X, onnx_models.random(3, 2, 3, 3)], 17),
    ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "pads": [1, 1, 1, 1]}, [X], 17),
    ("MaxPool", {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER", "strides": [2, 2]}, [X], 17),
    ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, [X], 17),
    ("AveragePool", {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0], "count_include_pad": 1}, [X], 17),
    ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, [X], 19),
    ("LRN", {"size": 3, "alpha": 0.1}, [X], 17),
    ("Gemm", {"transB": 1, "alpha": 0.5, "beta": 2.0},
     [onnx_models.random(3, 4), onnx_models.random(5, 4), onnx_models.random(5)], 17),
    ("MatMul", {}, [ROW, onnx_models.random(6, 3)], 17),
    ("Einsum", {"equation": "abc,cd->abd"}, [ROW, onnx_models.random(6, 3)], 17),
    ("Dropout", {}, [ROW], 17),
    ("BatchNormalization", {"epsilon": 1e-3},
     [X, *(np.abs(onnx_models.random(3, seed=k)) for k in range(4))], 9),
    ("LayerNormalization", {}, [ROW, onnx_models.random(6), onnx_models.random(6)], 17),
    ("InstanceNormalization", {}, [X, onnx_models.random(3), onnx_models.random(3)], 17),
    ("Resize", {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
     [X, None, floats(1, 1, 2, 2)], 13),
    ("Resize", {"mode": "linear"}, [X, None, None, ints(2, 3, 5, 14)], 13),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
     [X, None, floats(1, 1, 2, 2)], 13),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
     [X, None, floats(1, 1, 0.6, 1.7)], 19),
    ("Resize", {"mode": "nearest", "coordinate_transformation_mode": "tf_half_pixel_for_nn",
                "nearest_mode": "floor"}, [X, floats(), floats(1, 1, 2, 2)], 11),
    ("Resize", {"mode": "linear", "axes": [2, 3]}, [X, None, None, ints(5, 14)], 18),
    ("Resize", {"mode": "linear", "axes": [3, 2], "keep_aspect_ratio_policy": "not_larger"},
     [X, None, None, ints(14, 12)], 18),
    ("Resize", {"mode": "linear", "axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller"},
     [X, None, None, ints(20, 12)], 18),
    ("Upsample", {"mode": "nearest"}, [X, floats(1, 1, 2, 3)], 9),
    ("GRU", {"hidden_size": 3, "linear_before_reset": 1}, recurrent(3, 1), 17, 2),
    ("GRU", {"hidden_size": 3, "direction": "bidirectional"}, recurrent(3, 2), 17, 2),
    ("LSTM", {"hidden_size": 3}, recurrent(4, 1), 17, 3),
    ("LSTM", {"hidden_size": 3, "direction": "reverse"}, recurrent(4, 1), 17, 3),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_an_operator_gives_what_onnx_runtime_gives(case: tuple[Any, ...]):
    kind, attributes, values, opset, *more = case
    outputs = [f"y{k}" for k in range(more[0] if more else 1)]
    names = [f"x{k}" if value is not None else "" for k, value in enumerate(values)]
    given = {name: np.asarray(value) for name, value in zip(names, values, strict=True) if name}
    node = helper.make_node(kind, names, outputs, name="it", **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    ]
    graph = helper.make_graph([node], "test", inputs, [onnx.ValueInfoProto(name=name) for name in outputs])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    module = carme_onnx.to_torch(proto).eval()
    found = module(*(torch.from_numpy(value.copy()) for value in given.values()))
    whole = onnx_models.expected(proto, given).values()
    for output, wanted in zip(found if isinstance(found, tuple) else (found,), whole, strict=True):
        assert tuple(output.shape) == wanted.shape
        np.testing.assert_allclose(output.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_operators_that_are_missing_are_named_with_their_nodes_before_anything_runs():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("NonZero", ["a"], ["b"], name="where_is_it"),
        helper.make_node("Det", ["x"], ["c"], name="determinant"),
    ]
    proto = onnx_models.model(nodes, {"x": (2, 2)}, ["b", "c"])
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    from carme_runtime.onnx.conversion import OPERATORS

    assert "NonZero" not in OPERATORS
    with pytest.raises(OnnxError, match=r"cannot be trained: where_is_it \(NonZero\), determinant \(Det\)"):
        carme_onnx.to_torch(proto)


@pytest.mark.parametrize(
    "kind, attributes, opset, message",
    [
        ("Resize", {"coordinate_transformation_mode": "tf_crop_and_resize"}, 17, "tf_crop_and_resize, which"),
        ("Resize", {"mode": "cubic"}, 17, "Resize with mode cubic, which cannot be trained"),
        ("Resize", {"mode": "linear", "antialias": 1}, 18, "Resize with antialias"),
        ("Cast", {"to": TensorProto.FLOAT8E4M3FN}, 19, "it casts to ONNX's type 17"),
        ("Add", {}, 6, "of opset 6, whose operators broadcast in another way"),
    ],
)
def test_what_would_give_other_results_is_refused_before_anything_runs(
    kind: str, attributes: dict[str, Any], opset: int, message: str
):
    names = {"Resize": ["x", "", "s"], "Add": ["x", "x"]}.get(kind, ["x"])
    node = helper.make_node(kind, names, ["y"], name="it", **attributes)
    tensors = [numpy_helper.from_array(floats(1, 1, 2, 2), "s")] if kind == "Resize" else []
    proto = onnx_models.model([node], {"x": (1, 1, 4, 4)}, ["y"], tensors, opset)
    if kind == "Cast":
        proto.graph.output[0].type.tensor_type.elem_type = attributes["to"]
    with pytest.raises(OnnxError, match=message):
        carme_onnx.to_torch(proto)


def test_dropout_gives_the_mask_of_what_it_keeps_while_it_trains():
    node = helper.make_node("Dropout", ["x", "ratio"], ["y", "mask"])
    proto = onnx_models.model(
        [node], {"x": (64, 64)}, ["y", "mask"], [numpy_helper.from_array(np.array(0.25, np.float32), "ratio")]
    )
    proto.graph.output[1].type.tensor_type.elem_type = TensorProto.BOOL
    created, mask = carme_onnx.to_torch(proto).train()(torch.ones(64, 64))
    assert torch.equal(created, mask / 0.75) and 0.7 < mask.float().mean() < 0.8


def test_constants_within_a_choice_and_in_attributes_go_with_the_module():
    bodies: dict[str, Any] = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("MatMul", ["x", f"{name}_w"], [f"{name}_out"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)],
            [onnx_models.weights(f"{name}_w", 4, 4)],
        )
        for name in ("then", "else")
    }
    value = numpy_helper.from_array(floats(2))
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "limit"], ["large"]),
        helper.make_node("If", ["large"], ["chosen"], **bodies),
        helper.make_node("Shape", ["chosen"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["twos"], value=value),
        helper.make_node("MatMul", ["chosen", "twos"], ["y"]),
    ]
    limit = numpy_helper.from_array(np.array(0.0, np.float32), "limit")
    proto, x = onnx_models.model(nodes, {"x": (4, 4)}, ["y"], [limit]), onnx_models.random(4, 4)
    module = carme_onnx.to_torch(proto).double()
    found = module(torch.from_numpy(x).double())
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), onnx_models.expected(proto, {"x": x})["y"], rtol=1e-4)


def test_weights_are_trained_where_one_of_their_uses_is_no_setting():
    nodes = [
        helper.make_node("Pow", ["x", "shared"], ["p"]),
        helper.make_node("Mul", ["p", "shared"], ["q"]),
        helper.make_node("Pow", ["q", "alone"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(floats(1, 2), name) for name in ("shared", "alone")]
    module = carme_onnx.to_torch(onnx_models.model(nodes, {"x": (3, 2)}, ["y"], tensors))
    assert [name for name, _ in module.named_parameters()] == ["shared"]


def test_a_choice_is_made_when_it_runs():
    module = carme_onnx.to_torch(onnx_models.choice())
    for x in (np.ones((2, 4), np.float32), np.full((2, 4), 0.01, np.float32)):
        wanted = onnx_models.expected(onnx_models.choice(), {"x": x})["y"]
        np.testing.assert_allclose(module(torch.from_numpy(x)).numpy(), wanted)


def classifier(batch: Any = 1) -> Any:
    """A small convolutional network with what training treats in its own way, for a fixed batch."""
    tensors = [
        onnx_models.weights("w", 4, 1, 3, 3),
        *(numpy_helper.from_array(np.full(4, value, np.float32), name) for name, value in
          (("scale", 1.0), ("bias", 0.0), ("mean", 0.0), ("variance", 1.0))),
        onnx_models.weights("fc", 3, 4 * 36),
        numpy_helper.from_array(np.zeros(3, np.float32), "fb"),
        numpy_helper.from_array(np.array([1, 4 * 36]), "shape"),
    ]  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node(
            "BatchNormalization", ["c", "scale", "bias", "mean", "variance"], ["n"], name="norm"
        ),
        helper.make_node("Relu", ["n"], ["r"], name="relu"),
        helper.make_node("Reshape", ["r", "shape"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "fc", "fb"], ["g"], name="dense", transB=1),
        helper.make_node("Softmax", ["g"], ["y"], name="softmax"),
    ]
    return onnx_models.model(nodes, {"x": (batch, 1, 8, 8)}, ["y"], tensors)


def reference() -> Any:
    """The same network, as one writes it for PyTorch."""
    created: Any = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 3),
    )
    tensors = {each.name: numpy_helper.to_array(each) for each in classifier().graph.initializer}
    with torch.no_grad():
        created[0].weight.copy_(torch.from_numpy(tensors["w"].copy()))
        created[4].weight.copy_(torch.from_numpy(tensors["fc"].copy()))
        created[4].bias.zero_()
    return created


@pytest.fixture
def compiler_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sets it when optimizers step; it is to be as it was after the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def batches() -> list[tuple[Any, Any]]:
    chance = np.random.default_rng(0)
    return [
        (chance.standard_normal((6, 1, 8, 8)).astype(np.float32), chance.integers(0, 3, 6)) for _ in range(4)
    ]


@pytest.mark.usefixtures("compiler_cache")
def test_training_takes_the_steps_that_pytorch_takes(tmp_path: Path):
    """The batch is another than the model says, and its softmax is part of the loss."""
    trained = carme_onnx.fit(classifier(), batches(), learning_rate=0.1, momentum=0.9)
    module, losses = reference(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-5)
    trained.save(tmp_path / "trained.onnx")
    x = batches()[0][0]
    found = carme_onnx.run(tmp_path / "trained.onnx", {"x": x}, workers=1)["y"]
    wanted = torch.softmax(module.eval()(torch.from_numpy(x)), 1).detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("compiler_cache")
def test_a_training_goes_on_with_its_checkpoint(tmp_path: Path):
    steps: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        steps.append(len(targets))
        return torch.nn.functional.cross_entropy(outputs, targets)

    def broken_off() -> Iterator[tuple[Any, Any]]:
        yield from batches()[:3]
        raise KeyboardInterrupt

    given: dict[str, Any] = {"loss": loss, "learning_rate": 0.1, "momentum": 0.9}
    saved: dict[str, Any] = {"checkpoints": tmp_path / "saved", "interval": 2}
    from carme_runtime.checkpoint import Checkpoints

    whole = carme_onnx.fit(classifier(), batches(), **given)
    with pytest.raises(KeyboardInterrupt):
        carme_onnx.fit(classifier(), broken_off(), **given, **saved)
    while Checkpoints(tmp_path / "saved").steps() != [2]:  # it is written in the background
        time.sleep(0.01)
    steps.clear()
    trained = carme_onnx.fit(classifier(), batches(), **given, **saved)
    assert len(steps) == 2
    assert trained.losses == pytest.approx(whole.losses, rel=1e-5)
    for name, weight in whole.module.state_dict().items():
        torch.testing.assert_close(trained.module.state_dict()[name], weight)


@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize(
    "changed, message",
    [
        ({"loss": "none"}, "There is no loss 'none'. Use one of cross_entropy"),
        ({"optimizer": "none"}, "There is no optimizer 'none'"),
        ({"mode": "eager"}, "There is no mode 'eager' of training. Use mode='sync' or mode='async'"),
        ({"mode": "async", "staleness": 0}, "A staleness of 0 steps cannot be kept. Give 1 or more, or use"),
        ({"mode": "async", "compensation": -1}, "A compensation of -1 corrects nothing"),
        ({"epochs": 0}, "0 epochs train nothing"),
        ({"checkpoints": "here", "interval": 0}, "Checkpoints cannot be 0 steps apart"),
        ({"mode": "async", "checkpoints": "here"}, "do not wait for each other have no checkpoints"),
        ({"data": []}, "There is no data"),
        ({"data": [(np.zeros((2, 1, 8, 8), np.float32), np.zeros(3, np.int64))]}, "have [2, 3] samples"),
    ],
)
def test_what_cannot_be_trained_is_refused(changed: dict[str, Any], message: str):
    given = {"data": batches(), **changed}
    with pytest.raises(OnnxError) as caught:
        carme_onnx.fit(classifier(), given.pop("data"), **given)
    assert message in str(caught.value)
