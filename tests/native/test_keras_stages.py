"""Keras models in stages train as Keras alone does on the whole batch."""

import re
import signal

import pytest

from patience import HANG

SECONDS = 3 * HANG
pytestmark = pytest.mark.timeout(4 * HANG)


@pytest.fixture(autouse=True)
def on_torch(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")


@pytest.fixture
def on_tensorflow(monkeypatch, on_torch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")


def run(launcher, program, nodes, *arguments):
    ranks = launcher.start(program, nodes, *arguments)
    assert ranks.finish(SECONDS) == [0] * len(nodes), ranks.output()
    return ranks


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("two_inputs_marked", ["micro_batches=4"]),
        ("two_inputs_averaged", ["micro_batches=2"]),
        ("two_inputs", ["schedule=zbv", "micro_batches=3"]),
        ("images", ["batch_norm=exact"]),
        ("words", ["micro_batches=2"]),
    ],
)
def test_two_stages_train_as_keras_alone_does(launcher, model, options):
    ranks = run(launcher, "keras_stages", [0, 1], model, "PIPELINING", *options)
    assert "2 stages x 1 replicas" in ranks.outputs[0]


def test_replicas_of_two_stages_train_as_keras_alone_does(launcher):
    ranks = run(launcher, "keras_stages", [0, 0, 0, 0], "two_inputs_marked", "ALL", "num_pipeline_stages=2")
    assert "2 stages x 2 replicas, 2 micro-batches" in ranks.outputs[0]


def test_strategy_may_be_left_open(launcher):
    run(launcher, "keras_stages", [0, 0], "skips", "ALL")


@pytest.mark.parametrize("what", ["files", "callbacks", "deferred", "taken_over", "mistakes"])
def test_scripts(launcher, tmp_path, what):
    run(launcher, "keras_stages_scripts", [0, 0], what, str(tmp_path))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("two_inputs_marked", ["micro_batches=4"]),
        ("two_inputs_averaged", ["micro_batches=2"]),
        ("two_inputs", ["schedule=interleaved", "micro_batches=4"]),
        ("images", ["batch_norm=exact"]),
        ("words", ["micro_batches=2", "schedule=gpipe"]),
    ],
)
def test_two_stages_on_tensorflow_train_as_keras_alone_does(launcher, on_tensorflow, model, options):
    ranks = run(launcher, "keras_stages", [0, 1], model, "PIPELINING", *options)
    assert "2 stages x 1 replicas" in ranks.outputs[0]


def test_replicas_on_tensorflow_train_as_keras_alone_does(launcher, on_tensorflow):
    ranks = run(launcher, "keras_stages", [0, 0, 0, 0], "two_inputs_marked", "ALL", "num_pipeline_stages=2")
    assert "2 stages x 2 replicas, 2 micro-batches" in ranks.outputs[0]


@pytest.mark.parametrize("what", ["files", "callbacks", "taken_over", "mistakes"])
def test_scripts_on_tensorflow(launcher, on_tensorflow, tmp_path, what):
    run(launcher, "keras_stages_scripts", [0, 0], what, str(tmp_path))


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
@pytest.mark.parametrize(
    ("group", "ranks"), [("inside", 2), ("outputs", 2), ("three", 3), ("states", 2), ("replicas", 4)]
)
def test_masks_states_and_added_losses_cross_cuts(launcher, monkeypatch, backend, group, ranks):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    run(launcher, "keras_stages_masks", [0] * ranks, group)


def test_masks_and_states_that_cannot_be_are_refused(launcher):
    run(launcher, "keras_stages_masks", [0, 0], "refused")


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
@pytest.mark.parametrize(("group", "ranks"), [("steps", 2), ("loops", 2), ("replicas", 4), ("refused", 2)])
def test_loops_and_steps_of_a_models_own_train_all_stages(launcher, monkeypatch, backend, group, ranks):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    run(launcher, "keras_stages_loops", [0] * ranks, group)


@pytest.mark.timeout(10 * HANG)
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_a_stage_that_ends_is_named_within_a_second(launcher, monkeypatch, tmp_path, backend):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    late = []
    for attempt in range(3):  # a busy machine may let a rank wait for its core
        (folder := tmp_path / str(attempt)).mkdir()
        ranks = launcher.start("keras_stages_scripts", [0, 0], "lost", str(folder))
        assert ranks.finish(SECONDS) == [0, -signal.SIGKILL], ranks.output()
        found = re.search(r"LATE ([\d.]+) s", ranks.outputs[0])
        assert found, ranks.output()
        late.append(float(found[1]))
        if late[-1] < 1:
            return
    raise AssertionError(f"it took {late} s")


TARANTELLA = [("fit", 2), ("pipelining", 2), ("skips", 3), ("inputs", 2), ("outputs", 2)]


@pytest.mark.parametrize(("what", "ranks"), TARANTELLA)
def test_tarantella_examples_train_on_torch(launcher, what, ranks):
    pytest.importorskip("tensorflow", reason="Tarantella's scripts read their data with it.")
    run(launcher, "keras_as_tarantella", [0] * ranks, what)


@pytest.mark.parametrize(("what", "ranks"), [*TARANTELLA, ("loop", 2)])
def test_tarantella_examples_train_on_tensorflow(launcher, on_tensorflow, what, ranks):
    run(launcher, "keras_as_tarantella", [0] * ranks, what)
