"""Training loops of scripts on several ranks, with values of one process."""

import pytest

NODES = pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])


@NODES
@pytest.mark.parametrize(
    "variants",
    [
        ["plain", "accumulate", "accumulate+head", "accumulate+failing"],
        ["accumulate+shard", "head+overlap", "shard+overlap"],
        ["horovod", "horovod+accumulate+head"],
    ],
    ids=["parallelize", "other options", "horovod"],
)
def test_a_backward_pass_with_others_inside_is_one_pass(launcher, nodes, variants):
    launcher.run("loops", nodes, "reentrant", *variants)


def test_a_second_gradient_that_comes_too_late_is_refused(launcher):
    launcher.run("loops", [0, 0], "too_late", "")


def test_a_step_inside_of_another_backward_pass_is_refused(launcher):
    launcher.run("loops", [0, 0], "step_inside", "")


@NODES
def test_optimizers_of_different_layers_step_as_in_one_process(launcher, nodes):
    launcher.run("loops", nodes, "several", "plain", "overlap", "uneven")


def test_gradients_of_several_optimizers_are_clipped_by_one_norm(launcher):
    launcher.run("loops", [0, 0], "together", *["again"] * 3)


@NODES
@pytest.mark.parametrize(
    "variants",
    [
        ["norm", "overlap", "value", "zeros", "model_zeroes"],
        ["scaler", "scaler_unscales", "scaler_model_zeroes"],
    ],
    ids=["clipping", "scaler"],
)
def test_gradients_of_fewer_passes_are_reduced_before_they_are_changed(launcher, nodes, variants):
    launcher.run("loops", nodes, "incomplete", *variants)


def test_passes_are_counted_anew_when_gradients_are_forgotten(launcher):
    launcher.run("loops", [0, 0], "discarded", "none", "zeros", "model")


def test_a_pass_after_gradients_were_reduced_for_clipping_is_refused(launcher):
    launcher.run("loops", [0, 0], "late", "")


@NODES
def test_a_closure_makes_the_gradients_of_one_process(launcher, nodes):
    kinds = ("clip", "clip+named", "accumulate", "accumulate+clip", "overlap+accumulate")
    launcher.run("loops", nodes, "closures", *kinds, "shard+accumulate+clip")


@NODES
def test_buffers_that_modules_replace_are_given_to_all_ranks(launcher, nodes):
    launcher.run("loops", nodes, "reassigned", "")


@NODES
def test_what_modules_put_in_buffers_places_is_not_written_to(launcher, nodes):
    launcher.run("loops", nodes, "saved", "")


def test_buffers_of_other_lengths_on_each_rank_are_refused(launcher):
    launcher.run("loops", [0, 0], "lengths", "")


@NODES
def test_two_forward_passes_with_statistics_come_before_one_backward_pass(launcher, nodes):
    launcher.run("loops", nodes, "twice", "")
