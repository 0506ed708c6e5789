"""Ranges of memory whose program, coordinator or node was killed: what is kept, and what is freed."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import carme_runtime
from carme_runtime.petri import Memory, Net, Range
from patience import HANG

pytestmark = pytest.mark.usefixtures("shared")


# A coordinator that is killed when its task has reported that it is in the middle of its work.
SCRIPT = """
import json, os, sys
from pathlib import Path
from carme_runtime.petri import Net, Range, store
store.SHARED = Path(sys.argv[1])
net = Net("phoenix")
x, y, z = net.place("x", int, tokens=[1]), net.place("y", Range), net.place("z", list)

@net.transition(x >> y)
def first(value, memory):
    made = memory.allocate("result", 4, lifetime="kept")
    made.buffer[:] = b"good"
    memory.allocate("other", 4)
    return made

@net.transition(y >> z, retries=10)
def second(given, memory, attempt):
    memory.allocate("half", 4)
    if attempt == 1:
        os.write(int(sys.argv[3]), b"r")
        import time; time.sleep(1000)
    return [bytes(given.buffer).decode(), *memory]

if __name__ == "__main__":
    with net.start(1, folder=sys.argv[2], resume=True) as run:
        print(json.dumps(run.wait()["z"]))
"""


def start(script: Path, shared: Path, folder: Path, writing: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])}
    command = [sys.executable, str(script), str(shared), str(folder), str(writing)]
    return subprocess.Popen(command, env=environment, pass_fds=[writing], stdout=subprocess.PIPE, text=True)


def kill_in_the_middle(script: Path, shared: Path, folder: Path) -> None:
    script.write_text(SCRIPT)
    reading, writing = os.pipe()
    process = start(script, shared, folder, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as came:
        assert came.read(1) == b"r"
        process.kill()
        assert came.read() == b""  # its workers have ended, too
    process.communicate()
    for alive in shared.glob("*/.alive"):  # what a process has open it closes in no order that one may know
        with alive.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def test_ranges_survive_the_coordinator(folder: Path, shared: Path, tmp_path: Path):
    kill_in_the_middle(tmp_path / "net.py", shared, folder)
    assert len(list(shared.iterdir())) == 1
    again = start(tmp_path / "net.py", shared, folder, 2)
    assert json.loads(again.communicate(timeout=HANG)[0]) == [["good", "half", "other", "result"]]
    assert list(shared.iterdir()) == []
    assert bytes(Memory.at(folder)["result"].buffer) == b"good"


def test_the_next_net_frees_what_a_dead_one_has_left(folder: Path, shared: Path, tmp_path: Path):
    kill_in_the_middle(tmp_path / "net.py", shared, folder)
    kill_in_the_middle(tmp_path / "net.py", shared, tmp_path / "gone")
    assert {path.name for path in (folder / "memory").glob("[!.]*")} == {"other", "result"}
    subprocess.run(["rm", "-r", str(tmp_path / "gone")], check=True)
    assert len(list(shared.iterdir())) == 1
    net = Net("next")
    net.add("t", net.place("x") >> None, print)
    net.start(1, folder=tmp_path / "next").close()
    assert list(shared.iterdir()) == []
    again = start(tmp_path / "net.py", shared, folder, 2)
    assert json.loads(again.communicate(timeout=HANG)[0]) == [["good", "half", "other", "result"]]


def test_a_program_that_breaks_off_can_go_on_with_its_ranges(folder: Path):
    net = Net("broken")
    x, y = net.place("x", Range), net.place("y", int)
    net.add("read", x >> y, lambda given: given.buffer[0])
    with pytest.raises(KeyError), net.start(1, folder=folder) as run:
        run.memory.allocate("given", 1).buffer[0] = 9
        raise KeyError
    with Net.resume(folder, net=net, workers=1) as run:
        run.put(x, run.memory["given"])
        assert run.wait(HANG)["y"] == [9]


def test_what_a_killed_process_has_left_on_the_disk_goes(folder: Path):
    net = Net("left")
    net.add("t", net.place("x") >> None, print)
    with net.start(1, folder=folder) as run:
        run.memory.allocate("kept", 8, lifetime="kept")
    (folder / "memory" / ".new-other").write_bytes(bytes(8))
    mark = (folder / "memory" / ".range-kept").read_text()
    (folder / "memory" / ".range-begun").write_text(mark.replace("kept", "begun", 1))
    assert list(Memory.at(folder)) == ["kept"]
    with Net.resume(folder, net=net, workers=1) as run:
        assert list(run.memory) == ["kept"]
        assert {path.name for path in (folder / "memory").iterdir()} == {"kept", ".range-kept"}
        run.memory.allocate("begun", 4).buffer[:] = b"good"


def test_a_range_is_made_again_after_a_kill(folder: Path):
    net = Net("half")
    net.add("t", net.place("x") >> None, print)
    with net.start(1, folder=folder) as run:
        run.memory.allocate("first", 8)
        where = run.memory["first"].path.parent
        mark = (where / ".range-first").read_text()
        (where / ".range-second").write_text(mark.replace("first", "second", 1))
        (where / "second").touch()
        assert list(run.memory) == ["first"]
        assert run.memory.allocate("second", 8).array().tolist() == [0] * 8
