"""Optimizers whose state is divided among the ranks."""

import pytest


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("what", ["optimizers", "state", "travel", "gradients", "layout", "again"])
def test_a_divided_optimizer_trains_as_a_whole_one(launcher, nodes, what):
    launcher.run("sharded", nodes, what)


@pytest.mark.parametrize("what", ["optimizers", "state", "travel"])
def test_blocks_of_three_ranks_on_unlike_nodes(launcher, what):
    launcher.run("sharded", [0, 0, 1], what)


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ([0, 1], "shard+accumulate+unused"),
        ([0, 0], "shard+accumulate+uneven+copies"),
        ([0, 1], "shard+overlap+uneven"),
        ([0, 1], "shard+clip+uneven"),
        ([0, 0], "shard+bf16"),
        ([0, 1], "shard+accumulate+incomplete+uneven+clip"),
        ([0, 0], "shard+accumulate+incomplete+overlap+zeros+unused"),
        ([0, 0], "shard+eval+uneven+sequence"),
        ([0, 1], "shard+failing"),
        ([0, 0], "shard+failing+everywhere+overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_a_divided_optimizer_takes_the_other_options(launcher, nodes, kind):
    launcher.run("parallel", nodes, kind)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_models_of_one_optimizer_that_are_called_one_by_one_train_as_in_one_process(launcher, nodes):
    launcher.run("sharded", nodes, "members")


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_parameters_that_get_other_memory_are_trained_on(launcher, tmp_path, nodes):
    launcher.run("sharded", nodes, "moved", str(tmp_path))


def test_what_cannot_be_divided_is_refused(launcher):
    launcher.run("sharded", [0, 0], "mistakes")


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_a_rank_that_requests_the_state_alone_says_so(launcher, nodes):
    ranks = launcher.start("sharded", nodes, "alone")
    ranks.finish()
    assert "REFUSED A rank called optimizer.state_dict(), and another one did not." in ranks.outputs[0], (
        ranks.output()
    )
    assert "Call it on all ranks" in ranks.outputs[0], ranks.output()
