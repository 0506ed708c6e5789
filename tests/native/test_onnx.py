"""ONNX models train on several ranks as on one."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from patience import HANG

from .two_agents import Job, finished

PROGRAMS = Path(__file__).parent / "programs"


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
    for peer, expected in zip(losses[1:], weights[1:], strict=True):
        assert peer == pytest.approx(losses[0], rel=1e-5)
        for name, array in weights[0].items():
            np.testing.assert_allclose(expected[name], array, rtol=1e-5, atol=1e-6)


def fitted(launcher: Any, tmp_path: Path, nodes: list[int], **settings: Any) -> list[dict[str, Any]]:
    model = tmp_path / "model.onnx"
    onnx.save(dense(), model)
    given = json.dumps({"slow": 0, "batches": 40, "mode": "async"} | settings)
    ranks = launcher.run("onnx_fit_async", nodes, str(model), given)
    return [json.loads(ranks.outputs[rank].strip().splitlines()[-1]) for rank in range(len(nodes))]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 1]])
def test_ranks_that_do_not_wait_for_each_other_end_with_the_same_weights(
    launcher: Any, tmp_path: Path, nodes: list[int]
) -> None:
    ranks = fitted(launcher, tmp_path, nodes)
    assert sum(each["parts"] for each in ranks) == 40 * len(nodes)
    assert len(ranks[0]["losses"]) == 40
    assert np.mean(ranks[0]["losses"][-5:]) < 0.95 * np.mean(ranks[0]["losses"][:5])
    for each in ranks[1:]:
        assert each["losses"] == pytest.approx(ranks[0]["losses"])
        assert each["weights"] == ranks[0]["weights"]
        assert each["summed"] == pytest.approx(ranks[0]["summed"], rel=1e-4, abs=1e-5)


def test_training_without_waiting_learns_from_the_same_samples_as_much(launcher: Any, tmp_path: Path) -> None:
    more = {"momentum": 0.9}
    waiting = fitted(launcher, tmp_path, [0, 0], mode="sync", batches=125, more=more)[0]["held_back"]
    for settings in (more, more | {"compensation": 0.1, "staleness": 1}):
        # At most 1.2 times the samples.
        found = fitted(launcher, tmp_path, [0, 0], batches=150, more=settings)[0]["held_back"]
        assert found <= waiting


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_slow_rank_takes_fewer_parts_and_is_not_left_behind_the_bound(
    launcher: Any, tmp_path: Path, staleness: int
) -> None:
    slow, quick = fitted(launcher, tmp_path, [0, 0], slow=0.2, more={"staleness": staleness})
    assert slow["parts"] + quick["parts"] == 80
    # The slow one makes room twice with each part.
    assert quick["parts"] / slow["parts"] <= 4 * staleness + 1
    assert quick["parts"] > slow["parts"]
    assert 0 < slow["behind"] <= 2 * staleness


def test_a_rank_that_dies_ends_the_training_with_a_sentence(launcher: Any, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(dense(), model)
    given = json.dumps({"slow": 0, "batches": 400, "mode": "async", "dies_at": 3})
    ranks = launcher.start("onnx_fit_async", [0, 1], str(model), given)
    assert ranks.finish() == [1, 9]
    assert "PeerLost: Rank 1 ended while rank 0 waited for a message from rank 1." in ranks.outputs[0]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.mark.timeout(4 * HANG)
def test_a_node_that_is_lost_in_the_middle_of_a_training_changes_no_loss(job: Job, tmp_path: Path) -> None:
    program, model = str(PROGRAMS / "onnx_fit_lost.py"), str(tmp_path / "model.onnx")
    onnx.save(dense(), model)
    undisturbed = _printed(finished(job.launch("-n", "1", program, model, "whole")))
    run = job.launch("-n", "2", "--max-restarts", "1", program, model, "lost")
    assert run.stdout
    watchdog = threading.Timer(3 * HANG, run.kill)
    watchdog.start()
    try:
        seen = ""
        while "WAITS" not in seen:
            line = run.stdout.readline()
            assert line, seen
            seen += line
        job.second.kill()
        seen += run.stdout.read()
        assert run.wait() == 0, seen
    finally:
        watchdog.cancel()
    assert "Restart 1 of 1: 1 ranks go on, 2 there were before." in seen, seen
    steps, losses = _printed(seen)
    assert undisturbed[0] == 12 and steps in (6, 8)  # from the last checkpoint or the one before it
    assert losses == pytest.approx(undisturbed[1], rel=1e-5)


def _printed(output: str) -> tuple[int, list[float]]:
    """What rank 0 has printed at its end, whatever `carme-run` puts ahead of its lines."""
    (found,) = re.findall(r"\[\d+, \[.*\]\]$", output, re.MULTILINE)
    steps, losses = json.loads(found)
    return steps, losses
