"""When a session counts as idle, and when it is to be stopped."""

import pytest

from carme.config import SessionSettings
from carme_spawner.idle import IdleWatch

POLICY = SessionSettings(idle_minutes=60, idle_warning_minutes=15)
START = 1_000_000.0


def reports(watch: IdleWatch, minutes: range, used: float | None, policy: SessionSettings = POLICY) -> None:
    """A report every half minute, in which everything was last in use at `used`."""
    for minute in minutes:
        for half in (0, 30):
            watch.take((used, None), policy, START + 60 * minute + half)


def test_a_session_that_is_used_is_not_idle() -> None:
    watch = IdleWatch()
    for minute in range(300):
        now = START + 60 * minute
        watch.take((now - 5, None), POLICY, now)
    assert (watch.since, watch.stops, watch.due) == (None, None, False)


def test_an_idle_session_is_warned_and_then_due() -> None:
    watch = IdleWatch()
    reports(watch, range(44), START)
    assert (watch.since, watch.stops) == (START, None)
    reports(watch, range(44, 46), START)
    assert watch.stops == START + 60 * 60
    assert not watch.due
    reports(watch, range(46, 60), START)
    assert not watch.due
    reports(watch, range(60, 61), START)
    assert watch.due


def test_use_after_the_warning_saves_it() -> None:
    watch = IdleWatch()
    reports(watch, range(50), START)
    assert watch.stops
    watch.take((START + 50 * 60, None), POLICY, START + 50 * 60)
    assert (watch.since, watch.stops, watch.due) == (None, None, False)


@pytest.mark.parametrize("kind", range(4))
def test_any_activity_keeps_a_session(kind: int) -> None:
    watch = IdleWatch()
    for minute in range(120):
        now = START + 60 * minute
        watch.take([now if number == kind else START for number in range(4)], POLICY, now)
    assert (watch.since, watch.stops) == (None, None)


def test_time_without_reports_does_not_count() -> None:
    """A hub that was down for hours, or one that is new, knows nothing about that time."""
    watch = IdleWatch()
    reports(watch, range(50), START)
    assert watch.stops
    reports(watch, range(300, 301), START)
    assert (watch.stops, watch.due) == (None, False)
    reports(watch, range(301, 344), START)
    assert watch.stops is None
    reports(watch, range(344, 361), START)
    assert watch.due


def test_without_a_limit_nothing_is_stopped() -> None:
    watch = IdleWatch()
    reports(watch, range(2000), START, SessionSettings(idle_minutes=0))
    assert (watch.since, watch.stops, watch.due) == (START, None, False)


def test_the_warning_is_never_longer_than_the_limit() -> None:
    watch = IdleWatch()
    policy = SessionSettings(idle_minutes=5, idle_warning_minutes=15)
    reports(watch, range(5), START, policy)
    assert watch.stops == START + 5 * 60
    reports(watch, range(5, 6), START, policy)
    assert watch.due


def test_use_keeps_a_session_whose_warning_is_as_long_as_the_limit() -> None:
    watch = IdleWatch()
    policy = SessionSettings(idle_minutes=5, idle_warning_minutes=15)
    for half in range(60):
        now = START + 30 * half
        watch.take((now,), policy, now)
        assert (watch.stops, watch.due) == (None, False)


def test_a_clock_that_is_ahead_does_not_keep_it() -> None:
    watch = IdleWatch()
    reports(watch, range(1), START + 1e6)
    assert watch.since is None
    reports(watch, range(1, 120), START)
    assert watch.due
