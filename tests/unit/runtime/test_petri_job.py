"""Workers on all nodes of a job: real agents on this host, each as if on a node of its own."""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import carme_runtime
from carme_runtime.petri import Memory
from carme_runtime.petri.channel import Reader, encode
from patience import HANG

from .conftest import IMPATIENT_AGENT

# Two tasks that need the GPU of their node meet: so they run at the same time, on two nodes.
SCRIPT = """
import json, os, sys
from pathlib import Path
from carme_runtime.petri import Net, Range

net = Net("spread")
x, y = net.place("x", int), net.place("y", list)
sizes, arrays, sums = net.place("sizes", int), net.place("arrays", Range), net.place("sums", list)
here, host = Path(__file__).parent, os.environ.get("SLURMD_NODENAME", "")

@net.transition(x >> y, needs="gpu:1")
def where(value, attempt):
    if value < 2 and attempt == 1:
        os.open(here / "meet", os.O_RDONLY if host == "n1" else os.O_WRONLY)
        if host == "n2" and (here / "stay").exists():
            with open(here / "stays", "w") as file:
                file.write(str(os.getpid()))
            os.open(here / "never", os.O_RDONLY)
    return [value, host, attempt]

@net.transition(sizes >> arrays)
def fill(value, memory):
    made = memory.allocate(f"array-{value}", 8, copies=2)
    made.buffer[0] = value
    return made

@net.transition(arrays >> sums)
def add(array):
    return [array.buffer[0], host]

if __name__ == "__main__":
    with net.start("job", folder=sys.argv[1], offers="gpu:1") as run:
        run.put(x, *range(20))
        run.put(sizes, *range(5))
        marking = run.wait()
        print(json.dumps([marking, run.status()["nodes"], run.notices]))
"""

# All that have reported themselves, by the number of their node.
WAITED = """
def workers(run):
    import time
    there = []
    while len(there) < 6:
        there = [str(each.node) for each in list(run._pool.connections.values()) if each.process]
        time.sleep(0.01)
    return there
"""


@pytest.fixture
def start(make_job: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A job of two nodes, and the net started on the first one."""
    (tmp_path / "spread.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "meet")
    os.mkfifo(tmp_path / "stays")
    os.mkfifo(tmp_path / "never")

    def begin(**options: Any) -> tuple[Any, Any]:
        job = make_job("n1", "n2", **options)
        environment = job.node_environment(0) | {"CARME_AGENT": str(job.socket(0))}
        command = [sys.executable, str(tmp_path / "spread.py"), str(tmp_path / "run")]
        return job, job.start(command, environment)

    return begin


def result(process: Any) -> tuple[dict[str, Any], list[str], list[str]]:
    code, out, errors = process.wait()
    assert code == 0, errors
    return json.loads(out)


def test_tasks_run_on_all_nodes_where_what_they_need_is_free(start: Callable[..., Any], tmp_path: Path):
    _, process = start()
    marking, nodes, notices = result(process)
    assert sorted(value for value, _, _ in marking["y"]) == list(range(20))
    assert Counter(host for value, host, _ in marking["y"] if value < 2) == {"n1": 1, "n2": 1}
    assert sorted(value for value, _ in marking["sums"]) == list(range(5))
    assert len(nodes) == 2 and nodes[1] == "n2" and not notices


def test_each_node_has_as_many_workers_as_are_wanted(start: Callable[..., Any], tmp_path: Path):
    script = tmp_path / "spread.py"
    text = script.read_text().replace('net.start("job"', 'net.start("job:3"')
    text = text.replace('run.status()["nodes"]', "workers(run)")
    script.write_text(text.replace("if __name__", WAITED + "\nif __name__"))
    _, process = start()
    marking, workers, _ = result(process)
    assert sorted(value for value, _, _ in marking["y"]) == list(range(20))
    assert Counter(workers) == {"None": 3, "1": 3}


def test_the_tasks_of_a_lost_node_run_on_the_others(start: Callable[..., Any], tmp_path: Path):
    (tmp_path / "stay").touch()
    job, process = start()
    assert int((tmp_path / "stays").read_text())
    job.joined[0].popen.kill()
    marking, _, notices = result(process)
    assert sorted(value for value, _, _ in marking["y"]) == list(range(20))
    assert {attempt for value, _, attempt in marking["y"] if value < 2} == {1, 2}
    assert "Node n2 was lost; its tasks run again on the others." in notices


def test_a_worker_of_another_node_is_killed(start: Callable[..., Any], tmp_path: Path):
    (tmp_path / "stay").touch()
    _, process = start()
    os.kill(int((tmp_path / "stays").read_text()), signal.SIGKILL)
    marking, _, notices = result(process)
    assert sorted(value for value, _, _ in marking["y"]) == list(range(20))
    assert {attempt for value, _, attempt in marking["y"] if value < 2} == {1, 2}
    assert notices == ["The worker of transition where was ended by signal 9; the task runs again."]


def test_the_tasks_of_a_node_that_stands_still_run_on_the_others(start: Callable[..., Any], tmp_path: Path):
    """When it goes on, what it does no longer counts, and its workers end."""
    (tmp_path / "stay").touch()
    job, process = start(agent=IMPATIENT_AGENT)
    worker = int((tmp_path / "stays").read_text())
    node = processes_of(job)
    assert worker in node
    send(signal.SIGSTOP, node)
    try:
        marking, _, notices = result(process)
    finally:
        send(signal.SIGCONT, node)
    assert sorted(value for value, _, _ in marking["y"]) == list(range(20))
    assert sorted(value for value, _ in marking["sums"]) == list(range(5))
    assert "Node n2 was lost; its tasks run again on the others." in notices
    wait_for_end(worker)


# The other node's first task never ends; this one's wait until that has begun.
LIMITED = """
import json, os, sys, time
from pathlib import Path
from carme_runtime.petri import Net

net = Net("limited")
x, y = net.place("x", int, tokens=range(4)), net.place("y", int)
here, host = Path(__file__).parent, os.environ.get("SLURMD_NODENAME", "")

@net.transition(x >> y, needs="gpu:1", limit=1, retries=1000)
def wait(value):
    if host == "n2" and not (here / "begun").exists():
        (here / "begun").touch()
        time.sleep(100_000)
    while not (here / "begun").exists():
        time.sleep(0.05)
    return value

if __name__ == "__main__":
    with net.start("job", folder=sys.argv[1], offers="gpu:1") as run:
        print(json.dumps([run.wait(), [], run.notices]))
"""


def test_a_task_on_another_node_is_ended_at_its_limit(make_job: Callable[..., Any], tmp_path: Path):
    """Those of this node may be, too: the other node takes its time to begin."""
    (tmp_path / "limited.py").write_text(LIMITED)
    job = make_job("n1", "n2")
    environment = job.node_environment(0) | {"CARME_AGENT": str(job.socket(0))}
    command = [sys.executable, str(tmp_path / "limited.py"), str(tmp_path / "run")]
    marking, _, notices = result(job.start(command, environment))
    assert marking["x"] == [] and sorted(marking["y"]) == list(range(4))
    assert notices and all("took longer than its limit of 1 s with" in notice for notice in notices)


def test_the_program_for_workers_on_another_node_is_killed(start: Callable[..., Any], tmp_path: Path):
    (tmp_path / "stay").touch()
    _, process = start()
    worker = int((tmp_path / "stays").read_text())
    os.kill(parent(parent(worker)), signal.SIGKILL)
    marking, _, _ = result(process)
    assert sorted(value for value, _, _ in marking["y"]) == list(range(20))


# Each body says who runs it, so that the test knows a worker and a moment.
KILLED = """
import json, os, sys
from carme_runtime.petri import Net, Range

net = Net("killed")
x, y, z = net.place("x", int, tokens=range(60)), net.place("y", int), net.place("z", list)
results, kept, joined = net.place("results", int), net.place("kept", Range), net.place("joined", list)

def alive():
    fifo = os.open(os.path.join(os.path.dirname(__file__), "alive"), os.O_WRONLY)
    os.write(fifo, f"{os.getpid()} {os.getppid()}\\n".encode())
    os.close(fifo)

@net.transition(x >> y + results, retries=1000)
def both(value):
    alive()
    return value, value

@net.transition(2 * y >> z, retries=1000)
def pair(values):
    alive()
    return values

@net.transition(results >> kept, retries=1000)
def save(value, memory):
    made = memory.allocate(f"range-{value}", 1, lifetime="kept", copies=2)
    made.buffer[0] = value
    alive()
    return made

@net.transition(2 * kept >> joined, retries=1000)
def join(pair):
    alive()
    return [each.buffer[0] for each in pair]

if __name__ == "__main__":
    with net.start("job", folder=sys.argv[1], resume=True) as run:
        print(json.dumps(run.wait()))
"""
KILLS = int(os.environ.get("CARME_PETRI_KILLS", "4"))
KILLS_PER_RUN = 10


@pytest.mark.parametrize("seed", range((KILLS + KILLS_PER_RUN - 1) // KILLS_PER_RUN))
def test_nothing_is_lost_by_kills_on_any_node(make_job: Callable[..., Any], tmp_path: Path, seed: int):
    """Of workers, those that fork them, and the coordinator; at last a node is lost or stands still."""
    chance = random.Random(seed)
    (tmp_path / "killed.py").write_text(KILLED)
    os.mkfifo(tmp_path / "alive")
    job = make_job("n1", "n2")
    environment = job.node_environment(0) | {"CARME_AGENT": str(job.socket(0))}
    command = [sys.executable, str(tmp_path / "killed.py"), str(tmp_path / "run")]
    left, out = min(KILLS, KILLS_PER_RUN), ""
    last, node = "pause" if seed % 2 else "agent", []
    with os.fdopen(os.open(tmp_path / "alive", os.O_RDWR)) as lines, contextlib.ExitStack() as end:
        end.callback(lambda: send(signal.SIGCONT, node))
        while not out:
            process = job.start(command, environment)
            watcher = threading.Thread(target=say_end, args=(process, tmp_path / "alive"))
            watcher.start()
            wait = chance.randrange(1, 12)
            while (line := lines.readline()) != "end\n":
                wait -= 1
                if wait or not left:
                    continue
                worker, server = map(int, line.split())
                victims = ["worker", "server", "program", "coordinator"]
                victim = last if left == 1 else chance.choice(victims)
                if victim == "pause":
                    node += processes_of(job)
                    send(signal.SIGSTOP, node)
                else:
                    kill(victim, worker, server, process, job)
                left, wait = left - 1, chance.randrange(1, 12)
            watcher.join()
            code, out, errors = process.wait()
            assert code in (0, -signal.SIGKILL), errors
    marking = json.loads(out)
    assert sorted(each for pair in marking["z"] for each in pair) == list(range(60))
    assert sorted(each for pair in marking["joined"] for each in pair) == list(range(60))
    assert sum(map(len, marking.values())) == 60
    memory = Memory.at(tmp_path / "run")
    assert {name: memory[name].buffer[0] for name in memory} == {f"range-{n}": n for n in range(60)}


def processes_of(job: Any) -> list[int]:
    """All of the second node."""
    node = [job.joined[0].popen.pid]
    for each in node:  # and of those that are found meanwhile
        node += children(each)
    return node


def send(number: signal.Signals, processes: list[int]) -> None:
    """Send a signal to those that are there."""
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


def children(process: int) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if parent(int(each.name)) == process:
                found.append(int(each.name))
    return found


def wait_for_end(process: int) -> None:
    """Return when the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        watch = os.pidfd_open(process)
        try:
            assert select.select([watch], [], [], HANG)[0]
        finally:
            os.close(watch)


def say_end(process: Any, fifo: Path) -> None:
    process.popen.wait()
    with fifo.open("w") as lines:
        lines.write("end\n")


def kill(victim: str, worker: int, server: int, process: Any, job: Any) -> None:
    """Kill a worker, or what is above it; those that are gone already are not of this run any more."""
    with contextlib.suppress(OSError):
        if victim == "coordinator":
            process.popen.kill()
        elif victim == "agent":
            job.joined[0].popen.kill()
        else:
            above = {"worker": worker, "server": server, "program": parent(server)}[victim]
            words = Path(f"/proc/{above}/cmdline").read_text()
            # And not who has adopted what was killed before.
            if parent(worker) == server and ("killed.py" in words or "petri.remote" in words):
                os.kill(above, signal.SIGKILL)


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_another_version_on_a_node_is_refused(tmp_path: Path):
    """What a node's program says to a program of another version, before it reads the net."""
    command = [sys.executable, "-m", "carme_runtime.petri.remote", str(tmp_path / "run")]
    source = str(Path(carme_runtime.__file__).parents[1])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source}
    ) as process:
        out, _ = process.communicate(encode(("begin", 0, {"version": "0.0.7"})), HANG)
    ((kind, sentence, remedy),) = Reader().feed(out)
    own = carme_runtime.__version__
    assert kind == "refused" and sentence.startswith("On ")
    assert f"carme_runtime is {own} here, and 0.0.7 where the net was started." in sentence
    assert "Install the same version on all nodes" in remedy
