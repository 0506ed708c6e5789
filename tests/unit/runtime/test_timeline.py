"""A step of a pipeline as a picture."""

import re
from typing import Any

import pytest

from carme_runtime.pipeline import chain, make, simulate
from carme_runtime.pipeline.timeline import NAMES, WAITING, Bar, computed, drawing, idle


def step_of(rank: int, name: str = "1f1b", stages: int = 2, micro_batches: int = 4) -> dict[str, Any]:
    """What a rank's profile has where all passes take a second; it waits within its passes."""
    schedule = make(name, stages, micro_batches)
    run = simulate(schedule, chain(len(schedule.holders)))
    passes: list[tuple[str, int, float, float]] = []
    free = 0.0
    for action in schedule.actions[rank]:
        begin, end = run.times[action]
        if begin > free:
            passes.append((WAITING, 0, free, begin))
        passes.append((NAMES[action.kind], action.micro, free, end))
        free = end
    passes = [(what, micro, begin - 100 * rank, end - 100 * rank) for what, micro, begin, end in passes]
    step = {"schedule": name, "stages": stages, "micro_batches": micro_batches, "clock": 1e9 + 100 * rank}
    return step | {"passes": passes}


def bars(picture: str) -> int:
    return picture.count("</title></rect>")


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "passes"),
    [
        ("gpipe", 2, 3, 12),
        ("1f1b", 3, 4, 24),
        ("interleaved", 2, 4, 32),
        ("zb1p", 2, 4, 24),
        ("zbv", 2, 4, 48),
    ],
)
def test_even_passes_are_drawn_with_the_idle_time_of_the_formula(name, stages, micro_batches, passes):
    steps = {rank: step_of(rank, name, stages, micro_batches) for rank in range(stages)}
    formula = f"{100 * make(name, stages, micro_batches).bubble:.1f} %"
    picture = drawing(steps)
    assert f"ms, idle at most {formula}</text>" in picture, picture
    assert f"Schedule {name} with even passes: idle at most {formula}</text>" in picture
    assert bars(picture) == 2 * passes  # measured ones, and those on paper
    assert picture.startswith("<svg") and picture.endswith("</svg>\n")


def test_what_a_stage_waits_longer_is_seen_beside_the_formula():
    steps = {rank: step_of(rank) for rank in range(2)}
    passes = steps[1]["passes"]
    late = [(n, m, begin + (begin >= -97) * 5, end + (end > -97) * 5) for n, m, begin, end in passes]
    steps[1]["passes"] = [*late, (WAITING, 0, -97.0, -92.0)]
    measured, paper = re.findall(r"idle at most ([\d.]+) %", drawing(steps))
    assert float(measured) > float(paper) == 20.0


def test_waits_are_cut_out_of_passes():
    passes = [
        ("forward pass", 0, 0.0, 4.0),
        (WAITING, 0, 1.0, 2.0),
        (WAITING, 0, 3.5, 4.0),
        ("a pass of nobody", 0, 4.0, 5.0),
        ("backward pass", 0, 5.0, 6.0),
        (WAITING, 0, 5.0, 6.0),
    ]
    assert computed(passes) == [Bar("F", 0, 0.0, 1.0), Bar("F", 0, 2.0, 3.5)]
    assert idle(computed(passes)) == pytest.approx(1 - 2.5 / 3.5)
    assert idle([]) == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_a_stage_that_left_nothing_leaves_no_picture(missing: int):
    assert drawing({1 - missing: step_of(1 - missing)}) == ""
    assert drawing({}) == ""
    steps = {rank: step_of(rank) for rank in range(2)}
    steps[missing]["passes"] = []
    assert drawing(steps) == ""
    assert drawing({0: step_of(0), 1: step_of(1, micro_batches=2)}) == ""


def test_further_replicas_are_left_out():
    steps = {rank: step_of(rank % 2) for rank in range(4)}
    assert bars(drawing(steps)) == 2 * 16
