"""Ranges of several nodes of a job: real agents on this host, each as if on a node of its own."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.petri import Memory
from carme_runtime.petri.journal import read

# Two tasks that need the GPU of their node meet: so they run at the same time, on two nodes.
MEET = """
import json, os, sys, time
from pathlib import Path
from carme_runtime.petri import Memory, Net, PetriError, Range

here, host = Path(__file__).parent, os.environ.get("SLURMD_NODENAME", "")

def meet(name):
    os.close(os.open(here / name, os.O_RDONLY if host == "n1" else os.O_WRONLY))
"""


@pytest.fixture
def run(make_job: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[[str], tuple[Any, Any]]]:
    """A job of two nodes, and a script started on the first one. Shared memory is as it was in the end."""

    def begin(script: str) -> tuple[Any, Any]:
        (tmp_path / "net.py").write_text(MEET + script)
        for name in ("first", "second", "third"):
            os.mkfifo(tmp_path / name)
        job = make_job("n1", "n2")
        environment = job.node_environment(0) | {"CARME_AGENT": str(job.socket(0))}
        return job, job.start([sys.executable, str(tmp_path / "net.py"), str(tmp_path / "run")], environment)

    yield begin
    assert not shared(tmp_path, "n1")
    for left in shared(tmp_path, "n2"):  # of a node that was killed
        shutil.rmtree(left, ignore_errors=True)


def shared(tmp_path: Path, node: str) -> list[Path]:
    """The folders that the run has in a node's shared memory."""
    identity = read(tmp_path / "run" / "journal").memory["identity"]
    return list(Path("/dev/shm").glob(f"carme-net-*-{identity}@{node}"))


def result(process: Any) -> Any:
    code, out, errors = process.wait()
    assert code == 0, errors
    return json.loads(out)


def test_ranges_are_read_and_written_on_any_node(run: Callable[[str], tuple[Any, Any]], tmp_path: Path):
    _, process = run("""
net = Net("ranges")
start, made, sums = net.place("start", int, tokens=[1, 2]), net.place("made", Range), net.place("sums", Range)
costs, read = net.place("costs", list), net.place("read", list)

@net.transition(start >> made, needs="gpu:1")
def make(value, memory):
    found = memory.allocate(f"made-{host}", 1 << 20)
    found.buffer[:] = bytes([value]) * (1 << 20)
    meet("first")
    return found

@net.transition(2 * made >> sums + 2 * costs)
def add(pair, memory):
    costs = [memory.cost(each.name) for each in pair]
    pair[0].array()[:] += pair[1].array(write=False)
    return pair[0], [[*each, host] for each in costs]

@net.transition(sums >> read, needs="gpu:1")
def look(found, memory):
    last = memory.allocate("last", 3, "int64", lifetime="kept")
    last.array()[:] = int(found.array().min()), int(found.array().max()), len(found)
    return [sorted(memory), host]

if __name__ == "__main__":
    with net.start("job", folder=sys.argv[1], offers="gpu:1") as run:
        marking = run.wait()
        print(json.dumps([marking, run.memory["last"].array().tolist()]))
""")
    marking, last = result(process)
    assert last == [3, 3, 1 << 20]
    assert sorted(size for _, size, _ in marking["costs"]) == [0, 1 << 20]
    assert {where for where, size, host in marking["costs"]} == {"n1, memory", "n2, memory"}
    assert marking["read"][0][0] == ["last", "made-n1", "made-n2"]
    lasting = Memory.at(tmp_path / "run")
    assert list(lasting) == ["last"] and lasting["last"].array().tolist() == last
    assert not list(Path("/dev/shm").glob(f"carme-net-*-{lasting.identity}@*"))


def test_what_two_nodes_write_at_the_same_time_is_not_lost(run: Callable[[str], tuple[Any, Any]]):
    _, process = run(
        """
net = Net("together")
parts, done = net.place("parts", int, entry=True), net.place("done", list)

@net.transition(parts >> done, needs="gpu:1")
def write(part, memory, attempt):
    found = memory["all"]
    if attempt == 1:
        meet("first")
    found.array()[part] += 1
    if attempt == 1:
        meet("second")
    return [part, attempt]

if __name__ == "__main__":
    run = net.start("job", folder=sys.argv[1], offers="gpu:1", checked=False)
    with run:
        run.memory.allocate("all", 2)
        run.put(parts, 0, 1)
        marking = run.wait()
        print(json.dumps([marking["done"], run.memory["all"].array().tolist()]))
"""
    )
    done, values = result(process)
    assert values == [1, 1]
    assert sorted(attempt for _, attempt in done) == [1, 2]


def test_ranges_with_two_copies_survive_their_node(run: Callable[[str], tuple[Any, Any]], tmp_path: Path):
    job, process = run("""
net = Net("copies")
start, made = net.place("start", int, tokens=[1, 2]), net.place("made", Range)
checked, go, seen = net.place("checked", int), net.place("go", int), net.place("seen", list)

@net.transition(start >> made + checked, needs="gpu:1")
def make(value, memory):
    found = memory.allocate(f"made-{host}", 1000, lifetime="kept", copies=2)
    found.buffer[:] = host.encode() * 500
    memory.allocate(f"single-{host}", 1)
    meet("first")
    return found, value

@net.transition(2 * made + go >> seen)
def look(pair, go, memory):
    try:
        memory["single-n2"]
    except PetriError as error:
        lost = str(error)
    return [[bytes(each.buffer[:2]).decode() for each in pair], sorted(memory), lost]

if __name__ == "__main__":
    with net.start("job", folder=sys.argv[1], offers="gpu:1", checked=False) as run:
        run.wait()
        print("ready", flush=True)
        while len(run.status()["nodes"]) > 1:
            time.sleep(0.05)
        run.put(go, 1)
        marking = run.wait()
        print(json.dumps([marking["seen"], run.notices]))
""")
    assert process.line() == "ready"
    # "n2" is this machine: nets of other tests would save what is lost with it (`store.sweep`).
    for range_folder in shared(tmp_path, "n2"):
        (range_folder / ".run").unlink()
    job.joined[0].popen.kill()
    seen, notices = result(process)
    assert [sorted(seen[0][0]), seen[0][1]] == [["n1", "n2"], ["made-n1", "made-n2", "single-n1"]]
    assert "Range single-n2 was lost with the memory of its node." in seen[0][2]
    assert "Range single-n2 was lost with the memory of n2." in notices
    lasting = Memory.at(tmp_path / "run")
    assert {name: bytes(lasting[name].buffer) for name in lasting} == {
        "made-n1": b"n1" * 500,
        "made-n2": b"n2" * 500,
    }


def test_a_resumed_run_finds_the_ranges_of_other_nodes(run: Callable[[str], tuple[Any, Any]], tmp_path: Path):
    script = """
net = Net("resumed")
start, made = net.place("start", int, tokens=[1, 2]), net.place("made", Range)
go, seen = net.place("go", int), net.place("seen", list)

@net.transition(start >> made, needs="gpu:1")
def make(value, memory):
    found = memory.allocate(f"made-{host}", 2)
    found.buffer[:] = host.encode()
    meet("first")
    return found

@net.transition(2 * made + go >> seen)
def look(pair, go):
    return [bytes(each.buffer).decode() for each in pair]

if __name__ == "__main__":
    with net.start("job", folder=sys.argv[1], offers="gpu:1", checked=False, resume=True) as run:
        if run.resumed:
            run.put(go, 1)
        marking = run.wait()
        print(json.dumps([marking["seen"], run.notices]), flush=True)
        if not run.resumed:
            import signal; signal.pause()
"""
    job, process = run(script)
    assert json.loads(process.line()) == [[], []]
    process.popen.kill()
    process.popen.wait()
    environment = job.node_environment(0) | {"CARME_AGENT": str(job.socket(0))}
    again = job.start([sys.executable, str(tmp_path / "net.py"), str(tmp_path / "run")], environment)
    seen, notices = result(again)
    assert [sorted(each) for each in seen] == [["n1", "n2"]] and notices == []


def test_a_guard_that_opens_a_range_of_another_node_is_refused(run: Callable[[str], tuple[Any, Any]]):
    _, process = run("""
net = Net("guarded")
start, made = net.place("start", int, tokens=[1, 2]), net.place("made", Range)
seen, mended = net.place("seen", int), []

@net.transition(start >> made, needs="gpu:1")
def make(value, memory):
    found = memory.allocate(f"made-{host}", 1)
    found.buffer[0] = value
    meet("first")
    return found

@net.transition(2 * made >> seen, guard=lambda pair: mended or sum(each.buffer[0] for each in pair) == 3)
def look(pair):
    return sum(each.buffer[0] for each in pair)

if __name__ == "__main__":
    message = ""
    with net.start("job", folder=sys.argv[1], offers="gpu:1") as run:
        try:
            run.wait()
        except PetriError as error:
            message = str(error)
    mended.append(True)
    with net.start("job", folder=sys.argv[1], offers="gpu:1", resume=True) as run:
        print(json.dumps([message, run.wait()["seen"]]))
""")
    message, seen = result(process)
    assert "The guard of transition look failed" in message
    assert "A guard cannot use range made-n2, which is not on this node." in message
    assert seen == [3]


def test_a_range_that_was_refused_is_the_other_nodes_from_there_on(run: Callable[[str], tuple[Any, Any]]):
    _, process = run("""
net = Net("refused")
start, made = net.place("start", int, tokens=[1, 2]), net.place("made", int)
reads, seen = net.place("reads", int), net.place("seen", list)

@net.transition(start >> made, needs="gpu:1", retries=1)
def make(value, memory, attempt):
    if attempt == 1:
        memory.allocate("same", 1).buffer[0] = value
        meet("first")
    return value

@net.transition(reads >> seen, needs="gpu:1")
def read(number, memory):
    value = int(memory["same"].array(write=False)[0])
    meet("second")
    return [host, value]

if __name__ == "__main__":
    with net.start("job", folder=sys.argv[1], offers="gpu:1", checked=False) as run:
        run.wait()
        run.put(reads, 1, 2)
        print(json.dumps(run.wait()["seen"]))
""")
    seen = result(process)
    assert sorted(host for host, _ in seen) == ["n1", "n2"]
    assert len({value for _, value in seen}) == 1
