"""Pipelines train as a single process does on the whole batch."""

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

SECONDS = 3 * HANG  # a busy machine: tracing alone takes seconds of computing for each pipeline
pytestmark = pytest.mark.timeout(4 * HANG)
MODELS = ("mlp", "resnet", "unet", "transformer", "dropout", "inputs", "densenet")
SCHEDULES = (
    ("1f1b:4:clip", "zb1p:6", "gpipe:8:frozen"),
    ("gpipe:1", "zbv:6", "1f1b:8:accumulate"),
    ("1f1b:2:frozen", "interleaved:6:even", "zbv:12:clip"),
)


def run(launcher, nodes, *arguments):
    ranks = launcher.start("pipelined", nodes, *arguments)
    assert ranks.finish(SECONDS) == [0] * len(nodes), ranks.output()
    return ranks


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1, 1]], ids=["2 stages", "3 stages on two nodes"])
@pytest.mark.parametrize(("model", "schedules"), [*zip(MODELS, itertools.cycle(SCHEDULES), strict=False)])
def test_losses_and_gradients_are_those_of_one_process(launcher, model, schedules, nodes):
    run(launcher, nodes, model, str(len(nodes)), *schedules)


@pytest.mark.parametrize("model", ["mlp", "resnet"])
def test_a_parameter_that_is_frozen_later_stays_as_it_is(launcher, model):
    """Also where schedules make the gradients of weights apart."""
    run(launcher, [0, 0], model, "2", "zb1p:6:freeze", "zbv:6:freeze", "1f1b:4:freeze")


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1, 0, 1]], ids=["2 stages", "2 replicas of 2 stages"])
def test_a_parameter_for_which_no_rank_has_a_gradient_gets_none(launcher, nodes):
    """It is in both stages; weight decay and momentum leave it as it is."""
    run(launcher, nodes, "untrained", "2", "1f1b:4:clip", "zb1p:4:accumulate")


def test_what_cannot_be_traced_trains_in_stages_that_begin_with_named_layers(launcher):
    ranks = run(launcher, [0, 0], "undecided", "2", "1f1b:4:clip", "zb1p:4:accumulate")
    assert "It is cut between its layers only." in ranks.outputs[0], ranks.output()
    assert re.search(r"^1 +2 \.\. 4 ", ranks.outputs[0], re.M), ranks.output()


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1]], ids=["2 stages", "2 replicas of 2 stages"])
def test_values_cross_a_cut_once_and_their_views_are_made_behind_it(launcher, nodes):
    run(launcher, nodes, "views", "2", "views")


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1]], ids=["2 stages", "3 stages"])
def test_outputs_of_several_stages_are_trained(launcher, nodes):
    run(launcher, nodes, "outputs", str(len(nodes)), "outputs")


@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 0, 1]], ids=["2 stages", "2 replicas of 2 stages"])
def test_sentences_of_other_lengths_train_as_in_one_process(launcher, nodes):
    run(launcher, nodes, "words", "2", "lengths")


def test_one_process_alone_is_a_pipeline_of_one_stage(launcher):
    run(launcher, [0], "inputs", "1", "zbv:4", "1f1b:3")


def test_batch_norm_is_treated_as_chosen(launcher):
    ranks = run(launcher, [0, 0], "batchnorm", "2", "1f1b:1:exact:even", "1f1b:4:micro:even", "statistics")
    assert "BatchNorm: micro." in ranks.outputs[0]


def test_running_statistics_of_replicas_are_averaged(launcher):
    run(launcher, [0, 0, 0, 0], "batchnorm", "2", "replicas")


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        ("mlp", "1f1b:4:tight:clip"),
        ("batchnorm", "gpipe:4:tight:micro:even"),
        ("dropout", "1f1b:4:tight:accumulate"),
        ("unet", "gpipe:4:tight:even"),  # with two pieces for each rank its stages fit as they are
        ("transformer", "interleaved:4:tight:even"),
        ("transformer", "gpipe:6:tight"),
    ],
)
def test_stages_that_compute_forward_passes_again_train_as_one_process_does(launcher, model, schedule):
    """The memory is the least that works, with which a stage cannot hold its activations."""
    ranks = run(launcher, [0, 0], model, "2", schedule)
    assert "computes its forward passes again during the backward pass" in ranks.outputs[0], ranks.output()


def test_running_statistics_are_the_same_where_forward_passes_are_computed_again(launcher):
    run(launcher, [0, 0], "batchnorm", "2", "statistics-again", "bfloat16-again")


def test_stages_move_to_a_folder_under_a_limit_that_is_smaller_than_they_are(launcher, tmp_path):
    ranks = launcher.start("pipeline_spilled", [0, 0], str(tmp_path))
    assert ranks.finish(SECONDS) == [0, 0], ranks.output()
    assert "moves a part of its memory to the disk and back" in ranks.outputs[0], ranks.output()


def test_weights_of_other_stages_are_given_back_when_a_pipeline_is_made(launcher):
    ranks = launcher.start("own_parameters", [0, 0])
    assert ranks.finish(SECONDS) == [0, 0], ranks.output()


def test_pipelines_train_in_bfloat16(launcher):
    run(launcher, [0, 0], "mlp", "2", "bfloat16")


@pytest.mark.parametrize(("model", "schedule"), [("unet", "1f1b:4:clip"), ("lstm", "zb1p:4")])
def test_four_stages_train_as_one_process_does(launcher, model, schedule):
    run(launcher, [0, 1, 0, 1], model, "4", schedule)


def test_replicas_of_pipelines_train_as_one_process_does(launcher):
    run(launcher, [0, 0, 0, 0], "transformer", "2", "1f1b:3:clip", "zb1p:2")


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_of_half_the_speed_gets_fewer_layers(launcher, slow):
    ranks = launcher.start("uneven", [0, 0], str(slow), "2")
    assert ranks.finish(SECONDS) == [0, 0], ranks.output()
    assert "Ranks are not equally fast." in ranks.outputs[0], ranks.output()
    assert re.search(r"sent +speed\n0 .* 1\.00\n", ranks.outputs[0]), ranks.output()


def test_no_order_and_no_delays_hang(launcher):
    """40 steps with random delays for each of these schedules, one with skips over every stage."""
    run(launcher, [0, 1, 0], "unet", "3", "1f1b:8:often:delays", "zbv:6:often", "gpipe:8:often")


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 0]], ids=["one node", "two nodes"])
def test_messages_of_500_pipelines_with_random_delays_arrive(launcher, nodes):
    ranks = launcher.start("mailboxes", nodes, "500")
    assert ranks.finish(SECONDS) == [0] * len(nodes), ranks.output()


@pytest.mark.parametrize("face", ["torch", "loop", "keras"])
def test_pipelines_that_nobody_closes_use_up_nothing(launcher, face):
    """In a process with few segments left; $CARME_PIPELINES is how many come one after the other."""
    ranks = launcher.start("many_pipelines", [0, 0], face, os.environ.get("CARME_PIPELINES", "30"))
    assert ranks.finish(SECONDS) == [0, 0], ranks.output()


@pytest.mark.parametrize(("what", "ending"), [("lost", 1), ("lost start", 0)], ids=["step", "streamed start"])
def test_a_stage_that_ends_is_named_within_a_second(launcher, tmp_path, what, ending):
    expected = [-signal.SIGKILL if rank == ending else 0 for rank in range(3)]
    late = []
    for attempt in range(3):  # a busy machine may let a rank wait for its core
        ranks = launcher.start("pipeline_mistakes", [0, 0, 0], what, str(tmp_path / str(attempt)))
        assert ranks.finish(SECONDS) == expected, ranks.output()
        found = re.findall(r"LATE ([\d.]+) s", ranks.output())
        assert len(found) == 2, ranks.output()
        late.append(max(map(float, found)))
        if late[-1] < 1:
            return
    raise AssertionError(f"it took {late} s")


def test_mistakes_end_in_sentences(launcher):
    ranks = launcher.start("pipeline_mistakes", [0, 0], "mistakes")
    assert ranks.finish(SECONDS) == [0, 0], ranks.output()


def test_checkpoints_that_do_not_fit_are_refused_on_all_ranks(launcher, tmp_path):
    ranks = launcher.start("pipeline_mistakes", [0, 0], "checkpoints", str(tmp_path / "run"))
    assert ranks.finish(SECONDS) == [0, 0], ranks.output()


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("wide", "The loss fails for outputs of shape [3, 3] and targets of shape [3, 5]: "),
        ("rows", "The loss fails for outputs of shape [3, 3] and targets of shape [3, 4]: "),
        ("sums", "The loss has the shape [3, 3], and is to be one number: the mean over the samples."),
    ],
)
def test_targets_that_the_loss_cannot_take_are_refused_in_a_sentence(launcher, what, sentence):
    ranks = launcher.start("pipeline_mistakes", [0, 0], "unlike", what)
    assert ranks.finish(SECONDS) == [0, 0], ranks.output()
    assert f"REFUSED {sentence}" in ranks.outputs[1], ranks.output()
    assert "REFUSED Rank 1 ended while rank 0 waited" in ranks.outputs[0], ranks.output()


def test_a_sparse_gradient_is_refused_on_all_ranks(launcher):
    """It is that of one stage of two, in two replicas."""
    ranks = launcher.start("pipeline_mistakes", [0, 0, 0, 0], "sparse")
    assert ranks.finish(SECONDS) == [0] * 4, ranks.output()


@pytest.mark.parametrize(
    ("model", "nodes", "stages", "schedules"),
    [
        ("dropout", [0, 0, 0], 3, ["1f1b:4", "gpipe:2"]),
        ("lstm", [0, 1], 2, ["zb1p:4", "1f1b:1"]),
        ("batchnorm", [0, 0], 2, ["1f1b:1"]),
        ("inputs", [0, 0, 0, 0], 2, ["zbv:3", "interleaved:4"]),
        ("dropout", [0, 0], 2, ["1f1b:4:tight", "gpipe:4"]),
    ],
)
def test_ordinary_loops_evaluation_and_checkpoints_are_those_of_one_process(
    launcher, model, nodes, stages, schedules
):
    """The second schedule has another layout and resumes from the first one's checkpoint."""
    ranks = launcher.start("pipeline_loops", nodes, model, str(stages), *schedules)
    assert ranks.finish(SECONDS) == [0] * len(nodes), ranks.output()


CHECKPOINTS = ("file", "streamed", "stages")  # see programs/pipeline_restarted.py


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(launcher, tmp_path, checkpoint):
    """Each start plans anew for the ranks it has: two stages, then three, then the whole model on one."""
    for began, (size, steps) in enumerate([(2, 2), (3, 4), (1, 6)]):
        ranks = launcher.start("pipeline_restarted", [0] * size, checkpoint, str(tmp_path), str(steps))
        assert ranks.finish(SECONDS) == [0] * size, ranks.output()
        assert f"BEGAN at step {2 * began} with {size} stages" in ranks.outputs[0]
        assert f"ENDED with {size} ranks as one process does" in ranks.outputs[0]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_run_that_loses_ranks_goes_on_as_a_shorter_pipeline(tmp_path, checkpoint):
    program = Path(__file__).parent / "programs/pipeline_restarted.py"
    command = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "3", "--max-restarts", "2"]
    done = subprocess.run(
        [*command, str(program), checkpoint, str(tmp_path), "6", "2", "4"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    began = re.findall(r"BEGAN at step (\d) with (\d) stages", done.stdout)
    assert began == [("0", "3"), ("2", "2"), ("4", "1")], done.stdout
    assert "ENDED with 1 ranks as one process does" in done.stdout
