"""Workers on all nodes of a job: real agents on this host, each of which takes itself for a node."""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    made = memory.allocate(f"array-{value}", 8)
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


@pytest.fixture
def start(make_job: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A job of two nodes, and the net started on the first one."""
    (tmp_path / "spread.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "meet")
    os.mkfifo(tmp_path / "stays")
    os.mkfifo(tmp_path / "never")

    def begin() -> tuple[Any, Any]:
        job = make_job("n1", "n2")
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
    assert sorted(marking["sums"]) == [[value, "n1"] for value in range(5)]
    assert len(nodes) == 2 and nodes[1] == "n2" and not notices


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


def test_the_program_for_workers_on_another_node_is_killed(start: Callable[..., Any], tmp_path: Path):
    (tmp_path / "stay").touch()
    _, process = start()
    worker = int((tmp_path / "stays").read_text())
    os.kill(parent(parent(worker)), signal.SIGKILL)
    marking, _, _ = result(process)
    assert sorted(value for value, _, _ in marking["y"]) == list(range(20))


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
