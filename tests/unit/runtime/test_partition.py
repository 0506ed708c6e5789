"""Where graphs are cut."""

import dataclasses
import functools
import itertools
import random
import re
import time
from typing import Any

import pytest

from carme_runtime.graph import Graph, Links, Operator, Parameter, Timing, Value
from carme_runtime.pipeline import Device, Disk, Plan, PlanError, Request, make, partition, plan
from carme_runtime.pipeline.devices import devices_of_ranks, devices_of_stages
from carme_runtime.pipeline.pieces import Pieces, cut_places

KIB = 1024
FAST = Links(((0, 1.0), (1 << 20, 50.0)), "test")


def network(times, skips=(), parameters=None, beside=(), held=4 * KIB, links=FAST) -> Graph:
    """Layers in a row with these times in ms; `skips` lead from the output of one into another."""
    names = [f"layer{i}" for i in range(len(times))]
    operators = []
    for i, (name, took) in enumerate(zip(names, times, strict=True)):
        inputs = ["x" if i == 0 else names[i - 1], *(names[a] for a, b in skips if b == i)]
        own = (parameters or {}).get(i, f"{name}.weight")
        operators.append(
            Operator(
                name, "linear", name, tuple(inputs), (name,), (own,), (Timing(8, took / 3, 2 * took / 3),),
                held, KIB, names[i - 1] if i in beside else "",
            )
        )  # fmt: skip
    values = tuple(Value(name, (8, 128), "float32", 4 * KIB, True, name != "x") for name in ("x", *names))
    weights = dict.fromkeys(operator.parameters[0] for operator in operators)
    return Graph(
        "test", "cpu", 8, ("x",), (names[-1],), values, tuple(operators),
        tuple(Parameter(name, 16 * KIB, True) for name in weights), links,
    )  # fmt: skip


def exhaustive(graph: Graph, found: Plan) -> float:
    """The shortest step of all cuts."""
    cuts = itertools.combinations(cut_places(graph), len(found.cuts))
    return min(dataclasses.replace(found, cuts=each).step_ms for each in cuts)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p", "interleaved", "zbv"])
@pytest.mark.parametrize("seed", range(3))
def test_no_other_cuts_are_more_than_3_percent_faster(schedule: str, seed: int):
    choice = random.Random(seed)
    times = [choice.choice([0.1, 1.0, 3.0]) * choice.random() for _ in range(11)]
    skips = {tuple(sorted(choice.sample(range(11), 2))) for _ in range(4)}
    graph = network(times, skips, links=Links(((0, 5.0), (1 << 20, 9000.0)), "slow"))
    found = plan(graph, Request(2, 32, stages=2, micro_batches=4, schedule=schedule))
    assert found.step_ms <= 1.03 * exhaustive(graph, found)


def test_cuts_that_are_searched_step_by_step_are_no_worse(monkeypatch):
    choice = random.Random(7)
    skips = {tuple(sorted(choice.sample(range(24), 2))) for _ in range(6)}
    graph = network([choice.random() for _ in range(24)], skips)
    monkeypatch.setattr(partition, "_FEW", 0)
    for stages in (2, 3):
        found = plan(graph, Request(stages, 32, stages=stages, micro_batches=8))
        assert found.step_ms <= 1.03 * exhaustive(graph, found)


def test_three_stages_are_cut_as_well_as_can_be():
    graph = network([1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1, 1], skips=[(0, 10), (2, 7)])
    found = plan(graph, Request(3, 24, stages=3, micro_batches=6))
    assert found.step_ms <= 1.03 * exhaustive(graph, found)
    assert found.floor_ms <= found.step_ms


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p", "interleaved", "zbv"])
def test_gradients_of_all_micro_batches_but_the_first_are_added_up(schedule: str):
    """In the backward pass, or where it is divided in its second half: then nobody waits for it."""
    plain = network([2] * 8, links=Links(((0, 0.0), (1 << 20, 0.0)), "none"))
    adding = [dataclasses.replace(each, accumulating_ms=1.0) for each in plain.operators]
    request = Request(2, 32, stages=2, micro_batches=4, schedule=schedule)
    without, found = (
        plan(dataclasses.replace(plain, operators=tuple(each)), request) for each in (plain.operators, adding)
    )
    for stage, unloaded in zip(found.stages, without.stages, strict=True):
        assert stage.backward_ms == pytest.approx(unloaded.backward_ms + 3 * 4)
        assert stage.forward_ms == unloaded.forward_ms
    assert found.step_ms >= without.step_ms + 3 * 4
    busy = [sum(end - begin for begin, end in _own(found, rank)) for rank in range(2)]
    assert busy == pytest.approx([stage.busy_ms for stage in found.stages])


def _own(found: Plan, rank: int) -> list[tuple[float, float]]:
    return [found.run.times[action] for action in found.schedule.actions[rank]]


def test_a_stage_that_adds_up_large_gradients_computes_less():
    """Eight layers take 0.5 ms for a micro-batch; the last four 1.5 ms more, but for the first of eight."""
    graph = network([1] * 8)
    request = Request(2, 32, stages=2, micro_batches=8)
    assert plan(graph, request).cuts == (4,)
    last = [dataclasses.replace(each, accumulating_ms=1.5) for each in graph.operators[4:]]
    graph = dataclasses.replace(graph, operators=(*graph.operators[:4], *last))
    assert plan(graph, request).cuts == (6,)


def test_a_batch_that_only_some_replicas_divide_is_planned_with_these():
    """Twelve samples of four ranks: shares of three or six do not divide into four micro-batches."""
    found = plan(network([1] * 8), Request(4, 12, micro_batches=4, whole=True))
    assert (found.schedule.ranks, found.samples) == (4, 12)
    with pytest.raises(PlanError, match="A batch of 3 samples does not divide into 5 micro-batches"):
        plan(network([1] * 8), Request(4, 12, micro_batches=5, whole=True))


def test_values_go_directly_to_the_stages_that_use_them():
    graph = network([1] * 6, skips=[(0, 5), (1, 3)], parameters={0: "tied", 5: "tied"})
    pieces = Pieces(graph, (2, 4))
    assert pieces.channels == {(0, 1): ("layer1",), (0, 2): ("layer0",), (1, 2): ("layer3",)}
    assert pieces.shared == {"tied": (0, 2)}
    assert pieces.gradients((0, 2)) == ("layer0",)
    early = dataclasses.replace(graph, results=("layer1", "layer5"))
    assert Pieces(early, (2, 4)).channels[0, 2] == ("layer0", "layer1")  # the last stage has the results


def test_what_changes_a_value_in_place_is_not_cut_off():
    graph = network([1] * 6, beside={2, 3})
    assert cut_places(graph) == [1, 4, 5]


def test_numbers_that_follow_from_the_inputs_are_not_sent():
    graph = network([1] * 3)
    size = Operator("size", "sym_size", "", ("x",), ("size",))
    last = dataclasses.replace(graph.operators[2], inputs=("layer1", "size"))
    values = (*graph.values, Value("size", (), "int", 8, False, False))
    graph = dataclasses.replace(graph, operators=(size, *graph.operators[:2], last), values=values)
    assert cut_places(graph) == [2, 3]
    assert Pieces(graph, (3,)).channels == {(0, 1): ("layer1",)}


def test_a_memory_limit_moves_the_cuts_and_the_least_is_reported():
    heavy = {i: f"w{i}" for i in range(8)}
    graph = network([1] * 8, parameters=heavy, held=64 * KIB)
    free = plan(graph, Request(2, 8, stages=2, micro_batches=2))
    assert free.cuts[0] >= 4  # and the first stage holds the activations of two micro-batches
    most = max(stage.memory_bytes for stage in free.stages)
    tight = plan(graph, Request(2, 8, stages=2, micro_batches=2, memory=most - 1))
    assert max(stage.memory_bytes for stage in tight.stages) < most
    with pytest.raises(PlanError, match=r"A stage needs .* Give memory=(\d+) bytes") as caught:
        plan(graph, Request(2, 8, stages=2, micro_batches=2, memory=10 * KIB))
    least = int(caught.value.remedy.split("memory=")[1].split()[0])
    assert plan(graph, Request(2, 8, stages=2, micro_batches=2, memory=least))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_of_half_the_speed_gets_half_the_work(slow: int, schedule: str):
    graph = network([1.0] * 24)
    devices = tuple(Device(2.0 if rank == slow else 1.0) for rank in range(2))
    even = plan(graph, Request(2, 32, stages=2, micro_batches=8, schedule=schedule))
    found = plan(graph, Request(2, 32, stages=2, micro_batches=8, schedule=schedule, devices=devices))
    assert found.stages[slow].operators == 8 and even.stages[slow].operators == 12
    assert found.stages[slow].busy_ms == pytest.approx(found.stages[1 - slow].busy_ms, rel=0.05)
    assert found.step_ms < 0.85 * dataclasses.replace(found, cuts=even.cuts).step_ms
    assert found.step_ms <= 1.03 * exhaustive(graph, found)
    speeds = [line.split()[-1] for line in str(found).splitlines()[1:4]]
    assert speeds == ["speed", *("0.50" if rank == slow else "1.00" for rank in range(2))]
    assert "Ranks are not equally fast." in str(found) and "speed" not in str(even)


def test_a_rank_with_less_memory_gets_less_to_hold():
    graph = network([1] * 8, held=64 * KIB)
    most = max(stage.memory_bytes for stage in plan(graph, Request(2, 8, stages=2, micro_batches=2)).stages)
    devices = (Device(memory=2 * most), Device(memory=most // 2))
    found = plan(graph, Request(2, 8, stages=2, micro_batches=2, memory=most // 2, devices=devices))
    assert found.stages[1].memory_bytes <= most // 2 < found.stages[0].memory_bytes <= 2 * most
    text = next(line for line in str(found).splitlines() if line.startswith("Memory of each rank"))
    assert text.count("iB") == 2
    devices = (Device(memory=2 * most), Device(memory=KIB))
    with pytest.raises(PlanError, match=r"A stage needs .*, and a device has 1\.0 KiB"):
        plan(graph, Request(2, 8, stages=2, micro_batches=2, memory=KIB, devices=devices))


def test_little_crosses_from_node_to_node():
    """The first three ranks are on one node. Only one layer near its end makes little."""
    links = Links(((0, 10.0), (1 << 20, 1e6)), "slow", within=FAST.times)
    graph = network([1.0] * 16, links=links)
    small = dataclasses.replace(graph.value["layer10"], bytes=64)
    graph = dataclasses.replace(
        graph, values=tuple(small if v.name == small.name else v for v in graph.values)
    )
    request = Request(4, 32, stages=4, micro_batches=8)
    devices = devices_of_ranks([1.0] * 4, [0] * 4, [0, 0, 0, 1])
    found = plan(graph, dataclasses.replace(request, devices=devices))
    assert found.cuts[2] == 11, found.cuts
    assert found.travel_ms(1 << 20, 0, 1) == 0.05 and found.travel_ms(1 << 20, 2, 3) == 1000
    everywhere_slow = plan(graph, request)
    assert everywhere_slow.travel_ms(1 << 20, 0, 1) == 1000
    assert found.step_ms < everywhere_slow.step_ms
    assert "speed" not in str(found)


def test_replicas_wait_for_the_slowest_of_them():
    devices = (Device(1.0, 400), Device(1.5, 300), Device(2.0, 500), Device(1.0, 200))
    assert devices_of_stages(devices, 1) == (Device(2.0, 200),)
    assert devices_of_stages(devices, 2) == (Device(2.0, 400), Device(1.5, 200))
    near = tuple(Device(nodes=(node,)) for node in (0, 0, 1, 1))
    assert devices_of_stages(near, 2) == (Device(nodes=(0, 1)), Device(nodes=(0, 1)))
    assert devices_of_stages((), 2) == ()
    graph = network([1.0] * 12)
    slow = tuple(Device(4.0 if rank == 3 else 1.0) for rank in range(4))
    assert plan(graph, Request(4, 32)).strategy == "data"
    assert plan(graph, Request(4, 32, devices=slow)).strategy == "pipeline"  # the slow rank gets little


def test_ranks_that_differ_little_count_as_equal():
    assert devices_of_ranks([10.0, 12.0, 9.5], [1000, 1050, 1099]) == ()
    assert devices_of_ranks([10.0, 12.0], [1000, 2000]) == (Device(1.0, 1000), Device(1.0, 2000))
    assert devices_of_ranks([10.0, 21.0], [1000, 1050]) == (Device(1.0, 1000), Device(2.1, 1000))
    assert devices_of_ranks([20.0, 10.0], [0, 0]) == (Device(1.0), Device(0.5))
    assert devices_of_ranks([500.0, 1.0], [0, 0]) == (Device(1.0), Device(0.002))  # it takes some time
    for nodes in ([0, 0, 0], [0, 1, 2]):  # then all are equally near
        assert devices_of_ranks([1.0] * 3, [0] * 3, nodes) == ()
    found = devices_of_ranks([1.0] * 3, [0] * 3, [0, 0, 1])
    assert found[1:] == (Device(nodes=(0,)), Device(nodes=(1,)))


def test_what_is_not_requested_is_chosen():
    graph = network([3.0] * 12)
    free = plan(graph, Request(4, 8))
    assert (free.schedule.ranks, free.replicas) == (1, 4)  # with room for all, replicas need not wait
    half = plan(graph, Request(4, 8, memory=max(stage.memory_bytes for stage in free.stages) // 2))
    assert half.schedule.ranks > 1 and half.schedule.micro_batches > 1
    assert half.replicas * half.schedule.ranks == 4
    assert plan(graph, Request(2, 16, stages=2, batch_norm="exact")).schedule.micro_batches == 1


def test_cuts_are_chosen_by_name():
    graph = network([1] * 6, beside={3})
    found = plan(graph, Request(2, 8, micro_batches=2, cut_points=("layer2",)))
    assert found.cuts == (2,) and found.schedule.ranks == 2


def test_a_plan_is_printed_and_drawn():
    graph = network([1] * 6)
    found = plan(graph, Request(2, 8, stages=2, micro_batches=4, batch_norm="micro"))
    text = str(found.after(10.0))
    assert "2 stages x 1 replicas, 4 micro-batches of 2 samples, schedule 1f1b." in text
    assert "layer0 .. layer2" in text and "BatchNorm: micro." in text
    assert "Measured step: 10.00 ms. The prediction is off by" in text
    assert found.drawing().count("<line") == 1


def test_a_large_graph_is_planned_in_seconds():
    choice = random.Random(1)
    times = [choice.random() for _ in range(1700)]
    skips = {(a, a + choice.randrange(2, 60)) for a in range(0, 1600, 5)}
    graph = network(times, skips)
    began = time.process_time()  # whatever else the machine computes
    plan(graph, Request(4, 32, stages=4, micro_batches=8, memory=1 << 30))
    assert time.process_time() - began < 60  # 3 s on an ordinary machine


@pytest.mark.parametrize("memory", [None, 1 << 30])
def test_a_model_with_nearly_all_time_in_one_operator_is_cut(memory: int | None):
    graph = network([1e-6] * 150 + [1e6] + [1e-6] * 150)
    found = plan(graph, Request(8, 32, stages=8, micro_batches=8, memory=memory))
    assert len(found.stages) == 8 and len(found.cuts) == 7


def test_no_more_is_searched_where_nothing_fits(monkeypatch: pytest.MonkeyPatch):
    choice = random.Random(3)
    graph = network([choice.random() for _ in range(241)])
    sizes = [(choice.randrange(1, 64 * KIB), choice.randrange(1 << 20, 1 << 25)) for _ in graph.operators]
    uneven_ones = (
        dataclasses.replace(value, held_bytes=held, workspace_bytes=workspace)
        for value, (held, workspace) in zip(graph.operators, sizes, strict=True)
    )
    graph = dataclasses.replace(graph, operators=tuple(uneven_ones))
    looked_at = 0
    fitted = Plan.fitted

    def counted(self: Plan) -> Plan:
        nonlocal looked_at
        looked_at += 1
        return fitted(self)

    monkeypatch.setattr(Plan, "fitted", counted)
    assert len(cut_places(graph)) == 240
    with pytest.raises(PlanError, match="A stage needs"):
        plan(graph, Request(4, 8, stages=4, micro_batches=8, memory=8 << 20))
    assert looked_at < 1000  # and 2500 or so, if each beginning and each byte counted


MISTAKES = [
    (Request(3, 8, stages=2), "3 ranks do not divide into pipelines of 2 stages. Use stages=1"),
    (Request(2, 12, stages=2, micro_batches=5), "12 samples does not divide into 5 .* micro_batches=4"),
    (Request(2, 8, stages=2, micro_batches=2, batch_norm="exact"), "exclude each other"),
    (
        Request(8, 8, stages=8, micro_batches=2),
        "at 5 places, which is too few for 8 pieces. Use stages=4",
    ),
    (Request(4, 8, 4, 4, "interleaved"), "too few for 8 pieces. Use stages=2"),
    (Request(2, 8, cut_points=("head",)), "no layer 'head' to cut at. Its layers are layer0, layer1"),
    (Request(2, 8, cut_points=("layer0",)), "begin with layer 'layer0'.* Use the layer 'layer1'"),
    (Request(2, 8, cut_points=("layer1", "layer2")), "make 3 pieces"),
    (Request(2, 8, stages=2, schedule="best"), "no schedule 'best'"),
    (Request(2, 8, stages=2, micro_batches=2, memory=10 * KIB), "A stage needs .* Give memory="),
    (Request(2, 8, 2, 3, "interleaved"), "does not divide into 3 micro-batches. Use micro_batches=2"),
    (Request(2, 8, 2, 1, "interleaved"), "groups of 2, .* Use micro_batches=2"),
    (Request(12, 8, strategy="pipeline"), "too few for 12 pieces. Start 6 ranks, or use stages=6"),
    (Request(7, 8, strategy="pipeline"), "too few for 7 pieces. Start 6 ranks, or use the"),
]


@pytest.mark.parametrize(("request_", "sentence"), MISTAKES)
def test_an_impossible_request_names_the_nearest_possible_plan(request_: Request, sentence: str):
    with pytest.raises(PlanError, match=sentence):
        plan(network([1] * 6), request_)


def following(request_: Request, remedy: str) -> Request:
    """The request, changed as the remedy says."""
    number = {name: re.search(rf"{name}=(\d+)", remedy) for name in ("stages", "micro_batches", "memory")}
    changes: dict[str, Any] = {name: int(found[1]) for name, found in number.items() if found}
    if found := re.search(r"strategy (\w+)", remedy):
        changes["strategy"] = found[1]
    if found := re.search(r"Use the layer '(\w+)'", remedy):
        changes["cut_points"] = (found[1],)
    if found := re.search(r"Its layers are (\w+), (\w+)", remedy):
        changes["cut_points"] = (found[2],)  # no stage can begin with the first one
    if found := re.search(r"Name (\d+) cut points", remedy):
        changes["cut_points"] = request_.cut_points[: int(found[1])]
    if found := re.search(r"Choose from (\w+)", remedy):
        changes["schedule"] = found[1]
    return dataclasses.replace(request_, **changes)


@pytest.mark.parametrize("request_", [mistake for mistake, _ in MISTAKES])
def test_the_plan_that_is_named_works(request_: Request):
    graph = network([1] * 6)
    with pytest.raises(PlanError) as caught:
        plan(graph, request_)
    corrected = following(request_, caught.value.remedy)
    assert corrected != request_
    assert plan(graph, corrected)


HELD: dict[str, Any] = {"held": 64 * KIB}
CUT: dict[str, Any] = {"stages": 2, "micro_batches": 2, "cut_points": ("layer4",)}


def tight(graph: Graph, **more: Any) -> Request:
    """A byte less than the larger stage needs: the first one, which holds what two micro-batches leave."""
    free = plan(graph, Request(2, 8, **CUT | more))
    assert free.fits == () and free.reasons == []
    most = max(stage.memory_bytes for stage in free.stages)
    return Request(2, 8, memory=most - 1, **CUT | more)


def test_a_stage_that_does_not_fit_computes_its_forward_passes_again():
    graph = network([1] * 8, **HELD)
    request = tight(graph)
    with pytest.raises(PlanError, match="A stage needs"):
        plan(graph, request)
    found = plan(graph, dataclasses.replace(request, may_recompute=True))
    assert [found.recomputes(rank) for rank in range(2)] == [True, False]
    first, last = found.stages
    assert first.memory_bytes < last.memory_bytes + 64 * KIB < found.memory
    assert first.recomputed_ms == pytest.approx(first.forward_ms) and last.recomputed_ms == 0
    without = dataclasses.replace(found, fits=())
    assert without.step_ms + 0.5 < found.step_ms < without.step_ms + 1.1 * first.forward_ms
    assert found.floor_ms == pytest.approx(first.busy_ms)
    sentence = r"Stage 0 computes its forward passes again during the backward pass: it needs .* otherwise"
    assert re.search(sentence, str(found)) and "takes 1.33 ms a step" in str(found)


def test_no_stage_computes_anything_again_that_fits():
    graph = network([1] * 8, **HELD)
    most = plan(graph, Request(2, 8, **CUT)).stages[0].memory_bytes
    assert not any(
        fit.recomputes for fit in plan(graph, Request(2, 8, memory=most, may_recompute=True, **CUT)).fits
    )


def test_schedules_that_divide_backward_passes_compute_nothing_again():
    graph = network([1] * 8, **HELD)
    with pytest.raises(PlanError, match="A stage needs"):
        plan(graph, dataclasses.replace(tight(graph, schedule="zb1p"), may_recompute=True))


@pytest.mark.parametrize(("rate", "recomputes"), [(1e12, False), (1.0, True)], ids=["fast", "slow"])
def test_a_stage_takes_the_cheaper_one_of_recomputation_and_the_disk(rate: float, recomputes: bool):
    graph = network([1] * 8, **HELD)
    request = dataclasses.replace(tight(graph), may_recompute=True, disk=Disk(rate, rate))
    found = plan(graph, request)
    assert found.recomputes(0) == recomputes
    assert (found.stages[0].spilled_bytes > 0) != recomputes
    assert "Instead, " in found.reasons[0]
    assert ("moves a part of its memory to the disk" in found.reasons[0]) != recomputes
    only = plan(graph, dataclasses.replace(request, may_recompute=False))
    assert only.stages[0].spilled_bytes == 1 and only.stages[1].spilled_bytes == 0


def uneven(seed: int) -> Graph:
    """Layers that differ in time and in what they hold, with skips and a slow link."""
    choice = random.Random(seed)
    times = [choice.choice([0.1, 1.0, 3.0]) * choice.random() for _ in range(10)]
    skips = {tuple(sorted(choice.sample(range(10), 2))) for _ in range(3)}
    graph = network(times, skips, links=Links(((0, 5.0), (1 << 20, 9000.0)), "slow"))
    held = (
        dataclasses.replace(operator, held_bytes=choice.choice([1, 8, 64]) * KIB)
        for operator in graph.operators
    )
    return dataclasses.replace(graph, operators=tuple(held))


@functools.cache
def shortest_that_fits(seed: int, schedule: str, stages: int, disk: Disk | None, memory: int) -> float | None:
    """The shortest step of all cuts and all that stages can do to fit; None where nothing fits.

    It takes longer than the plan, and is the same however few cuts that looks at.
    """
    options: dict[str, Any] = {"stages": stages, "micro_batches": 2 * stages, "schedule": schedule}
    free = plan(uneven(seed), Request(stages, 24, **options))
    draft = dataclasses.replace(free, memory=memory, may_recompute=True, disk=disk)
    steps = []
    for cuts in itertools.combinations(cut_places(draft.graph), len(draft.cuts)):
        cut = dataclasses.replace(draft, cuts=cuts)
        choices = itertools.product(*(cut.fits_of(rank) for rank in range(draft.schedule.ranks)))
        steps += [cut.with_fits(each).step_ms for each in choices]
    return min(steps, default=None)


@pytest.mark.parametrize("few", [0, 150], ids=["step by step", "all cuts"])
@pytest.mark.parametrize("disk", [None, Disk(2e6, 2e6)], ids=["no disk", "disk"])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("1f1b", 3), ("gpipe", 3), ("interleaved", 2)])
def test_cuts_and_recomputation_are_chosen_together(
    monkeypatch: pytest.MonkeyPatch, schedule: str, stages: int, disk: Disk | None, few: int
):
    monkeypatch.setattr(partition, "_FEW", few)
    for seed, part in itertools.product((1, 4), (0.65, 0.5)):
        graph = uneven(seed)
        options: dict[str, Any] = {"stages": stages, "micro_batches": 2 * stages, "schedule": schedule}
        free = plan(graph, Request(stages, 24, **options))
        memory = int(part * max(stage.memory_bytes for stage in free.stages))
        options |= {"memory": memory, "may_recompute": True, "disk": disk}
        best = shortest_that_fits(seed, schedule, stages, disk, memory)
        if best is None:
            with pytest.raises(PlanError, match="A stage needs"):
                plan(graph, Request(stages, 24, **options))
            continue
        found = plan(graph, Request(stages, 24, **options))
        # Step by step comes only near the best where pieces share a rank's memory, or the disk helps.
        near = 1.01 if few or (disk is None and schedule != "interleaved") else 1.25
        assert found.step_ms <= near * best and not found.over, (seed, part, found.cuts)


def test_a_disk_does_not_help_an_operator_that_needs_more_memory_than_there_is():
    request = Request(2, 8, memory=10 * KIB, disk=Disk(1e9, 1e9), **CUT)
    with pytest.raises(PlanError, match="A stage needs"):
        plan(network([1] * 8, **HELD), request)


def test_the_least_memory_counts_on_recomputation():
    graph = network([1] * 8, **HELD)
    request = Request(2, 8, stages=2, micro_batches=2, memory=KIB, may_recompute=True)
    with pytest.raises(PlanError) as caught:
        plan(graph, request)
    least = int(caught.value.remedy.split("memory=")[1].split()[0])
    found = plan(graph, dataclasses.replace(request, memory=least))
    assert found.recomputes(0) and not found.over
    with pytest.raises(PlanError):
        plan(graph, dataclasses.replace(request, memory=least, may_recompute=False))


def test_the_fastest_plan_that_fits_is_taken():
    """Computing again is one of the choices, beside more stages and more micro-batches."""
    graph = network([3.0] * 12, **HELD)
    memory = plan(graph, Request(4, 8)).stages[0].memory_bytes // 2
    plain, free = (plan(graph, Request(4, 8, memory=memory, may_recompute=may)) for may in (False, True))
    assert free.samples * free.replicas / free.step_ms >= plain.samples * plain.replicas / plain.step_ms
    assert not free.over


def test_what_stages_do_to_fit_leaves_the_rest_of_a_plan():
    request = dataclasses.replace(tight(network([1] * 8, **HELD)), may_recompute=True)
    found = plan(network([1] * 8, **HELD), request)
    without = found.with_fits(())
    anew = dataclasses.replace(found, fits=())
    assert without == anew and without.step_ms == anew.step_ms < found.step_ms
    assert without.stages == anew.stages and without.slots == anew.slots


def test_schedules_of_other_sizes_fit_into_the_same_slots():
    graph = network([1] * 6)
    found = plan(graph, Request(3, 12, stages=3, micro_batches=6))
    for fewer in range(1, 6):
        needed = dataclasses.replace(found, schedule=make("1f1b", 3, fewer)).slots
        assert all(needed[channel] <= found.slots[channel] for channel in needed)


def planned(ranks: int, **changes) -> Plan:
    return plan(network([1.0] * 8), Request(ranks, 8, micro_batches=4, **changes))


def test_strategies_choose_the_number_of_stages():
    found = {s: planned(4, strategy=s) for s in ("data", "pipeline", "hybrid")}
    assert [(p.schedule.ranks, p.replicas) for p in found.values()] == [(1, 4), (4, 1), (2, 2)]
    assert [p.strategy for p in found.values()] == ["data", "pipeline", "hybrid"]
    # Ranks with the whole model wait for nobody, as long as it fits.
    assert planned(4).strategy == "data"
    whole = found["data"].stages[0].memory_bytes
    assert planned(4, memory=int(0.8 * whole)).strategy != "data"


def test_strategies_that_cannot_be_are_refused():
    with pytest.raises(PlanError, match=r"2 ranks cannot train as a hybrid.*Start 4, 6 or 8"):
        planned(2, strategy="hybrid")
    with pytest.raises(PlanError, match=r"stages=2 and the strategy data exclude each other.*stages=1"):
        planned(4, strategy="data", stages=2)


def test_memory_counts_values_once_and_those_of_others_not_at_all():
    graph = network([1] * 4)
    holding = (dataclasses.replace(operator, holds=operator.inputs) for operator in graph.operators)
    graph = dataclasses.replace(graph, operators=tuple(holding))
    request = Request(2, 8, micro_batches=1, cut_points=("layer2",), state_factor=1.0)
    first, last = plan(graph, request).stages
    fixed = 2 * 3 * 16 + 8  # weights, gradients and state of two layers; a message there and one back
    # What the model is given is the caller's: layer0 is held, and layer1, which is sent. Then the workspace.
    assert first.memory_bytes == (fixed + 4 + 4 + 1) * KIB
    # layer1 lies in its message: layer2 is held, the result, and what the loss makes of it.
    assert last.memory_bytes == (fixed + 4 + 4 + 4 + 1) * KIB


def test_backward_passes_and_an_optimizers_step_take_memory_too():
    graph = network([1] * 4)
    request = Request(2, 8, micro_batches=2, cut_points=("layer2",), state_factor=1.0)
    plain = plan(graph, request).stages[0].memory_bytes
    busy = (dataclasses.replace(operator, backward_bytes=(16 + 40) * KIB) for operator in graph.operators)
    graph = dataclasses.replace(graph, operators=tuple(busy))
    # With half of the samples. The gradients of the second micro-batch's weights are added to the first ones.
    more = plan(graph, request).stages[0].memory_bytes - plain
    assert 16 + 20 - 1 <= more / KIB <= 16 + 20
    adam = plan(graph, dataclasses.replace(request, state_factor=2.0, micro_batches=1)).stages[0]
    assert adam.memory_bytes >= (2 * 4 + 2) * 16 * KIB


def test_what_was_sent_and_its_gradient_stay_until_the_backward_pass_has_ended():
    graph = network([1] * 4)
    holding = [dataclasses.replace(operator, holds=operator.outputs) for operator in graph.operators]
    holding[0] = dataclasses.replace(holding[0], backward_bytes=(16 + 100) * KIB)
    graph = dataclasses.replace(graph, operators=tuple(holding))
    request = Request(2, 8, micro_batches=1, cut_points=("layer2",), state_factor=1.0)
    fixed = 2 * 3 * 16 + 8  # as above
    # At the peak layer1's backward pass is over: layer0 is held. But layer1 was sent, and its gradient came.
    assert plan(graph, request).stages[0].memory_bytes == (fixed + 4 + 100 + 4 + 4) * KIB


def test_a_stages_memory_is_found_in_a_time_that_grows_as_the_model_does():
    class Operators(tuple):
        reads = 0

        def __getitem__(self, place):
            Operators.reads += 1
            return super().__getitem__(place)

    def reads(layers: int) -> int:
        graph = network([1] * layers)
        holding = tuple(dataclasses.replace(operator, holds=operator.outputs) for operator in graph.operators)
        cut = (f"layer{layers // 2}",)
        found = plan(dataclasses.replace(graph, operators=holding), Request(2, 8, cut_points=cut))
        counting = dataclasses.replace(found, graph=dataclasses.replace(graph, operators=Operators(holding)))
        Operators.reads = 0
        assert counting.stages[0].memory_bytes == found.stages[0].memory_bytes
        return Operators.reads

    assert 0 < reads(160) < 2.5 * reads(80)


def test_masks_of_the_whole_batch_are_counted():
    graph = network([1] * 4)
    dropped = tuple(dataclasses.replace(operator, draws_mask=True) for operator in graph.operators)
    request = Request(4, 8, stages=2, micro_batches=4, cut_points=("layer2",), state_factor=1.0)
    both = [plan(each, request).stages[0] for each in (graph, dataclasses.replace(graph, operators=dropped))]
    assert both[1].memory_bytes - both[0].memory_bytes == 2 * 2 * 4 * KIB  # two layers, two replicas
