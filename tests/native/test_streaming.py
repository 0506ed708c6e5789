"""The start of training while the model still travels."""

import pytest

from patience import HANG


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("what", ["overlap", "uses", "divided"])
def test_a_model_is_used_while_it_travels(launcher, nodes, what):
    launcher.run("streamed", nodes, what)


def test_three_ranks_on_unlike_nodes_stream(launcher):
    launcher.run("streamed", [0, 0, 1], "uses")


def test_a_start_that_does_not_exist_is_refused(launcher):
    launcher.run("streamed", [0, 0], "mistakes")


@pytest.mark.timeout(4 * HANG)
@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 0, 1]], ids=["2 stages", "2 replicas of 2 stages"])
def test_the_first_step_of_a_pipeline_runs_while_parameters_travel(launcher, nodes):
    ranks = launcher.start("pipeline_streamed", nodes, "2")
    assert ranks.finish(3 * HANG) == [0] * len(nodes), ranks.said()
