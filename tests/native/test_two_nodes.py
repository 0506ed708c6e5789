"""The benchmarks' two nodes in the network of running hosts, as `allreduce.py --nodes demo` has them.

The hosts are processes in network namespaces of their own, which is what the demo's containers are.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SUBNET, ADDRESSES = "198.18.79.0/24", ("198.18.79.1", "198.18.79.2")


@pytest.fixture
def benchmarks(monkeypatch):
    """What imports a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


@pytest.fixture
def hosts(benchmarks, monkeypatch):
    """Two hosts with a network, which the benchmarks take for the demo's n1 and n2; their processes."""
    two_nodes = benchmarks("two_nodes")
    if not two_nodes.can_be_made():
        pytest.skip("this needs root, ip and tc")
    ready = ["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"]
    running = [subprocess.Popen(ready, stdout=subprocess.PIPE, text=True) for _ in ADDRESSES]
    try:
        for each in running:
            assert each.stdout and each.stdout.readline() == "ready\n"
        pids = [each.pid for each in running]
        pair = ["type", "veth", "peer", "name", "eth0", "netns", pids[1]]
        ip("link", "add", "eth0", "netns", pids[0], *pair)
        for pid, address in zip(pids, ADDRESSES, strict=True):
            on(pid, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                on(pid, "ip", "link", "set", device, "up")
        monkeypatch.setattr(two_nodes, "find_demo_nodes", lambda: (SUBNET, tuple(pids), ADDRESSES))
        yield pids
    finally:
        for each in running:
            each.kill()
            each.wait()
            if each.stdout:
                each.stdout.close()


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True)


def on(pid, *command):
    entered = ["nsenter", "--net", "--target", str(pid), *command]
    return subprocess.run(entered, check=True, capture_output=True, text=True).stdout


def network(pid):
    """How a host's network is set up."""
    shown = (("tc", "qdisc", "show", "dev", "eth0"), ("ip", "route"), ("ip", "-brief", "address"))
    queue = on(pid, "cat", "/sys/class/net/eth0/queues/rx-0/rps_cpus")
    return [on(pid, *command) for command in shown], queue


#: A connection is refused by the node that has the address, as nothing listens there.
REACHED = """
import socket, sys
try:
    socket.create_connection((sys.argv[2], 9), 60, (sys.argv[1], 0))
except ConnectionRefusedError:
    pass
"""


def names():
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith("carme-bench")]


def test_the_network_is_shaped_and_set_back(hosts, benchmarks, tmp_path):
    before, known = list(map(network, hosts)), names()
    with benchmarks("two_nodes").DemoNodes(1, tmp_path, "reno") as nodes:
        assert nodes.addresses == ADDRESSES and len(names()) == len(known) + 2
        for number, pid in enumerate(hosts):
            assert "rate 1Gbit" in on(pid, "tc", "qdisc", "show", "dev", "eth0")
            assert "congctl reno" in on(pid, "ip", "route")
            shown = subprocess.run(
                [*nodes.on(number), "ip", "-brief", "address", "show", "dev", nodes.device],
                check=True, capture_output=True, text=True,
            ).stdout  # fmt: skip
            assert f"{ADDRESSES[number]}/24" in shown
    assert list(map(network, hosts)) == before and names() == known


def test_what_fails_on_the_way_is_set_back(hosts, benchmarks, tmp_path):
    before, known = list(map(network, hosts)), names()
    with pytest.raises(subprocess.CalledProcessError):
        benchmarks("two_nodes").DemoNodes(1, tmp_path, "no-such-control").__enter__()
    assert list(map(network, hosts)) == before and names() == known


def test_nodes_at_a_switch_reach_each_other_at_the_rate(benchmarks, tmp_path):
    two_nodes, known = benchmarks("two_nodes"), names()
    if not two_nodes.can_be_made():
        pytest.skip("this needs root, ip and tc")
    with two_nodes.SwitchedNodes(3, 1, tmp_path) as nodes:
        assert len(nodes.addresses) == 3 and len(names()) == len(known) + 4
        switch = next(name for name in names() if name not in known and name.endswith("-switch"))
        for number in range(3):
            for peer in nodes.addresses:
                reached = [sys.executable, "-c", REACHED, nodes.addresses[number], peer]
                subprocess.run([*nodes.on(number), *reached], check=True, timeout=HANG)
            # Both ways.
            for at, device in (
                (nodes.on(number), nodes.device),
                (["ip", "netns", "exec", switch], f"port{number}"),
            ):
                command = [*at, "tc", "qdisc", "show", "dev", device]
                assert "rate 1Gbit" in subprocess.run(command, capture_output=True, text=True).stdout
    assert names() == known


@pytest.mark.timeout(3 * HANG)
def test_allreduce_is_measured_between_them(hosts, benchmarks, monkeypatch, capsys, tmp_path):
    allreduce = benchmarks("allreduce")
    starters = allreduce.starters
    # The MPI libraries would be installed first.
    monkeypatch.setattr(
        allreduce,
        "starters",
        lambda *all_: {k: v for k, v in starters(*all_).items() if k in ("carme", "gloo")},
    )
    monkeypatch.setattr(allreduce, "tidy_up_when_ended", lambda: None)
    scene = ["--scenes", "tcp_10gbit", "--sizes", "64KiB", "--rounds", "3", "--seconds", "1"]
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["allreduce.py", *scene, "--nodes", "demo", "--json", str(result)])
    before = list(map(network, hosts))
    allreduce.main()
    message = capsys.readouterr()
    assert "tcp_10gbit_64KiB" in message.out and "does not take part" not in message.err
    assert '"nodes": "demo"' in result.read_text()
    assert list(map(network, hosts)) == before
