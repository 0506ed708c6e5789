"""The start of training while the model still travels."""

import pytest


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("what", ["overlap", "uses", "divided"])
def test_a_model_is_used_while_it_travels(launcher, nodes, what):
    launcher.run("streamed", nodes, what)


def test_three_ranks_on_unlike_nodes_stream(launcher):
    launcher.run("streamed", [0, 0, 1], "uses")


def test_a_start_that_does_not_exist_is_refused(launcher):
    launcher.run("streamed", [0, 0], "mistakes")
