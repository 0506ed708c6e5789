"""A job's traffic is reported only where it can be attributed to the job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from carme_monitoring.jobs import Network, Traffic
from carme_monitoring.jobs import network as network_module

USER = 60_000
HEAD = "Inter-| Receive | Transmit\n face |bytes packets|bytes packets\n"


class Node:
    """A node's files: processes, interfaces, ports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = Network(folder / "proc", folder / "net", folder / "infiniband")
        self.jobs: dict[int, list[int]] = {}
        self.counts("self", eth0=(0, 0))

    def counts(self, process: int | str, **interfaces: tuple[int, int]) -> None:
        """What a process sees of the network, in a namespace of its own unless it had another's."""
        file = self.folder / f"proc/{process}/net/dev"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            f" {name}: {got} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n"
            for name, (got, sent) in {"lo": (999, 999), **interfaces}.items()
        ]
        file.write_text(HEAD + "".join(rows))
        if process != "self" and os.geteuid() == 0:
            os.chown(file.parents[1], USER, -1)

    def shares(self, process: int, owner: int | str) -> None:
        """A process in another's namespace."""
        file = self.folder / f"proc/{process}/net/dev"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.hardlink_to(self.folder / f"proc/{owner}/net/dev")
        if os.geteuid() == 0:
            os.chown(file.parents[1], USER, -1)

    def read(self) -> dict[int, Traffic]:
        return self.network.traffic(self.jobs, lambda job_id: self.jobs[job_id])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_job_in_a_namespace_of_its_own_has_what_its_interfaces_carried(node: Node):
    node.jobs = {7: [101, 102], 8: [103]}
    node.counts(101, eth0=(1000, 20), eth1=(1, 2))
    node.shares(102, 101)
    node.shares(103, "self")
    assert node.read() == {7: Traffic(1001, 22, "namespace")}
    node.counts(101, eth0=(1500, 30), eth1=(1, 2))
    assert node.read() == {7: Traffic(1501, 32, "namespace")}


def test_jobs_that_share_the_node_s_network_have_no_figures(node: Node):
    node.jobs = {7: [101], 8: [103]}
    node.shares(101, "self")
    node.shares(103, "self")
    assert node.read() == {}


def test_two_jobs_in_one_namespace_have_no_figures(node: Node):
    node.jobs = {7: [101], 8: [103]}
    node.counts(101, eth0=(1000, 20))
    node.shares(103, 101)
    assert node.read() == {}


def test_a_job_that_partly_shares_the_node_s_network_has_no_figures(node: Node):
    node.jobs = {7: [101, 102], 8: [103]}
    node.counts(101, eth0=(1000, 20))
    node.shares(102, "self")
    node.shares(103, "self")
    assert node.read() == {}


def test_a_job_alone_on_the_node_has_what_the_node_carried_since(node: Node):
    node.jobs = {7: [101]}
    node.shares(101, "self")
    node.counts("self", eth0=(10_000, 5000))
    assert node.read() == {7: Traffic(0, 0, "node")}
    node.counts("self", eth0=(10_300, 5001))
    assert node.read() == {7: Traffic(300, 1, "node")}
    # While another job runs there, nobody knows which job sent it; it is never counted for a job.
    node.jobs[8] = [103]
    node.shares(103, "self")
    node.counts("self", eth0=(20_000, 6000))
    assert node.read() == {}
    del node.jobs[8]
    node.counts("self", eth0=(30_000, 7000))
    assert node.read() == {7: Traffic(300, 1, "node")}
    node.counts("self", eth0=(30_004, 7005))
    assert node.read() == {7: Traffic(304, 6, "node")}


def test_a_counter_that_is_reset_makes_no_negative_figure(node: Node):
    node.jobs = {7: [101]}
    node.shares(101, "self")
    node.counts("self", eth0=(10_000, 5000))
    node.read()
    node.counts("self", eth0=(40, 50))
    assert node.read() == {7: Traffic(40, 50, "node")}


def test_bridges_and_what_a_port_counts_already_are_not_counted_twice(node: Node, tmp_path: Path):
    for name, kind in (("eth0", "1"), ("ib0", "32"), ("docker0", "1")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "type").write_text(f"{kind}\n")
    for name in ("eth0", "ib0"):
        (tmp_path / "net" / name / "device").mkdir()
    counters = tmp_path / "infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    node.jobs = {7: [101]}
    node.shares(101, "self")

    def carried(number: int) -> None:
        node.counts("self", eth0=(number, number), ib0=(number, 0), docker0=(number, 0))
        for name in ("port_rcv_data", "port_xmit_data"):
            (counters / name).write_text(f"{number}\n")

    carried(0)
    node.read()
    carried(100)  # words of four bytes at the port
    assert node.read() == {7: Traffic(500, 500, "node")}


def test_what_ended_while_it_was_read_is_left_out(node: Node):
    node.jobs = {7: [101, 104], 8: [103]}
    node.counts(101, eth0=(1000, 20))
    assert node.read() == {7: Traffic(1000, 20, "namespace")}
    (node.folder / "proc/101/net/dev").unlink()
    assert node.read() == {}  # no process of it is left that would show its namespace
    node.counts(104, eth0=(5, 5))
    assert node.read() == {7: Traffic(1005, 25, "namespace")}  # what was counted remains
    node.jobs = {}
    assert node.read() == {}


def test_many_jobs_are_read_in_turn(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network_module, "MOST_JOBS", 2)
    for number in range(5):
        node.counts(100 + number, eth0=(number, 0))
        node.jobs[number] = [100 + number]
    assert len(node.read()) == 2
    assert len(node.read()) == 4
    assert len(node.read()) == 5


@pytest.fixture
def processes() -> Iterator[list[int]]:
    """A process in the network of this host, and one in a namespace of its own; both another user's."""
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    waits = ["setpriv", "--reuid", str(USER), "--clear-groups", "sh", "-c", "echo; cat"]
    commands = [waits, ["unshare", "--net", *waits]]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
        for command in commands
    ]
    begun = [process.stdout is not None and bool(process.stdout.readline()) for process in started]
    assert begun[0], "a process could not be started as another user"
    if not begun[1]:
        pytest.skip("this host lets nobody make a network namespace")
    yield [process.pid for process in started]
    for process in started:
        process.communicate()


def test_the_kernel_says_who_is_in_which_namespace(processes: list[int]):
    network = Network()
    jobs = {7: [processes[0]], 8: [processes[1]]}
    assert network.traffic(jobs, lambda job_id: jobs[job_id]) == {8: Traffic(0, 0, "namespace")}
