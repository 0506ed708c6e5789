"""Bookings: their states, the site's rules, free slots, local times, and reconciliation with Slurm."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carme.bookings import (
    CAUSES,
    STATES,
    TRANSITIONS,
    Board,
    BookingRequest,
    BookingState,
    Cause,
    Claim,
    Need,
    ReservationSpec,
    Standing,
    board_of,
    check_rules,
    choose_nodes,
    may_follow,
    needs_approval,
)
from carme.bookings.claims import of_jobs, of_reservations
from carme.bookings.clock import day_bounds, from_local, moment_text, span_text
from carme.bookings.reconcile import plan
from carme.config import BookingSettings, Settings
from carme.errors import InvalidRequest
from carme.jobs import Cluster, Job, JobState, Node, Partition, Reservation

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")
STEP = timedelta(minutes=5)
POLICY = BookingSettings(enabled=True, share_percent=100)
CLUSTER = Cluster(
    taken=NOW,
    partitions=[Partition(name="gpu", node_names=["n1", "n2", "n3", "n4"]), Partition(name="cpu")],
    nodes=[
        Node(name="n1", cpus=8, memory_mb=1, gpus={"a100": 4}),
        Node(name="n2", cpus=8, memory_mb=1, gpus={"a100": 4}),
        Node(name="n3", cpus=8, memory_mb=1, gpus={"a100": 4}, available=False),
        Node(name="n4", cpus=8, memory_mb=1, gpus={"v100": 2}),
    ],
)


def proposed(after: int = 60, **fields: Any) -> BookingRequest:
    """A request that begins so many minutes from now; by default two hours on one node."""
    values: dict[str, Any] = {
        "partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4, "start": NOW + timedelta(minutes=after),
        "minutes": 120,
    }  # fmt: skip
    return BookingRequest(**(values | fields))


def claim(node: str, first: int, last: int | None, booked: int = 4) -> Claim:
    """A claim from so many minutes after now to so many."""
    end = None if last is None else NOW + timedelta(minutes=last)
    return Claim(node, NOW + timedelta(minutes=first), end, booked)


def board(claims: list[Claim], policy: BookingSettings = POLICY) -> Board:
    return board_of("gpu", "a100", 4, CLUSTER, claims, policy)


def refused(
    requested: BookingRequest, claims: Sequence[Claim] = (), policy: BookingSettings = POLICY
) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        choose_nodes(requested, board(list(claims), policy), policy, NOW, BERLIN)
    return caught.value


def forbidden(requested: BookingRequest, standing: Standing = Standing(), **rules: Any) -> InvalidRequest:  # noqa: B008
    with pytest.raises(InvalidRequest) as caught:
        check_rules(requested, POLICY.model_copy(update=rules), standing, NOW, BERLIN)
    return caught.value


# --- states ----------------------------------------------------------------------------------------------


def test_every_state_and_cause_has_words_and_can_be_reached() -> None:
    assert set(STATES) == set(TRANSITIONS) == set(BookingState)
    assert set(CAUSES) == set(Cause)
    followers = frozenset[BookingState | Cause]().union(*TRANSITIONS.values())
    assert set(Cause) <= followers
    assert {BookingState.REQUESTED, BookingState.APPROVED, BookingState.ACTIVE} <= followers


def test_what_is_over_stays_over() -> None:
    assert not TRANSITIONS[BookingState.ENDED]
    assert not may_follow(BookingState.ACTIVE, BookingState.APPROVED)
    assert may_follow(BookingState.ACTIVE, Cause.UNUSED)
    assert not may_follow(BookingState.REQUESTED, Cause.UNUSED)


# --- the site's rules ------------------------------------------------------------------------------------


def test_a_booking_within_the_rules_is_not_refused() -> None:
    check_rules(proposed(5), POLICY, Standing(), NOW, BERLIN)


@pytest.mark.parametrize(
    ("requested", "standing", "rules", "field", "words"),
    [
        (proposed(), Standing(), {"enabled": False}, "partition", "cannot be booked"),
        (
            proposed(minutes=121),
            Standing(),
            {"longest_minutes": 120},
            "minutes",
            "at most 2 hours, not 2 hours 1",
        ),
        (
            proposed(59),
            Standing(),
            {"notice_minutes": 60},
            "start",
            "The earliest start now is Fri 20 Nov, 14:00",
        ),
        (proposed(-1), Standing(), {"notice_minutes": 0}, "start", "cannot begin in the past"),
        (
            proposed(1441),
            Standing(),
            {"horizon_days": 1},
            "start",
            "The latest start now is Sat 21 Nov, 13:00",
        ),
        (
            proposed(),
            Standing(open=2),
            {"at_a_time": 2},
            None,
            "2 bookings in partition 'gpu' that are not over",
        ),
        (proposed(), Standing(gpu_hours=13), {"gpu_hours": 20}, "minutes", "costs 8 GPU-hours"),
    ],
)
def test_what_the_rules_forbid_is_refused_with_what_is_allowed(
    requested: BookingRequest, standing: Standing, rules: dict[str, Any], field: str | None, words: str
) -> None:
    error = forbidden(requested, standing, **rules)
    assert error.field == field
    assert words in str(error)
    assert error.remedy


def test_the_limits_themselves_are_allowed() -> None:
    rules = {"longest_minutes": 120, "notice_minutes": 60, "at_a_time": 2, "gpu_hours": 20}
    policy = POLICY.model_copy(update=rules)
    check_rules(proposed(60), policy, Standing(open=1, gpu_hours=12), NOW, BERLIN)


def test_a_booking_may_begin_in_the_present_minute() -> None:
    policy = POLICY.model_copy(update={"notice_minutes": 0})
    check_rules(proposed(0), policy, Standing(), NOW + timedelta(seconds=59), BERLIN)
    assert "past" in forbidden(proposed(-1), notice_minutes=0).message


def test_a_booking_that_has_begun_may_be_changed_without_notice() -> None:
    begun = proposed(-30)
    check_rules(begun, POLICY, Standing(ahead=begun.start), NOW, BERLIN)
    assert "past" in forbidden(begun, Standing(ahead=NOW)).message


def test_large_bookings_need_an_approval() -> None:
    policy = POLICY.model_copy(update={"approval_gpu_hours": 8})
    assert not needs_approval(proposed(), policy)
    assert needs_approval(proposed(minutes=121), policy)
    assert not needs_approval(proposed(nodes=100), POLICY)


def test_a_partitions_own_rules_win() -> None:
    settings = Settings.model_validate(
        {
            "site": {"url": "https://carme.example.org"},
            "slurm": {"cluster": "carme"},
            "bookings": {"enabled": True, "at_a_time": 7},
            "partitions": {"gpu": {"idle_minutes": 5, "bookings": {"longest_minutes": 60}}},
        }
    )
    assert settings.booking_policy("gpu").longest_minutes == 60
    assert settings.booking_policy("gpu").at_a_time == settings.booking_policy("cpu").at_a_time == 7
    assert settings.booking_policy("cpu").longest_minutes == 1440
    assert settings.session_policy("gpu").idle_minutes == 5


# --- nodes -----------------------------------------------------------------------------------------------


def test_nodes_that_take_no_jobs_are_not_booked() -> None:
    assert choose_nodes(proposed(nodes=2), board([]), POLICY, NOW, BERLIN) == ["n1", "n2"]
    error = refused(proposed(nodes=3))
    assert error.field == "nodes"
    assert "2 nodes of partition 'gpu' with 4 GPUs of type a100 take jobs" in error.message


def test_a_booking_may_follow_another_at_once() -> None:
    taken = [claim("n1", 0, 60), claim("n1", 180, 240), claim("n2", 0, None)]
    assert choose_nodes(proposed(60), board(taken), POLICY, NOW, BERLIN) == ["n1"]


def test_a_changed_booking_keeps_its_nodes() -> None:
    assert choose_nodes(proposed(), board([]), POLICY, NOW, BERLIN, prefer=["n2"]) == ["n2"]
    taken = [claim("n2", 100, 120)]
    assert choose_nodes(proposed(), board(taken), POLICY, NOW, BERLIN, prefer=["n2"]) == ["n1"]


def test_a_conflict_names_the_nearest_free_times() -> None:
    taken = [claim("n1", 0, 300), claim("n2", 130, 240)]
    error = refused(proposed(120), taken)
    assert (
        error.message
        == "No node with 4 GPUs of type a100 is free for the whole time, Fri 20 Nov, 15:00 to 17:00."
    )
    assert error.remedy == (
        "Free times: Fri 20 Nov, 13:10 to 15:10, Fri 20 Nov, 17:00 to 19:00 and Fri 20 Nov, 18:00 to 20:00."
    )
    assert error.field == "start"


def test_a_conflict_without_any_free_time_says_so() -> None:
    error = refused(proposed(), [claim("n1", 0, None), claim("n2", 0, 60 * 24 * 30)])
    assert "no such time in the next 28 days" in error.remedy


def test_only_a_share_of_the_system_can_be_booked() -> None:
    policy = POLICY.model_copy(
        update={"share_percent": 50}
    )  # of 12 GPUs, those of a node that is down included
    assert choose_nodes(proposed(), board([], policy), policy, NOW, BERLIN)
    error = refused(proposed(nodes=2), [], policy)
    assert "that is 6; 8 were requested" in error.message
    assert "Ask for 1 node or fewer" in error.remedy
    error = refused(proposed(), [claim("n1", 90, 100)], policy)
    assert "2 more can be booked, and 4 were requested" in error.message
    assert "Fri 20 Nov, 14:40 to 16:40" in error.remedy
    # What jobs and maintenance have is not booked.
    assert choose_nodes(proposed(), board([claim("n1", 90, 100, booked=0)], policy), policy, NOW, BERLIN) == [
        "n2"
    ]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (("none", "a100", 4), "partition", "there are: gpu and cpu"),
        (("cpu", "a100", 4), "gpus_per_node", "its nodes have: none"),
        (("gpu", "h100", 4), "gpus_per_node", "4 of type a100 and 2 of type v100"),
        (("gpu", "a100", 2), "gpus_per_node", "Nodes are booked whole"),
    ],
)
def test_what_there_is_not_cannot_be_booked(fields: tuple[str, str, int], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        board_of(*fields, CLUSTER, [], POLICY)
    assert caught.value.field == field
    assert words in str(caught.value)


# --- the finder of slots, against trying every time ------------------------------------------------------

MINUTES = st.integers(min_value=-60, max_value=400)
CLAIMS = st.lists(
    st.builds(
        lambda node, first, length, booked: claim(
            node, first, None if length is None else first + length, booked
        ),
        st.sampled_from(["n1", "n2", "n3"]),
        MINUTES,
        st.none() | st.integers(min_value=0, max_value=150),
        st.sampled_from([0, 4]),
    ),
    max_size=8,
)


@given(CLAIMS, st.integers(1, 3), st.integers(1, 150), MINUTES, st.sampled_from([None, 4, 8, 12]))
def test_the_nearest_free_slots_are_found(
    claims: list[Claim], nodes: int, minutes: int, around: int, most: int | None
) -> None:
    free = Board(["n1", "n2", "n3"], claims, most)
    need = Need(nodes, 4, timedelta(minutes=minutes))
    preferred, latest = NOW + timedelta(minutes=around), NOW + timedelta(minutes=400)
    found = free.nearest(need, preferred, NOW, latest, STEP)
    grid = [NOW + place * STEP for place in range(81)]
    possible = [moment for moment in grid if free.place(need, moment) is not None]
    before = [moment for moment in possible if moment < preferred]
    after = [moment for moment in possible if moment >= preferred]
    assert found == sorted(found)
    assert set(found) <= set(possible)
    assert [moment for moment in found if moment < preferred] == before[-1:]
    assert [moment for moment in found if moment >= preferred][:1] == after[:1]
    assert len(found) <= 3


@given(CLAIMS, st.integers(1, 3), st.integers(1, 150), MINUTES)
def test_what_is_placed_never_meets_a_claim(
    claims: list[Claim], nodes: int, minutes: int, start: int
) -> None:
    begin = NOW + timedelta(minutes=start)
    end = begin + timedelta(minutes=minutes)
    placed = Board(["n1", "n2", "n3"], claims).place(Need(nodes, 4, end - begin), begin)
    meeting = {
        claim.node
        for claim in claims
        if claim.start < end and (claim.end is None or (claim.end > begin and claim.end > claim.start))
    }
    assert (placed is None) == (3 - len(meeting) < nodes)
    assert placed is None or (len(set(placed)) == nodes and not set(placed) & meeting)


# --- what others have ------------------------------------------------------------------------------------


def reservation(name: str, first: int = 60, last: int = 180, **fields: Any) -> Reservation:
    start, end = NOW + timedelta(minutes=first), NOW + timedelta(minutes=last)
    return Reservation(
        **({"name": name, "start": start, "end": end, "node_names": ["n1"], "users": ["ada"]} | fields)
    )


def test_running_jobs_have_their_nodes_until_their_time_limits() -> None:
    job: dict[str, Any] = {
        "id": 1,
        "name": "a",
        "user": "ada",
        "state": JobState.RUNNING,
        "started": NOW,
        "nodes": 2,
    }
    jobs = [
        Job(**job, node_list="n[1-2]", minutes_limit=60),
        Job(**job, node_list="n3", minutes_limit=None),
        Job(**job, node_list="n4", minutes_limit=600, reservation="course"),
        Job(**job, node_list="n4").model_copy(update={"state": JobState.PENDING}),
    ]
    assert of_jobs(jobs, [reservation("course", 0, 30)]) == [
        claim("n1", 0, 60, 0), claim("n2", 0, 60, 0), claim("n3", 0, None, 0), claim("n4", 0, 30, 0),
    ]  # fmt: skip


def test_reservations_have_all_their_nodes() -> None:
    assert of_reservations([reservation("maint", node_names=["n1", "n4"])]) == [
        claim("n1", 60, 180, 0), claim("n4", 60, 180, 0),
    ]  # fmt: skip


# --- local times -----------------------------------------------------------------------------------------


def test_a_day_has_as_many_hours_as_its_clocks_show() -> None:
    hours = [
        (end - start) / timedelta(hours=1)
        for start, end in (
            day_bounds(day, BERLIN) for day in (date(2026, 3, 29), date(2026, 10, 25), date(2026, 6, 1))
        )
    ]
    assert hours == [23, 25, 24]


def test_a_time_that_the_clocks_skip_is_refused_with_the_next_one() -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_local(datetime(2026, 3, 29, 2, 30), BERLIN)
    assert str(caught.value) == (
        "There is no 02:30 on Sun 29 Mar, because the clocks go forward then. "
        "Choose 03:30, which is the same moment, or another time."
    )


def test_a_time_that_comes_twice_is_the_first_one_and_says_which() -> None:
    moment = from_local(datetime(2026, 10, 25, 2, 30), BERLIN)
    assert moment == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    assert moment_text(moment, BERLIN) == "Sun 25 Oct, 02:30 CEST"
    assert moment_text(moment + timedelta(hours=1), BERLIN) == "Sun 25 Oct, 02:30 CET"


def test_a_booking_over_the_change_of_clocks_keeps_its_length() -> None:
    start = from_local(datetime(2026, 10, 25, 1, 0), BERLIN)
    assert span_text(start, start + timedelta(hours=4), BERLIN) == "Sun 25 Oct, 01:00 to 04:00"
    start = from_local(datetime(2026, 3, 28, 23, 0), BERLIN)
    assert span_text(start, start + timedelta(hours=4), BERLIN) == "Sat 28 Mar, 23:00 to Sun 29 Mar, 04:00"


@given(
    st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)),
    st.sampled_from(["Europe/Berlin", "UTC", "America/Santiago", "Australia/Lord_Howe"]),
)
def test_every_time_that_clocks_show_is_found_again(local: datetime, name: str) -> None:
    zone = ZoneInfo(name)
    try:
        moment = from_local(local, zone)
    except InvalidRequest:
        # Then no moment shows it, before or after.
        near = datetime(local.year, local.month, local.day, tzinfo=UTC) - timedelta(days=1)
        shown = {
            (near + timedelta(minutes=minute)).astimezone(zone).replace(tzinfo=None) for minute in range(4320)
        }
        assert local.replace(second=0, microsecond=0) not in shown
    else:
        assert moment.astimezone(zone).replace(tzinfo=None) == local


# --- reconciliation with Slurm ----------------------------------------------------------------------------


def reservation_spec(name: str, first: int = 60, last: int = 180, **fields: Any) -> ReservationSpec:
    start, end = NOW + timedelta(minutes=first), NOW + timedelta(minutes=last)
    values: dict[str, Any] = {
        "name": name,
        "partition": "gpu",
        "node_names": ["n1"],
        "users": ["ada"],
        "start": start,
        "end": end,
    }
    return ReservationSpec(**(values | fields))


A, B, C = (f"carme-{letter * 12}" for letter in "abc")


def test_matching_reservations_need_no_change() -> None:
    found = plan([reservation_spec(A, users=["ada", "bob"])], [reservation(A, users=["bob", "ada"])], NOW)
    assert (found.keep, found.release) == ([], [])


def test_what_is_missing_is_made_and_what_nobody_booked_is_given_back() -> None:
    found = plan([reservation_spec(A), reservation_spec(B)], [reservation(B), reservation(C)], NOW)
    assert (found.keep, found.release) == ([reservation_spec(A)], [C])


def test_the_administrators_own_reservations_are_left_alone() -> None:
    reservations = [reservation(name) for name in ("maint", "carme-workshop", "carme-", f"x{A}", f"{A}b")]
    assert plan([], reservations, NOW).release == []


@pytest.mark.parametrize("fields", [{"node_names": ["n2"]}, {"users": ["bob"]}, {"last": 200}, {"first": 70}])
def test_what_differs_is_changed(fields: dict[str, Any]) -> None:
    assert plan([reservation_spec(A, **fields)], [reservation(A)], NOW).keep == [
        reservation_spec(A, **fields)
    ]


def test_the_start_of_what_has_begun_is_no_difference() -> None:
    # Slurm lost it and it was made anew, later than booked.
    assert plan([reservation_spec(A, -60)], [reservation(A, -30)], NOW).keep == []


def test_what_is_over_is_not_made_again() -> None:
    found = plan([reservation_spec(A, -60, 0)], [reservation(A, -60, 0)], NOW)
    assert (found.keep, found.release) == ([], [A])


def test_what_is_there_makes_room_first() -> None:
    found = plan([reservation_spec(A), reservation_spec(B, node_names=["n2"])], [reservation(B)], NOW)
    assert [booking.name for booking in found.keep] == [B, A]


@given(
    st.lists(st.sampled_from([A, B, C]), unique=True),
    st.lists(st.sampled_from([A, B, C, "maint"]), unique=True),
)
def test_executing_the_plan_makes_reservations_match_bookings(held: list[str], there: list[str]) -> None:
    reserved = {name: reservation(name) for name in there}
    found = plan(map(reservation_spec, held), reserved.values(), NOW)
    for booking in found.keep:
        reserved[booking.name] = reservation(booking.name)
    for name in found.release:
        del reserved[name]
    after = plan(map(reservation_spec, held), reserved.values(), NOW)
    assert (after.keep, after.release) == ([], [])
    assert ("maint" in reserved) == ("maint" in there)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "maint"}, "'carme-' and 12"),
        ({"name": "carme-aaaaaaaaaaaa\n"}, "'carme-' and 12"),
        ({"users": ["ada,root"]}, "not a user name"),
        ({"users": []}, "must be for users, or for an account"),
        ({"node_names": ["n1,n2"]}, "letters, digits"),
        ({"node_names": ["n1", "n1"]}, "names a node twice"),
        ({"last": 60}, "must end after it starts"),
        ({"start": datetime(2026, 11, 20, 12)}, "timezone"),
    ],
)
def test_nothing_but_a_plain_hold_can_be_requested(fields: dict[str, Any], words: str) -> None:
    fields = dict(fields)
    with pytest.raises(ValueError, match=words):
        reservation_spec(fields.pop("name", A), **fields)
