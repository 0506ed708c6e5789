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


@pytest.mark.parametrize("name", ["direct", "ring", "halving"])
def test_every_way_between_nodes(launcher, name):
    ranks = launcher.start(
        "collectives", PLACES["three nodes"], environment=lambda rank: {"CARME_ALLREDUCE": name}
    )
    assert ranks.finish() == [0, 0, 0], ranks.said()


def test_links_that_are_measured_or_read(launcher, tmp_path):
    file = tmp_path / "links.json"
    file.write_text('{"times": [[1024, 50.0], [65536, 70.5], [1048576, 400]]}')
    for links in ("measure", str(file)):
        ranks = launcher.start(
            "collectives",
            PLACES["nodes that differ"],
            environment=lambda rank: {"CARME_LINKS": links},  # noqa: B023
        )
        assert ranks.finish() == [0, 0, 0], ranks.said()


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"CARME_ALLREDUCE": "fast"}, "CARME_ALLREDUCE=fast is no way to reduce"),
        ({"CARME_LINKS": "/nowhere"}, "holds no times of links"),
        ({"CARME_LINKS": "{}"}, "holds no times of links"),
        ({"CARME_LINKS": '{"times": [[5, 1], [4, 2]]}'}, "make no sense"),
        ({"CARME_LINKS": '{"times": [[1, 1]]}'}, "make no sense"),
        ({"CARME_LINKS": '{"times": [[1, 1], [2, NaN]]}'}, "make no sense"),
    ],
)
def test_settings_of_links_that_are_none(launcher, tmp_path, environment, word):
    if environment.get("CARME_LINKS", "").startswith("{"):
        (tmp_path / "links").write_text(environment["CARME_LINKS"])
        environment = {"CARME_LINKS": str(tmp_path / "links")}
    ranks = launcher.start("join", [0], "4", environment=lambda rank: environment)
    ranks.finish()
    assert "InvalidCall" in ranks.outputs[0] and word in ranks.outputs[0], ranks.said()


def test_ranks_that_would_reduce_in_different_ways_are_told(launcher):
    ranks = launcher.start(
        "join", [0, 1], "20", environment=lambda rank: {"CARME_ALLREDUCE": "ring" if rank else "halving"}
    )
    ranks.finish()
    assert "Mismatch" in ranks.said(), ranks.said()


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("kind", ["size", "wire", "type", "order", "alltoall"])
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
