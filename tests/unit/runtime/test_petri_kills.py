"""Workers, the process that forks them, and the coordinator are killed at random: no token or range is lost.

A few kills by default; CARME_PETRI_KILLS=200 for more.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import carme_runtime
from carme_runtime.petri import Memory, Net, PetriError
from patience import HANG

KILLS = int(os.environ.get("CARME_PETRI_KILLS", "6"))
KILLS_PER_RUN = 6
TOKENS = 60

# Each body says who runs it, so that the test knows a worker and a moment.
SCRIPT = f"""
import json, os, sys, time
from carme_runtime.petri import Net

net = Net("killed")
numbers = net.place("numbers", int, tokens=range({TOKENS}))
left, right = net.place("left", int), net.place("right", int, capacity=20)
doubled, sums = net.place("doubled", int), net.place("sums", int)
step, halved = net.place("step", int), net.place("halved", int)

def alive():
    os.write(int(sys.argv[2]), f"{{os.getpid()}} {{os.getppid()}}\\n".encode())

@net.transition(numbers >> left + right, retries=1000)
def split(number):
    alive()
    return number, number

@net.transition(left >> doubled, retries=1000)
def double(number, memory):
    made = memory.allocate(f"number-{{number}}", 3, "int32", lifetime="kept")
    passing = memory.allocate("", 1000)
    alive()
    made.array()[:] = number, len(passing), number
    return number * 2

@net.transition(doubled >> step, retries=1000)
def pass_on(number):
    alive()
    return number

@net.transition(step >> halved, retries=1000)
def halve(number, memory):
    alive()
    return int(memory[f"number-{{number // 2}}"].array()[2])

@net.transition(2 * right >> sums, retries=1000)
def add(pair):
    alive()
    return sum(pair)

if __name__ == "__main__":
    with net.start(2, folder=sys.argv[1], resume=True) as run:
        marking = run.wait()
    print(json.dumps(marking))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])}


def parent_of(process: int) -> int:
    """The parent of a process, or 0."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def run_until(chance: random.Random, script: Path, folder: Path, kills: int) -> tuple[int, str]:
    """Run the script and kill what chance wants: the number of kills, and what it printed if it ended."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), str(writing)],
        env=environment(),
        pass_fds=[writing],
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    done, wait = 0, chance.randrange(1, 25)
    with os.fdopen(reading) as lines:
        for line in lines:
            wait -= 1
            if wait or done == kills:
                continue
            worker, server = map(int, line.split())
            victim = chance.choice(["worker", "worker", "server", "coordinator"])
            with contextlib.suppress(ProcessLookupError):
                if victim == "coordinator":
                    process.kill()
                elif victim == "worker":
                    os.kill(worker, signal.SIGKILL)
                elif parent_of(server) == process.pid:  # and not who has adopted the worker
                    os.kill(server, signal.SIGKILL)
            done += 1
            if victim == "coordinator":
                break
            wait = chance.randrange(1, 25)
        out, _ = process.communicate(timeout=HANG)
    return done, out


@pytest.mark.parametrize("seed", range((KILLS + KILLS_PER_RUN - 1) // KILLS_PER_RUN))
def test_no_token_is_lost_or_doubled(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    script = tmp_path / "net.py"
    script.write_text(SCRIPT)
    left, out = KILLS_PER_RUN, ""
    while not out:
        kills, out = run_until(chance, script, tmp_path / "run", left)
        left -= kills
    marking = json.loads(out)
    assert sorted(marking["halved"]) == list(range(TOKENS))
    assert sum(marking["sums"]) == sum(range(TOKENS)) and len(marking["sums"]) == TOKENS // 2
    assert sum(map(len, marking.values())) == TOKENS + TOKENS // 2
    memory = Memory.at(tmp_path / "run")
    assert [memory[f"number-{n}"].array().tolist() for n in range(TOKENS)] == [
        [n, 1000, n] for n in range(TOKENS)
    ]
    assert len(list(memory)) == TOKENS
    assert not list(Path("/dev/shm").glob(f"*{memory.identity}*"))


def test_a_run_goes_on_from_its_folder_alone(tmp_path: Path):
    """The net comes from the script; so do the classes of its tokens."""
    script = tmp_path / "mesh.py"
    script.write_text(
        "import sys\nfrom carme_runtime.petri import Net\n"
        "class Mesh:\n    def __init__(self, size): self.size = size\n"
        "net = Net('mesh')\nmeshes, sizes = net.place('meshes', Mesh), net.place('sizes', int)\n"
        "@net.transition(meshes >> sizes, needs='later:1')\ndef solve(mesh: Mesh) -> int:\n    "
        "return mesh.size\n"
        "if __name__ == '__main__':\n"
        "    run = net.start(1, folder=sys.argv[1], offers='later:1')\n"
        "    run._activation.units['later'] = 0\n"
        "    run.put(meshes, Mesh(3), Mesh(4))\n"
        "    import os; os._exit(9)\n"
    )
    first = subprocess.run([sys.executable, str(script), str(tmp_path / "run")], env=environment())
    assert first.returncode == 9
    resume = (
        "import sys; from carme_runtime.petri import Net\n"
        "with Net.resume(sys.argv[1], offers='later:1') as run: print(run.resumed, run.wait())"
    )
    second = subprocess.run(
        [sys.executable, "-c", resume, str(tmp_path / "run")],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert "True {'meshes': [], 'sizes': [3, 4]}" in second.stdout, second
    script.unlink()
    with pytest.raises(PetriError, match=r"mesh\.py, which is not to be found"):
        Net.resume(tmp_path / "run")


def test_a_task_whose_worker_was_killed_gets_its_attempt(tmp_path: Path):
    net = Net("attempts")
    x, y = net.place("x", int, tokens=[1]), net.place("y", int)

    @net.transition(x >> y)
    def die_twice(value, attempt):
        if attempt < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt

    with net.start(1, folder=tmp_path / "run") as run:
        assert run.wait(HANG)["y"] == [3]
        assert (
            run.notices
            == ["The worker of transition die_twice was ended by signal 9; the task runs again."] * 2
        )


def test_a_task_that_always_ends_its_worker_is_given_up_and_the_others_are_not(tmp_path: Path):
    net = Net("deadly")
    x, y = net.place("x", int), net.place("y", int)

    @net.transition(x >> y)
    def deadly(value):
        if value == 30:
            os._exit(7)
        return value

    with net.start(2, folder=tmp_path / "run") as run:
        run.put(x, *range(60))
        with pytest.raises(
            PetriError, match="Transition deadly ended its worker 4 times or more, at last by code 7"
        ):
            run.wait(HANG)
        assert 30 in run.marking()["x"]


def test_programs_of_a_killed_worker_and_of_a_closed_run_are_ended(tmp_path: Path):
    """Otherwise they would go on beside those that do the work again."""
    net = Net("orphans")
    x, y = net.place("x", int, tokens=[1]), net.place("y", str)
    reading, writing = os.pipe()

    @net.transition(x >> y)
    def start_program(value, attempt):
        subprocess.run(["sh", "-c", f"echo {attempt}; exec sleep 1000"], stdout=writing, check=True)
        return "never"

    run = net.start(1, folder=tmp_path / "run")
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert lines.readline() == "1\n"
        os.kill(run.workers[0], signal.SIGKILL)
        assert lines.readline() == "2\n"
        run.close()
        assert lines.read() == ""  # every process that had the other end is gone
