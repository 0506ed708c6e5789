"""Which rank goes where."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carme_runtime import CarmeRuntimeError
from carme_runtime.fabric.members import Member, Members
from carme_runtime.launcher import place


def members(*devices: int) -> Members:
    nodes = [Member(number, f"n{number + 1}", "192.0.2.1", count, 4) for number, count in enumerate(devices)]
    return Members.of(nodes, [], len(nodes))


def counts(devices: tuple[int, ...], **wanted: Any) -> list[int]:
    places = place(members(*devices), **wanted)
    hosts = [each.member.host for each in places]
    return [hosts.count(f"n{number + 1}") for number in range(len(devices))]


@pytest.mark.parametrize(
    ("devices", "wanted", "expected"),
    [
        ((4, 4), {}, [4, 4]),
        ((0, 0), {}, [1, 1]),
        ((4, 2), {}, [4, 2]),
        ((0, 0), {"ranks": 4}, [2, 2]),
        ((0, 0), {"ranks": 3}, [2, 1]),
        ((4, 4), {"ranks": 4}, [2, 2]),
        ((4, 1), {"ranks": 5}, [4, 1]),
        ((4, 4), {"ranks": 1}, [1, 0]),
        ((4, 4), {"nodes": 1}, [4, 0]),
        ((4, 0), {}, [4, 0]),
        ((2, 2), {"per_node": 3}, [3, 3]),
        ((0, 0), {"per_node": 4, "ranks": 7}, [4, 3]),
    ],
)
def test_ranks_fill_the_nodes_evenly(
    devices: tuple[int, ...], wanted: dict[str, int], expected: list[int]
) -> None:
    assert counts(devices, **wanted) == expected


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"ranks": 7}, r"has room for 6, one per GPU \(n1: 4, n2: 2\)\. Use -n 6 or less"),
        ({"ranks": 5, "nodes": 1}, r"has room for 4, one per GPU \(n1: 4\)"),
        (
            {"ranks": 5, "per_node": 2},
            r"--devices-per-node 2 leaves room for 4 \(nodes: 2\)\. Use -n 4 or less",
        ),
    ],
)
def test_too_many_ranks_are_refused(wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(CarmeRuntimeError, match=words):
        place(members(4, 2), **wanted)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 12))
def test_blocks_are_whole_and_in_order(devices: list[int], ranks: int) -> None:
    try:
        places = place(members(*devices), ranks=ranks)
    except CarmeRuntimeError:
        assert 0 < sum(devices) < ranks
        return
    assert [each.rank for each in places] == list(range(ranks))
    blocks: dict[str, list[int]] = {}
    for each in places:
        blocks.setdefault(each.member.host, []).append(each.local_rank)
        assert each.node_rank == len(blocks) - 1
    for each in places:
        assert blocks[each.member.host] == list(range(each.local_size))
