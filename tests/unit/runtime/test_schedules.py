"""Schedules of pipelines, on paper."""

import dataclasses
import random

import pytest

from carme_runtime.pipeline import KINDS, Action, PlanError, chain, held, make, simulate, slots_needed

SIZES = [(1, 1), (2, 2), (2, 5), (3, 9), (4, 8), (8, 16), (8, 32)]


def schedules():
    for name, kind in KINDS.items():
        for ranks, micro_batches in SIZES:
            if not kind.multiple_of_ranks or micro_batches % ranks == 0:
                yield pytest.param(name, ranks, micro_batches, id=f"{name}-{ranks}x{micro_batches}")


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), [*schedules()])
def test_ranks_idle_as_long_as_the_formula_says(name: str, ranks: int, micro_batches: int):
    schedule = make(name, ranks, micro_batches)
    run = simulate(schedule, chain(len(schedule.holders)))
    if micro_batches >= KINDS[name].holds_from(ranks):
        assert run.bubble == pytest.approx(schedule.bubble)
    else:
        assert run.bubble > schedule.bubble


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), [*schedules()])
def test_any_skips_and_any_times_end_with_the_slots_that_are_given(name, ranks, micro_batches):
    choice = random.Random(f"{name} {ranks} {micro_batches}")
    schedule = make(name, ranks, micro_batches)
    pieces = len(schedule.holders)
    skips = {(a, choice.randrange(a + 1, pieces)) for a in range(pieces - 1)}
    channels = sorted({*chain(pieces), *skips})
    slots = slots_needed(schedule, channels)
    assert all(1 <= count <= micro_batches for count in slots.values())
    for _ in range(3):
        run = simulate(schedule, channels, lambda _: choice.random(), lambda _: choice.random(), slots)
        assert len(run.times) == sum(map(len, schedule.actions))


def test_activations_are_held_as_the_schedules_promise():
    assert held(make("gpipe", 4, 8)) == [8, 8, 8, 8]
    assert held(make("1f1b", 4, 8)) == [4, 3, 2, 1]
    assert held(make("zb1p", 4, 8)) == [4, 4, 4, 4]
    # Two pieces of half a stage: on each rank the same as one stage of 1F1B's first rank.
    v = held(make("zbv", 4, 8))
    assert [v[rank] + v[7 - rank] for rank in range(4)] == [9, 9, 9, 9]


def test_fewer_slots_are_seen_to_block_before_anything_runs():
    schedule = make("gpipe", 2, 4)
    assert slots_needed(schedule, chain(2)) == {(0, 1): 4}
    with pytest.raises(
        PlanError, match=r"gpipe cannot end: F of piece 0, micro-batch 3, .* wait for each other"
    ):
        simulate(schedule, chain(2), slots={(0, 1): 3})


def test_actions_that_are_missing_or_doubled_are_seen():
    schedule = make("1f1b", 2, 3)
    first, second = schedule.actions
    doubled = dataclasses.replace(schedule, actions=(first, (*second, second[0])))
    with pytest.raises(PlanError, match="F of piece 1, micro-batch 0 not once on rank 1"):
        simulate(doubled, chain(2))
    lacking = dataclasses.replace(schedule, actions=(first[:-1], second))
    with pytest.raises(PlanError, match="B of piece 0, micro-batch 2 not once on rank 0"):
        simulate(lacking, chain(2))
    turned = dataclasses.replace(schedule, actions=(tuple(reversed(first)), second))
    with pytest.raises(PlanError, match="B of piece 0, micro-batch 2, F of piece 1, micro-batch 0 wait"):
        simulate(turned, chain(2))


def test_slow_links_and_uneven_stages_make_a_step_longer():
    schedule = make("1f1b", 2, 4)
    even = simulate(schedule, chain(2))
    assert even.length == 10 and even.times[Action("F", 1, 0)] == (1, 2)
    assert simulate(schedule, chain(2), travel=lambda _: 0.5).length > even.length
    assert simulate(schedule, chain(2), duration=lambda a: 1.0 + a.piece).length > even.length


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "sentence"),
    [
        ("fastest", 2, 2, "no schedule 'fastest'. Choose from gpipe, 1f1b"),
        ("1f1b", 0, 2, "cannot have 0 stages"),
        ("interleaved", 4, 6, "Use micro_batches=8, or schedule='1f1b'"),
    ],
)
def test_schedules_that_cannot_be_name_one_that_can(name, ranks, micro_batches, sentence):
    with pytest.raises(PlanError, match=sentence):
        make(name, ranks, micro_batches)
