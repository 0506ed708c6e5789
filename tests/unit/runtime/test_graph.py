"""The intermediate graph and its files."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from carme_runtime import graph as graphs
from carme_runtime.graph import Graph, GraphError, Links, Operator, Parameter, Timing, Value
from carme_runtime.graph.files import from_json, to_json


def small() -> Graph:
    """Two layers and a skip over the second."""
    values = tuple(Value(name, (4, 8), "float32", 128, True, name != "x") for name in ("x", "a", "b", "y"))
    timings = (Timing(2, 1.0, 2.0), Timing(4, 1.5, 3.0))
    return Graph(
        source="torch.export",
        device="cpu",
        samples=4,
        inputs=("x",),
        results=("y",),
        values=values,
        operators=(
            Operator(
                "first", "linear", "0", ("x",), ("a",), ("0.weight",), timings, 128, 16, accumulating_ms=0.25
            ),
            Operator("second", "linear", "1", ("a",), ("b",), ("1.weight",), timings, 128),
            Operator("add", "add", "", ("a", "b"), ("y",)),
        ),
        parameters=(Parameter("0.weight", 256, True), Parameter("1.weight", 256, False)),
        links=Links(((0, 10.0), (1000, 20.0)), "test"),
    )


def test_a_graph_is_read_back_as_it_was_written(tmp_path: Path):
    graphs.save(small(), tmp_path / "model.json")
    assert graphs.load(tmp_path / "model.json") == small()


def test_costs_follow_the_number_of_samples():
    graph = small()
    first = graph.operators[0]
    assert first.forward_ms(3) == pytest.approx(1.25)
    assert first.backward_ms(8) == pytest.approx(5.0)
    assert first.forward_ms(1) == pytest.approx(0.75)
    assert graph.value_bytes("a", 2) == 64
    assert graph.links.milliseconds(2000) == pytest.approx(0.03)
    assert graph.parameter_bytes(graph.parameter, trainable=True) == 256
    assert graph.accumulating_before == (0.0, 0.25, 0.25, 0.25)
    assert graph.users["a"] == (1, 2) and graph.users["y"] == (3,) and graph.maker["b"] == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text[:50], "is not JSON"),
        (lambda text: "[]", "holds no graph"),
        # It knows of no gradients that are added up.
        (lambda text: text.replace('"version": 3', '"version": 2'), "version 2. This carme_runtime reads"),
        (lambda text: text.replace('"version": 3', '"version": 99'), "version 99. This carme_runtime reads"),
        (lambda text: text.replace('"samples": 4', '"samples": "many"'), "'many' is not of type int"),
        (lambda text: text.replace('"device"', '"colour"'), "colour is unknown"),
        (lambda text: json.dumps({**json.loads(text), "results": ["z"]}), "makes its result z"),
        (lambda text: text.replace('"inputs": [\n    "x"', '"inputs": [\n    "q"'), "first uses q"),
        (lambda text: json.dumps({**json.loads(text), "operators": [], "results": []}), "is empty"),
    ],
)
def test_bad_files_end_in_one_sentence(tmp_path: Path, change, sentence: str):
    file = tmp_path / "model.json"
    graphs.save(small(), file)
    file.write_text(change(file.read_text()))
    with pytest.raises(GraphError, match=sentence) as caught:
        graphs.load(file)
    assert caught.value.remedy


def test_a_missing_file_ends_in_one_sentence(tmp_path: Path):
    with pytest.raises(GraphError, match="cannot be read"):
        graphs.load(tmp_path / "none.json")


def test_the_table_names_every_operator_and_the_sum():
    text = graphs.table(small())
    lines = text.splitlines()
    assert lines[0].endswith("Links: test.")
    assert [line.split()[0] for line in lines[2:]] == ["first", "second", "add", "all"]
    assert "3.000" in lines[-1] and "6.000" in lines[-1] and "512 B" in lines[-1]


def test_the_drawing_is_one_picture_with_skips_and_cuts():
    root = ElementTree.fromstring(graphs.drawing(small(), cuts=(2,)))
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert kinds.count("path") == 1 and kinds.count("line") == 1
    assert "second (1)" in [element.text for element in root.iter()]


def test_models_are_the_same_whatever_they_cost():
    description = json.loads(to_json(small()))
    for operator in description["operators"]:
        operator["timings"] = []
    assert from_json(json.dumps(description)).same_model(small())
    description["operators"][1]["kind"] = "conv"
    assert not from_json(json.dumps(description)).same_model(small())
