"""Nets whose functions run on a Dask cluster."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from carme_runtime.petri import Net, Range
from patience import HANG


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as made:
        yield made


def test_functions_run_on_the_cluster_and_what_uses_ranges_here(client: Any, tmp_path: Path):
    net = Net("dask")
    x, y, z = net.place("x", int), net.place("y", tuple), net.place("z", int)
    ranges, sizes = net.place("ranges", Range), net.place("sizes", tuple)
    offset = 10  # functions take what they use with them

    @net.transition(x >> y)
    def where(value: int) -> tuple[int, int]:
        return value + offset, os.getpid()

    @net.transition(y >> z + ranges)
    def make(given: tuple[int, int], memory: Any) -> tuple[int, Range]:
        return given[1], memory.allocate("", given[0])

    @net.transition(ranges >> sizes)
    def split(made: Range) -> tuple[int, int]:
        return len(made), os.getpid()

    with net.start(client, folder=tmp_path / "run") as run:
        run.put(x, *range(8))
        marking = run.wait(HANG)
        own = run.workers
    cluster = set(client.run(os.getpid).values())
    assert sorted(size for size, _ in marking["sizes"]) == list(range(10, 18))
    assert set(marking["z"]) <= cluster
    assert {process for _, process in marking["sizes"]} <= set(own) and len(own) == 2


def test_generators_retries_and_errors_are_those_of_the_net(client: Any, tmp_path: Path):
    net = Net("errors")
    x, y = net.place("x", int), net.place("y", int)

    @net.transition(x >> y, retries=2)
    def count(value: int, attempt: int):  # type: ignore[no-untyped-def]
        if attempt < 3:
            raise ValueError("not yet")
        yield from range(value)

    with net.start(client, folder=tmp_path / "run") as run:
        run.put(x, 3)
        assert run.wait(HANG)["y"] == [0, 1, 2]
        assert run.fired == {"count": 1}
