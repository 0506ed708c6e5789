"""What the transport and the collectives promise, over both transports and both together."""

import sys

import pytest

from carme_runtime import gaspi

PLACES = {
    "one rank": [0],
    "two ranks, one node": [0, 0],
    "four ranks, one node": [0, 0, 0, 0],
    "two nodes": [0, 1],
    "three nodes": [0, 1, 2],
    "two nodes of two": [0, 0, 1, 1],
    "nodes that differ": [0, 0, 1],
    "ranks in turn": [0, 1, 0, 1],
}


def pick(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("nodes", [pytest.param(PLACES[name], id=name) for name in names])


@pick("two ranks, one node", "three nodes", "nodes that differ")
def test_one_sided_operations(launcher, nodes):
    launcher.run("one_sided", nodes)


@pick(*PLACES)
def test_collectives(launcher, nodes):
    launcher.run("collectives", nodes)


@pick("four ranks, one node", "three nodes")
def test_the_same_bits_in_every_run(launcher, nodes):
    said = [launcher.run("collectives", nodes, "sum").outputs[0] for _ in range(2)]
    assert said[0] == said[1] and "bits" in said[0]


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("kind", ["size", "type", "order", "alltoall"])
def test_ranks_that_disagree_are_told(launcher, nodes, kind):
    ranks = launcher.run("mistakes", nodes, kind)
    for rank, said in ranks.outputs.items():
        assert "no error" not in said, ranks.said()
        # All notice by themselves on one node; between nodes some only learn that the group broke.
        if len(set(nodes)) == 1 and (kind != "alltoall" or rank == 0):
            assert "Mismatch" in said and "Rank" in said, ranks.said()
    assert "Mismatch" in ranks.said()
    if kind == "size" and len(set(nodes)) == 1:
        assert "1000 x float32 'weights'" in ranks.outputs[0]
        assert "2000 x float32 'weights'" in ranks.outputs[1]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_a_rank_that_does_not_come_is_named(launcher, nodes):
    said = launcher.run("mistakes", nodes, "late").outputs[0]
    assert "Rank 1" in said and ("Timeout" in said or "PeerLost" in said)


def test_without_the_native_core_a_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "carme_runtime._core", None)
    monkeypatch.delattr("carme_runtime._core")
    with pytest.raises(gaspi.CoreMissing, match="compiler"):
        gaspi.init(1, {"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"RANK": "x"}, "whole numbers"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT"),
        ({"RANK": "3"}, "Rank 3"),
    ],
)
def test_an_environment_that_makes_no_sense_is_explained(environment, word):
    with pytest.raises(gaspi.InvalidCall, match=word):
        gaspi.init(1, environment)
