"""Random small nets: whatever runs at once, the marking is one that comes about one step after the other.

That holds when workers, the process that forks them and the coordinator are killed, too.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import carme_runtime
from carme_runtime.petri import Arc, Flow, Net
from carme_runtime.petri.activation import Activation, Task, Token
from carme_runtime.petri.model import Transition
from patience import HANG

Marking = tuple[int, ...]


@st.composite
def small_nets(draw: Any) -> Net:
    """Up to four places and transitions, with each kind of arc."""
    net = Net("random")
    for number in range(draw(st.integers(1, 4))):
        capacity = draw(st.sampled_from([None, None, 1, 2, 3]))
        tokens = draw(st.integers(0, min(3, capacity or 3)))
        net.place(f"p{number}", capacity=capacity, tokens=[None] * tokens)
    places = st.sampled_from(list(net.places.values()))
    inputs = st.builds(
        Arc, places, st.integers(1, 2), st.sampled_from(["take", "take", "take", "read", "empty"])
    )
    outputs = st.builds(Arc, places, st.integers(1, 2))
    for number in range(draw(st.integers(1, 4))):
        flow = Flow(
            tuple(draw(st.lists(inputs, min_size=1, max_size=3))), tuple(draw(st.lists(outputs, max_size=2)))
        )
        net.add(f"t{number}", flow, priority=draw(st.integers(0, 1)))
    return net


def fire(net: Net, marking: Marking, transition: Transition) -> Marking | None:
    """The sequential interpreter: one step, or None where it is not allowed."""
    after = list(marking)
    for arc in transition.flow.inputs:
        if arc.kind == "empty" and marking[arc.place.index] >= arc.weight:
            return None
        if arc.kind != "empty":  # those that are read must lie beside those that are taken
            after[arc.place.index] -= arc.weight
    if min(after) < 0:
        return None
    for arc in transition.flow.inputs:
        if arc.kind == "read":
            after[arc.place.index] += arc.weight
    for arc in transition.flow.outputs:
        after[arc.place.index] += arc.weight
    for arc in transition.flow.outputs:
        if arc.place.capacity is not None and after[arc.place.index] > arc.place.capacity:
            return None
    return tuple(after)


def first(net: Net) -> Marking:
    return tuple(len(place.tokens) for place in net.places.values())


def ends(net: Net, most: int = 300) -> set[Marking] | None:
    """Where the sequential interpreter can end; None where it may go on for ever, or long."""
    followers: dict[Marking, set[Marking]] = {}
    waiting = deque([first(net)])
    while waiting:
        marking = waiting.popleft()
        if marking in followers:
            continue
        steps = {fire(net, marking, transition) for transition in net.transitions.values()}
        followers[marking] = {step for step in steps if step is not None}
        if len(followers) > most:
            return None
        waiting.extend(followers[marking])
    left = dict(followers)
    while left:  # without those that lead nowhere else: what remains are circles
        over = [marking for marking, steps in left.items() if not any(step in left for step in steps)]
        if not over:
            return None
        for marking in over:
            del left[marking]
    return {marking for marking, steps in followers.items() if not steps}


def outputs(task: Task, number: int) -> list[tuple[int, Token]]:
    arcs = task.rule.transition.flow.outputs
    return [(arc.place.index, Token(number, b"N.")) for arc in arcs for _ in range(arc.weight)]


def counted(net: Net, activation: Activation) -> Marking:
    marking = activation.marking()
    return tuple(len(marking[name]) for name in net.places)


@hypothesis.settings(max_examples=50)
@hypothesis.given(small_nets())
def test_tasks_end_in_an_order_that_is_allowed(net: Net):
    for seed in range(10):
        run_by_chance(net, random.Random(seed))


def run_by_chance(net: Net, chance: random.Random) -> None:
    """Start and end tasks in any order, and compare with the sequential interpreter at each end."""
    activation = Activation(net, {})
    for place in net.places.values():
        for _ in place.tokens:
            activation.add(place.index, Token(chance.getrandbits(60), b"N."))
    marking = first(net)
    running: list[Task] = []
    for _ in range(60):
        action = chance.random()
        if action < 0.5 and (task := activation.next()):
            running.append(task)
        elif running:
            task = running.pop(chance.randrange(len(running)))
            if action > 0.9:  # its worker was killed
                activation.give_back(task)
            else:
                after = fire(net, marking, task.rule.transition)
                assert after is not None, "a task ended that could not start now"
                marking = after
                activation.finish(task, outputs(task, chance.getrandbits(60)))
        assert counted(net, activation) == marking
    if not running and activation.next() is None:
        assert all(fire(net, marking, each) is None for each in net.transitions.values())


@hypothesis.settings(
    max_examples=10,
    suppress_health_check=[hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(small_nets())
def test_runs_end_where_a_sequential_interpreter_can(tmp_path_factory: pytest.TempPathFactory, net: Net):
    possible = ends(net)
    hypothesis.assume(possible is not None and possible != {first(net)})
    assert possible is not None
    folder: Path = tmp_path_factory.mktemp("random")
    with net.start(2, folder=folder, checked=False) as run:
        marking = run.wait(HANG)
    assert tuple(len(marking[name]) for name in net.places) in possible


# Each task may claim one of the deaths, which lie in a folder, and kills then who it names.
KILLED = """
import json, os, random, signal, sys
from pathlib import Path
from carme_runtime.petri import Arc, Flow, Net

folder, described = Path(sys.argv[1]), json.loads(sys.argv[2])
program = os.getpid()
net = Net("random")
places = [net.place(f"p{n}", capacity=c, tokens=[None] * t) for n, (c, t) in enumerate(described["places"])]

def body_for(outputs):
    def body(*given):
        for death in (folder / "deaths").iterdir():
            if random.random() < 0.3:
                try:
                    death.unlink()
                except FileNotFoundError:
                    continue
                victims = {"worker": os.getpid(), "server": os.getppid(), "coordinator": program}
                os.kill(victims[death.name.partition("-")[0]], signal.SIGKILL)
        made = tuple(None if weight == 1 else [None] * weight for weight in outputs)
        return made[0] if len(made) == 1 else made
    return body

for n, (inputs, outputs, priority) in enumerate(described["transitions"]):
    taken = tuple(Arc(places[p], w, k) for p, w, k in inputs)
    flow = Flow(taken, tuple(Arc(places[p], w) for p, w in outputs))
    net.add(f"t{n}", flow, body_for([w for _, w in outputs]), priority=priority, retries=1000)

if __name__ == "__main__":
    with net.start(2, folder=folder / "run", checked=False, resume=True) as run:
        print(json.dumps({name: len(tokens) for name, tokens in run.wait().items()}))
"""


def described(net: Net) -> str:
    """A net as the program reads it."""
    return json.dumps(
        {
            "places": [[place.capacity, len(place.tokens)] for place in net.places.values()],
            "transitions": [
                [
                    [[arc.place.index, arc.weight, arc.kind] for arc in each.flow.inputs],
                    [[arc.place.index, arc.weight] for arc in each.flow.outputs],
                    each.priority,
                ]
                for each in net.transitions.values()
            ],
        }
    )


@hypothesis.settings(
    max_examples=max(5, int(os.environ.get("CARME_PETRI_KILLS", "0")) // 10),
    suppress_health_check=[hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(
    small_nets(), st.lists(st.sampled_from(["worker", "server", "coordinator"]), min_size=2, max_size=4)
)
def test_runs_with_kills_end_where_a_sequential_interpreter_can(
    tmp_path_factory: pytest.TempPathFactory, net: Net, victims: list[str]
):
    possible = ends(net)
    hypothesis.assume(possible is not None and possible != {first(net)})
    assert possible is not None
    folder: Path = tmp_path_factory.mktemp("killed")
    (folder / "deaths").mkdir()
    (folder / "net.py").write_text(KILLED)
    for number, victim in enumerate(victims):
        (folder / "deaths" / f"{victim}-{number}").touch()
    environment = {**os.environ, "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])}
    command = [sys.executable, str(folder / "net.py"), str(folder), described(net)]
    while True:  # at most once for each coordinator among the victims, and once more
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
        if done.returncode != -signal.SIGKILL:
            break
    assert done.returncode == 0, done.stderr
    marking = json.loads(done.stdout)
    assert tuple(marking[name] for name in net.places) in possible
