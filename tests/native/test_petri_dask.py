"""Nets whose functions run on a Dask cluster."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from carme_runtime.petri import Net, PetriError, Range
from patience import HANG


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as opened:
        yield opened


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
    def split(created: Range) -> tuple[int, int]:
        return len(created), os.getpid()

    with net.start(client, folder=tmp_path / "run") as run:
        run.put(x, *range(8))
        marking = run.wait(HANG)
        while len(own := run.workers) < 2:  # one may have done all before the other has begun
            time.sleep(0.01)
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


def test_clients_whose_cluster_other_processes_cannot_use_are_refused(client: Any, tmp_path: Path):
    net = Net("refused")
    net.add("t", net.place("x", int) >> net.place("y", int), lambda x: x)
    inside = Client(processes=False, n_workers=1, dashboard_address=None, set_as_default=False)
    with inside, pytest.raises(PetriError, match="inside of this process"):
        net.start(inside, folder=tmp_path / "inside")

    async def start() -> None:
        async with Client(client.scheduler.address, asynchronous=True, set_as_default=False) as peer:
            with pytest.raises(PetriError, match="asynchronous Dask client"):
                net.start(peer, folder=tmp_path / "asynchronous")

    asyncio.run(start())
    assert not list(tmp_path.iterdir())
