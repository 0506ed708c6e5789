"""Graphs are fused into tasks where little travels, and tasks are given to workers."""

import json
import os
import random
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

import carme_runtime.onnx as carme_onnx
import onnx_models
from carme_runtime.graph import Graph, Links, Operator, Timing, Value, files
from carme_runtime.onnx import OnnxError, Plan
from carme_runtime.onnx.fusion import balanced_cuts
from carme_runtime.pipeline import partition


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


#: VGG19's layers with the bytes that each makes, and milliseconds that were measured of it: the shortest of
#: eight times, and two single measurements while twenty programs shared the processors.
VGG19 = (
    ("Conv", 12845056, 1.28, 1.47, 1.28), ("Relu", 12845056, 0.54, 0.6, 0.54),
    ("Conv", 12845056, 41.6, 43.2, 92.01), ("Relu", 12845056, 0.61, 0.64, 0.66),
    ("MaxPool", 3211264, 1.07, 3.97, 1.3),
    ("Conv", 6422528, 8.87, 8.87, 36.45), ("Relu", 6422528, 0.27, 0.27, 0.34),
    ("Conv", 6422528, 25.59, 25.59, 89.96), ("Relu", 6422528, 0.31, 0.31, 0.36),
    ("MaxPool", 1605632, 0.29, 0.31, 0.32),
    ("Conv", 3211264, 13.92, 13.92, 36.12), ("Relu", 3211264, 0.13, 0.13, 0.17),
    ("Conv", 3211264, 19.6, 19.6, 72.34), ("Relu", 3211264, 0.14, 0.14, 0.18),
    ("Conv", 3211264, 20.56, 20.56, 77.34), ("Relu", 3211264, 0.14, 0.14, 0.19),
    ("Conv", 3211264, 21.29, 21.29, 73.93), ("Relu", 3211264, 0.14, 0.14, 0.18),
    ("MaxPool", 802816, 0.14, 0.14, 0.15),
    ("Conv", 1605632, 11.56, 11.56, 29.48), ("Relu", 1605632, 0.08, 0.08, 0.1),
    ("Conv", 1605632, 35.22, 68.68, 72.48), ("Relu", 1605632, 0.09, 0.1, 0.09),
    ("Conv", 1605632, 38.14, 38.14, 82.21), ("Relu", 1605632, 0.09, 0.09, 0.1),
    ("Conv", 1605632, 22.52, 22.52, 78.01), ("Relu", 1605632, 0.09, 0.09, 0.09),
    ("MaxPool", 401408, 0.08, 0.09, 0.08),
    ("Conv", 401408, 6.08, 6.08, 20.8), ("Relu", 401408, 0.03, 0.03, 0.04),
    ("Conv", 401408, 8.49, 8.49, 20.68), ("Relu", 401408, 0.03, 0.03, 0.04),
    ("Conv", 401408, 5.0, 5.0, 12.81), ("Relu", 401408, 0.02, 0.03, 0.03),
    ("Conv", 401408, 4.46, 4.46, 16.7), ("Relu", 401408, 0.02, 0.03, 0.03),
    ("MaxPool", 100352, 0.04, 0.04, 0.04), ("Reshape", 100352, 0.01, 0.01, 0.01),
    ("Gemm", 16384, 19.61, 19.61, 52.6), ("Relu", 16384, 0.03, 0.03, 0.03),
    ("Gemm", 16384, 1.91, 2.12, 2.23), ("Relu", 16384, 0.01, 0.02, 0.01),
    ("Gemm", 4000, 0.43, 0.48, 0.46), ("Softmax", 4000, 0.01, 0.01, 0.01),
)  # fmt: skip


def in_a_row(layers: list[tuple[str, int, float]]) -> Graph:
    """A graph of layers that follow each other: their kinds, the bytes that they make, their milliseconds."""
    names = ["x", *(f"v{place}" for place in range(len(layers)))]
    sizes = [602112, *(size for _, size, _ in layers)]
    values = [
        Value(name, (size // 4,), "float32", size, False, False)
        for name, size in zip(names, sizes, strict=True)
    ]
    operators = [
        Operator(f"o{place}", kind, "", (names[place],), (names[place + 1],), (), (Timing(1, took, 0.0),))
        for place, (kind, _, took) in enumerate(layers)
    ]
    return Graph("test", "cpu", 1, ("x",), (names[-1],), tuple(values), tuple(operators), ())


def cheapest_cut(graph: Graph, longest: float) -> int:
    """The fewest bytes that cross any one cut whose longer part takes no longer."""
    times, found = [each.forward_ms(graph.samples) for each in graph.operators], []
    for place in range(1, len(times)):
        if max(sum(times[:place]), sum(times[place:])) <= longest:
            created = {name for each in graph.operators[:place] for name in each.outputs}
            used = {name for each in graph.operators[place:] for name in each.inputs}
            found.append(sum(graph.value[name].bytes for name in created & used))
    return min(found)


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
def test_no_other_cut_is_about_as_quick_with_fewer_bytes(seed: int):
    graph = drawn(seed)
    found = carme_onnx.plan(graph, 2, tasks=2, micro_batches=8)
    times = [each.forward_ms(1) for each in graph.operators]
    best = min(max(sum(times[:place]), sum(times[place:])) for place in range(1, len(times)))
    longest = max(task.milliseconds for task in found.tasks)
    assert found.sent_bytes <= cheapest_cut(graph, max(longest, best))


@pytest.mark.parametrize("measurement", range(3))
def test_vgg19_sends_no_more_than_the_minimum_cut_whatever_was_measured(measurement: int):
    """As the times differ the most balanced cut does; those that are 5 % longer may send less."""
    graph = in_a_row([(kind, size, took[measurement]) for kind, size, *took in VGG19])
    found = carme_onnx.plan(graph, 2, tasks=2, micro_batches=8)
    assert carme_onnx.plan(graph, 2, tasks=2, micro_batches=8) == found
    times = [each.forward_ms(1) for each in graph.operators]
    best = min(max(sum(times[:place]), sum(times[place:])) for place in range(1, len(times)))
    longest = max(task.milliseconds for task in found.tasks)
    assert longest <= 1.05 * best
    assert found.sent_bytes <= 1.05 * cheapest_cut(graph, 1.05 * best)
    assert found.sent_bytes <= 0.05 * found.unfused_bytes


def test_among_equally_balanced_cuts_the_one_with_the_fewest_bytes_is_taken():
    """Cut in the middle 4 MiB would travel; 4 % off it is 1 MiB, and 10 % off 1 KiB."""
    wide = 4 << 20
    layers = [("Conv", wide, 45.0), ("Pool", 1 << 10, 0.0), ("Conv", wide, 3.0), ("Pool", 1 << 20, 0.0)]
    layers += [("Conv", wide, 2.0), ("Conv", wide, 25.0), ("Conv", 8, 25.0)]
    found = carme_onnx.plan(in_a_row(layers), 2, tasks=2, micro_batches=8)
    assert found.sent_bytes == 1 << 20
    assert [round(task.milliseconds) for task in found.tasks] == [48, 52]


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
    planned = carme_onnx.plan(heavy, 2)
    check_tasks(planned)
    assert planned.predicted_ms < 0.6 * planned.one_worker_ms


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


def test_workers_of_a_job_are_the_processors_of_all_its_nodes(monkeypatch: pytest.MonkeyPatch):
    """Between nodes bytes travel by the network, which takes longer than shared memory."""
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    graph = replace(drawn(0), links=Links(((0, 1.0),), "shared memory"))
    here = carme_onnx.plan(graph, "job", tasks=2)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    there = carme_onnx.plan(graph, "job", tasks=2)
    assert there.workers["cpu"] == 3 * here.workers["cpu"] == 3 * len(os.sched_getaffinity(0))
    assert there.graph.links == Links() and here.graph == graph


@pytest.mark.parametrize("workers", ["tpu:1", "cpu:0", "cpu:x", "", 0])
def test_workers_that_do_not_exist_are_refused(workers: object):
    with pytest.raises(OnnxError, match="workers"):
        carme_onnx.plan(drawn(0), workers)  # pyright: ignore[reportArgumentType]


def test_more_tasks_than_operators_are_refused():
    with pytest.raises(OnnxError, match="Ask for 16 at most"):
        carme_onnx.plan(traced(onnx_models.chain(), 32, 64), 2, tasks=40)


def test_pieces_longer_than_any_plan_needs_are_not_tried(monkeypatch: pytest.MonkeyPatch):
    """With many parts nearly all are: a plan of 256 parts would take most of a minute."""
    limits: list[float] = []
    bounded = partition._bounded

    def seen(pieces: int, times: list[float], crossed: list[float], most: float) -> object:
        limits.append(most)
        return bounded(pieces, times, crossed, most)

    monkeypatch.setattr(partition, "_bounded", seen)
    graph = in_a_row([("Relu", 4, 1.0)] * 1500)
    cuts = balanced_cuts(graph, 256)
    assert cuts is not None and len(cuts) == 255
    longest = max(end - begin for begin, end in pairwise((0, *cuts, 1500)))
    assert longest <= max(limits) <= 3 * 1500 / 256
