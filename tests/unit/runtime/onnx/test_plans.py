"""Graphs are fused into tasks where little travels, and tasks are given to workers."""

import json
import random
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import carme_runtime.onnx as carme_onnx
import onnx_models
from carme_runtime.graph import Graph, Operator, Timing, Value, files
from carme_runtime.onnx import OnnxError, Plan


def traced(proto: object, *shape: int) -> Graph:
    model = carme_onnx.load(proto)
    return carme_onnx.trace(model, {"x": onnx_models.random(*shape)}, measure=False)


def drawn(seed: int, count: int = 40) -> Graph:
    """A random graph of operators with random times and sizes."""
    chance = random.Random(seed)
    values, operators = [Value("x", (1,), "float32", 4, False, False)], []
    for place in range(count):
        size = chance.choice([8, 1 << 10, 1 << 20])
        values.append(Value(f"v{place}", (size,), "float32", size, False, False))
        earlier = [value.name for value in values[max(0, place - 6) : place + 1]]
        inputs = tuple(chance.sample(earlier, min(len(earlier), chance.randint(1, 3))))
        timing = Timing(1, chance.choice([0.01, 1.0, 5.0]), 0.0)
        operators.append(Operator(f"o{place}", "Add", "", inputs, (f"v{place}",), (), (timing,)))
    return Graph("test", "cpu", 1, ("x",), (f"v{count - 1}",), tuple(values), tuple(operators), ())


def check_tasks(found: Plan) -> None:
    """Each operator is in one task, and tasks can run in their order."""
    names = [name for task in found.tasks for name in task.operators]
    assert sorted(names) == sorted(each.name for each in found.graph.operators)
    known = set(found.graph.inputs)
    for task in found.tasks:
        assert known.issuperset(task.inputs)
        known.update(task.outputs)
    assert known.issuperset(found.graph.results)


def test_a_cut_is_made_where_little_crosses():
    found = carme_onnx.plan(traced(onnx_models.chain(at=3), 32, 64), 2, tasks=2)
    assert found.tasks[0].outputs in (("m3",), ("r3",)) and found.tasks[1].outputs == ("r7",)
    assert found.sent_bytes == 32 * 8 * 4
    assert found.unfused_bytes == 32 * 4 * (13 * 64 + 2 * 8)


@pytest.mark.parametrize("seed", range(6))
def test_tasks_never_need_each_other_in_a_circle(seed: int):
    graph = drawn(seed)
    for workers, tasks, batches in (
        ("cpu:2", None, 1),
        ("cpu:4", None, 8),
        ("cpu:2,gpu:1", None, 2),
        (2, 3, 4),
    ):
        check_tasks(carme_onnx.plan(graph, workers, tasks=tasks, micro_batches=batches))


@pytest.mark.parametrize("seed", range(6))
def test_no_other_cut_is_as_quick_with_clearly_fewer_bytes(seed: int):
    graph = drawn(seed)
    found = carme_onnx.plan(graph, 2, tasks=2, micro_batches=8)
    longest = max(task.milliseconds for task in found.tasks)
    for place in range(1, len(graph.operators)):
        times = [each.forward_ms(1) for each in graph.operators]
        if max(sum(times[:place]), sum(times[place:])) <= longest:
            made = {name for each in graph.operators[:place] for name in each.outputs}
            used = {name for each in graph.operators[place:] for name in each.inputs}
            assert sum(graph.value[name].bytes for name in made & used) >= found.sent_bytes / 1.05


def test_many_micro_batches_need_no_cut_and_branches_shorten_one():
    graph = traced(onnx_models.branches(), 1, 3, 64, 64)
    heavy = replace(
        graph,
        operators=tuple(
            replace(each, timings=(Timing(1, 20.0 if each.kind == "Conv" else 0.01, 0.0),))
            for each in graph.operators
        ),
    )
    many = carme_onnx.plan(heavy, 2, micro_batches=16)
    assert len(many.tasks) == 1 and many.sent_bytes == 0
    one = carme_onnx.plan(heavy, 2)
    check_tasks(one)
    assert one.predicted_ms < 0.6 * one.one_worker_ms


def test_the_gpu_gets_what_takes_long():
    found = carme_onnx.plan(drawn(3), "cpu:1,gpu:1", tasks=2, micro_batches=1)
    assert "gpu" in {task.kind for task in found.tasks}


def test_a_plan_is_printed_and_drawn():
    found = carme_onnx.plan(traced(onnx_models.chain(), 32, 64), "cpu:2", tasks=2)
    text, content = str(found), json.loads(found.to_json())
    assert "16 operators in 2 tasks, 1 micro-batch, workers cpu:2." in text
    assert [task["name"] for task in content["tasks"]] == ["part_0", "part_1"]
    assert content["sent_bytes"] == found.sent_bytes < content["unfused_bytes"]
    assert ElementTree.fromstring(found.drawing()).tag.endswith("svg")
    assert files.from_json(files.to_json(found.graph)) == found.graph


@pytest.mark.parametrize("workers", ["tpu:1", "cpu:0", "cpu:x", "", 0])
def test_workers_that_do_not_exist_are_refused(workers: object):
    with pytest.raises(OnnxError, match="workers"):
        carme_onnx.plan(drawn(0), workers)  # pyright: ignore[reportArgumentType]


def test_more_tasks_than_operators_are_refused():
    with pytest.raises(OnnxError, match="Ask for 16 at most"):
        carme_onnx.plan(traced(onnx_models.chain(), 32, 64), 2, tasks=40)
