"""The sync makes Slurm's reservations match the bookings after any outage."""

import itertools
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from carme.bookings import BookingState, Cause
from carme.errors import SlurmError
from carme.jobs import JobState, Reservation, SessionOptions
from carme.launch.exits import Exit
from carme.sessions import Ending, SessionState
from carme_webui.accounts.models import User
from carme_webui.bookings import reconcile as reconcile_module
from carme_webui.bookings import services, tasks
from carme_webui.bookings.models import Booking
from carme_webui.bookings.reconcile import reconcile
from carme_webui.cluster import broker as site_broker
from carme_webui.profile.models import Notice
from carme_webui.sessions.models import Session

from .fake_broker import FakeBroker, make_job
from .test_bookings import make

AWAY = SlurmError("Slurm does not answer.", "Wait.", code="slurm-away")


def after(minutes: float) -> datetime:
    return timezone.now() + timedelta(minutes=minutes)


def state(row: Booking) -> tuple[str, str]:
    row.refresh_from_db()
    return row.state, row.cause


def reservation(row: Booking, **fields: Any) -> Reservation:
    values = row.reservation_spec.model_dump(include={"name", "start", "end", "node_names", "users"})
    return Reservation(**(values | fields))


# --- data before the booking -----------------------------------------------------------------------------

STAGE = [{"source": "/data/imagenet", "target": "local", "name": "imagenet", "version": ""}]


def with_data(alice: User, start: int = 60, **fields: Any) -> Booking:
    return make(alice, start, start + 120, session_image="torch", session_stage=STAGE, **fields)


def test_data_is_brought_once_before_the_booking(alice: User, broker: FakeBroker, rules) -> None:
    row = with_data(alice, node_names=["n1", "n2"], session_results="/home/alice/out")
    for _ in range(3):
        reconcile(site_broker())
    (requested,) = broker.requests_of("bring")
    assert (requested.user, requested.node_names, requested.partition) == ("alice", ["n1", "n2"], "gpu")
    assert requested.stage[0].source == "/data/imagenet" and 57 <= requested.minutes <= 60
    row.refresh_from_db()
    job = broker.queue[row.stage_job or 0]
    assert job.name == requested.name and row.staged is None
    broker.put(job.model_copy(update={"state": JobState.COMPLETED, "ended": timezone.now()}))
    reconcile(site_broker())
    row.refresh_from_db()
    assert row.staged and not row.stage_problem and not broker.requests_of("cancel")
    reconcile(site_broker(), after(61))
    (session,) = Session.objects.all()
    assert session.requested_options.stage[0].source == "/data/imagenet"
    assert session.requested_options.results == "/home/alice/out"
    assert len(broker.requests_of("bring")) == 1 and not broker.requests_of("cancel")


def test_data_that_cannot_be_brought_is_reported_once(alice: User, broker: FakeBroker, rules) -> None:
    row = with_data(alice)
    reconcile(site_broker())
    row.refresh_from_db()
    job = broker.queue[row.stage_job or 0]
    broker.put(job.model_copy(update={"state": JobState.FAILED, "exit_code": int(Exit.NOT_STAGED)}))
    for _ in range(2):
        reconcile(site_broker())
    row.refresh_from_db()
    assert f"Job {job.id}" in row.stage_problem and len(broker.requests_of("bring")) == 1
    (reported,) = Notice.objects.filter(user=alice, kind="booking-problem")
    assert row.stage_problem in reported.text
    reconcile(site_broker(), after(61))
    assert Session.objects.get().requested_options.stage, "the session tries again"


def test_what_the_broker_refuses_is_reported_and_what_it_cannot_say_is_tried_again(
    alice: User, broker: FakeBroker, rules
) -> None:
    row = with_data(alice)
    reconcile(site_broker())
    Booking.objects.update(stage_name="", stage_job=None, stage_requested=None)
    broker.queue.clear()
    broker.refusal = AWAY
    reconcile(site_broker())
    broker.refusal = None
    reconcile(site_broker(), after(1))
    assert len(broker.requests_of("bring")) == 2, "it may be on its way"
    reconcile(site_broker(), after(3))
    assert len(broker.requests_of("bring")) == 3
    row.refresh_from_db()
    assert row.stage_job and not row.stage_problem


def test_data_of_a_booking_that_is_deleted_or_moved_is_not_brought_any_more(
    alice: User, broker: FakeBroker, rules
) -> None:
    row = with_data(alice)
    reconcile(site_broker())
    row.refresh_from_db()
    first = row.stage_job
    Booking.objects.filter(pk=row.pk).update(node_names=["n2"])
    reconcile(site_broker())
    row.refresh_from_db()
    assert [sent.job_id for sent in broker.requests_of("cancel")] == [first] and row.stage_job != first
    assert broker.requests_of("bring")[-1].node_names == ["n2"]
    second = row.stage_job
    services.delete(row, site_broker())
    reconcile(site_broker())
    reconcile(site_broker())
    assert [sent.job_id for sent in broker.requests_of("cancel")] == [first, second]


def test_what_is_not_there_at_the_start_the_session_brings(alice: User, broker: FakeBroker, rules) -> None:
    row = with_data(alice)
    reconcile(site_broker())
    row.refresh_from_db()
    number = row.stage_job
    reconcile(site_broker(), after(61))
    assert [requested.job_id for requested in broker.requests_of("cancel")] == [number]
    assert Session.objects.get().requested_options.stage


def test_nothing_is_brought_long_before_without_an_image_or_into_memory(
    alice: User, broker: FakeBroker, rules
) -> None:
    with_data(alice, 15 * 60)
    make(alice, 60, 120, session_stage=STAGE)
    make(alice, 300, 420, session_image="torch", session_stage=[STAGE[0] | {"target": "ram"}])
    reconcile(site_broker())
    assert not broker.requests_of("bring")


# --- states ----------------------------------------------------------------------------------------------


def test_a_booking_begins_and_ends_by_the_clock(alice: User, broker: FakeBroker, rules) -> None:
    rules(grace_minutes=0)
    row = make(alice)
    reconcile(site_broker())
    assert state(row) == ("approved", "")
    reconcile(site_broker(), after(61))
    assert state(row) == ("active", "") and row.name in broker.reservations
    reconcile(site_broker(), after(181))
    assert state(row) == ("ended", "finished") and row.ended == row.end
    assert row.name not in broker.reservations


def test_what_slurm_lost_is_made_again(alice: User, broker: FakeBroker, rules) -> None:
    row = make(alice)
    reconcile(site_broker())
    broker.reservations.clear()
    reconcile(site_broker())
    assert broker.reservations[row.name] == reservation(row)


@pytest.mark.parametrize("fields", [{"node_names": ["n2"]}, {"users": ["bob"]}, {"end": after(500)}])
def test_what_somebody_changed_in_slurm_is_changed_back(
    alice: User, broker: FakeBroker, rules, fields: dict[str, Any]
) -> None:
    row = make(alice)
    broker.reservations[row.name] = reservation(row, **fields)
    reconcile(site_broker())
    assert broker.reservations[row.name] == reservation(row)


def test_a_matching_reservation_is_left_alone(alice: User, broker: FakeBroker, rules) -> None:
    make(alice)
    reconcile(site_broker())
    for _ in range(3):
        reconcile(site_broker())
    assert len(broker.requests_of("reserve")) == 1 and not broker.requests_of("release")


def test_reservations_that_nobody_booked_are_deleted_but_never_the_administrators(
    alice: User, broker: FakeBroker, rules
) -> None:
    row = make(alice, state=BookingState.ENDED, cause=Cause.CANCELLED)
    for name in (row.name, "carme-000000000000", "maint", "carme-workshop"):
        broker.reservations[name] = reservation(row, name=name)
    reconcile(site_broker())
    assert set(broker.reservations) == {"maint", "carme-workshop"}


def test_a_portal_that_never_had_a_booking_leaves_those_of_another_database(
    alice: User, broker: FakeBroker, rules
) -> None:
    """As on a new head before its backup is restored."""
    row = make(alice)
    broker.reservations[row.name] = reservation(row)
    row.delete()
    reconcile(site_broker())
    assert set(broker.reservations) == {row.name}


def test_an_outage_over_the_whole_booking_costs_nothing(alice: User, broker: FakeBroker, rules) -> None:
    row = make(alice)
    reconcile(site_broker(), after(1000))
    assert state(row) == ("ended", "impossible")
    assert row.gpu_hours == 0 and not broker.requests_of("reserve")


@pytest.mark.parametrize("broken", ["broker", "slurm"])
def test_during_an_outage_nothing_is_forgotten(alice: User, broker: FakeBroker, rules, broken: str) -> None:
    row = make(alice)
    if broken == "broker":
        broker.__exit__()
        assert not reconcile(site_broker())
        broker.__enter__()
    else:
        broker.refusal = AWAY
        reconcile(site_broker())
        broker.refusal = None
        row.refresh_from_db()
        assert row.problem and row.reserved is None
    reconcile(site_broker())
    row.refresh_from_db()
    assert row.name in broker.reservations and row.reserved and not row.problem


def test_what_slurm_refuses_is_tried_again_and_reported(
    alice: User, bob: User, broker: FakeBroker, rules
) -> None:
    row, second = make(alice), make(bob, node_names=["n2"])
    broker.refusal = SlurmError("Other jobs have these nodes.", "Choose another time.")
    reconcile(site_broker())
    row.refresh_from_db()
    assert "Other jobs have these nodes." in row.problem
    broker.refusal = None
    reconcile(site_broker())
    assert set(broker.reservations) == {row.name, second.name}


def test_a_request_that_nobody_answered_is_over_at_its_start(alice: User, broker: FakeBroker, rules) -> None:
    row = make(alice, state=BookingState.REQUESTED)
    reconcile(site_broker())
    assert state(row) == ("requested", "") and broker.reservations == {}
    reconcile(site_broker(), after(61))
    assert state(row) == ("ended", "unanswered")


# --- unused bookings -------------------------------------------------------------------------------------


def test_an_unused_booking_is_given_back_after_the_grace_and_credited(
    alice: User, broker: FakeBroker, rules
) -> None:
    row = make(alice, 60, 180)
    reconcile(site_broker())
    reconcile(site_broker(), row.start + timedelta(minutes=14, seconds=59))
    assert state(row) == ("active", "")
    reconcile(site_broker(), row.start + timedelta(minutes=15))
    assert state(row) == ("ended", "unused") and row.gpu_hours == 1
    assert broker.reservations == {}


@pytest.mark.parametrize("job_state", ["RUNNING", "PENDING"])
def test_a_booking_with_a_job_stays_also_after_that(
    alice: User, broker: FakeBroker, rules, job_state: str
) -> None:
    row = make(alice, 60, 180)
    reconcile(site_broker())
    job = broker.put(make_job(1, state=job_state, reservation=row.name))
    reconcile(site_broker(), row.start + timedelta(minutes=1))
    broker.leave(job)
    reconcile(site_broker(), row.start + timedelta(minutes=60))
    assert state(row) == ("active", "")


def test_a_short_job_between_two_rounds_counts_and_one_that_never_began_does_not(
    alice: User, bob: User, broker: FakeBroker, rules
) -> None:
    began, never_began = make(alice, 60, 180), make(bob, 60, 180, node_names=["n2"])
    reconcile(site_broker())
    broker.put(make_job(1, state="COMPLETED", reservation=began.name, started=began.start, ended=began.start))
    broker.put(make_job(2, state="CANCELLED", reservation=never_began.name))
    reconcile(site_broker(), began.start + timedelta(minutes=60))
    assert state(began) == ("active", "") and state(never_began) == ("ended", "unused")


def test_the_grace_period_begins_when_slurm_has_the_reservation(
    alice: User, broker: FakeBroker, rules
) -> None:
    row = make(alice, -60, 180)
    broker.refusal = AWAY
    reconcile(site_broker())
    broker.refusal = None
    reconcile(site_broker())
    assert state(row) == ("active", "") and row.name in broker.reservations
    reconcile(site_broker(), after(16))
    assert state(row) == ("ended", "unused")


def test_without_a_grace_nothing_is_given_back(alice: User, broker: FakeBroker, rules) -> None:
    rules(grace_minutes=0)
    row = make(alice, 60, 180)
    reconcile(site_broker())
    reconcile(site_broker(), row.start + timedelta(minutes=100))
    assert state(row) == ("active", "")


# --- failed nodes and maintenance ------------------------------------------------------------------------


def fail(broker: FakeBroker, *names: str) -> None:
    nodes = [node.model_copy(update={"available": node.name not in names}) for node in broker.cluster.nodes]
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes})


def test_a_booking_leaves_a_node_that_fails(alice: User, broker: FakeBroker, rules) -> None:
    row = make(alice, 30, 180)
    reconcile(site_broker())
    fail(broker, "n1")
    reconcile(site_broker())
    row.refresh_from_db()
    assert row.node_names == ["n2"] and broker.reservations[row.name].node_names == ["n2"]


def test_a_booking_far_ahead_waits_for_its_node_to_come_back(alice: User, broker: FakeBroker, rules) -> None:
    row = make(alice, 600, 700)
    fail(broker, "n1")
    reconcile(site_broker())
    row.refresh_from_db()
    assert row.node_names == ["n1"]


def test_without_another_node_its_owner_is_notified_until_it_is_back(
    alice: User, bob: User, broker: FakeBroker, rules
) -> None:
    row = make(alice, 30, 180)
    make(bob, 60, 90, node_names=["n2"])
    fail(broker, "n1")
    reconcile(site_broker())
    reconcile(site_broker())
    row.refresh_from_db()
    assert row.node_names == ["n1"]
    assert row.problem == "The node n1 does not work, and no other one is free for the whole time."
    fail(broker)
    reconcile(site_broker())
    row.refresh_from_db()
    assert not row.problem


def test_a_booking_in_which_jobs_run_is_not_moved(alice: User, broker: FakeBroker, rules) -> None:
    row = make(alice, -5, 180, state=BookingState.ACTIVE)
    broker.put(make_job(1, reservation=row.name))
    fail(broker, "n1")
    reconcile(site_broker())
    row.refresh_from_db()
    assert row.node_names == ["n1"] and "does not work" in row.problem


def test_a_booking_makes_way_for_maintenance(alice: User, bob: User, broker: FakeBroker, rules) -> None:
    row = make(alice, 600, 700)
    later = make(bob, 1200, 1300)
    broker.reservations["maint"] = reservation(row, name="maint", maintenance=True)
    reconcile(site_broker())
    row.refresh_from_db()
    later.refresh_from_db()
    assert (row.node_names, later.node_names) == (["n2"], ["n1"])
    broker.reservations["maint"] = reservation(row, name="maint", node_names=["n1", "n2"], maintenance=True)
    reconcile(site_broker())
    row.refresh_from_db()
    assert "is to be maintained then" in row.problem


def test_a_node_that_is_no_more_is_left(alice: User, broker: FakeBroker, rules) -> None:
    row = make(alice, node_names=["gone"])
    reconcile(site_broker())
    row.refresh_from_db()
    assert row.node_names == ["n1"] and row.name in broker.reservations


# --- whatever happens in whatever order ------------------------------------------------------------------


def test_after_faults_in_any_order_one_quiet_sync_makes_all_match(
    alice: User, bob: User, broker: FakeBroker, rules
) -> None:
    rows = [make(alice), make(bob, node_names=["n2"]), make(alice, 300, 400)]

    def lose() -> None:
        broker.reservations.clear()

    def disturb() -> None:
        for name, value in broker.reservations.items():
            broker.reservations[name] = value.model_copy(update={"users": ["mallory"]})

    def leave_behind() -> None:
        broker.reservations["carme-999999999999"] = reservation(rows[0], name="carme-999999999999")

    def refuse() -> None:
        broker.refusal = AWAY
        reconcile(site_broker())
        broker.refusal = None

    for faults in itertools.permutations([lose, disturb, leave_behind, refuse]):
        for fault in faults:
            fault()
        reconcile(site_broker())
        assert broker.reservations == {row.name: reservation(row) for row in rows}


def test_a_change_between_reading_and_acting_wins(
    alice: User, broker: FakeBroker, rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner deletes the booking while a round is under way."""
    row, second = make(alice), make(alice, 300, 400)

    def slow(found: Booking, broker: Any) -> None:
        Booking.objects.filter(pk=second.pk).update(state=BookingState.ENDED, cause=Cause.CANCELLED)
        services.reserve(found, broker)

    monkeypatch.setattr(reconcile_module, "reserve", slow)
    reconcile(site_broker())
    assert set(broker.reservations) == {row.name}


def test_the_task_does_a_round(alice: User, broker: FakeBroker, rules) -> None:
    row = make(alice)
    tasks.reconcile_bookings()
    assert row.name in broker.reservations


# --- the session of a booking ----------------------------------------------------------------------------


@pytest.fixture
def begun(alice: User, broker: FakeBroker, rules) -> Booking:
    """A booking that has begun five minutes ago, with a session that is still to be started."""
    row = make(alice, -5, 115, session_image="torch", title="Night run", node_names=["n1", "n2"])
    reconcile(site_broker(), row.start - timedelta(minutes=1))
    assert not Session.objects.exists()
    return row


def test_a_bookings_session_starts_once_with_all_that_is_booked(begun: Booking, broker: FakeBroker) -> None:
    begun.owner.language = "de"
    begun.owner.save()
    reconcile(site_broker(), begun.start)
    session = Session.objects.get()
    assert session.language == "de"
    begun.refresh_from_db()
    assert session.name == begun.session_name and session.owner == begun.owner and begun.used
    assert session.requested_options == SessionOptions(
        image="torch", title="Night run", partition="gpu", gpu_type="a100", gpus_per_node=4, nodes=2,
        minutes=120, reservation=begun.name,
    )  # fmt: skip
    session.move(SessionState.ENDED, ending=Ending.STOPPED)
    for _ in range(2):
        reconcile(site_broker())
    assert Session.objects.count() == 1


def test_a_bookings_session_is_as_long_as_the_site_allows(
    begun: Booking, broker: FakeBroker, settings
) -> None:
    partitions = [partition.model_copy(update={"max_minutes": 45}) for partition in broker.cluster.partitions]
    broker.cluster = broker.cluster.model_copy(update={"partitions": partitions})
    reconcile(site_broker())
    assert Session.objects.get().requested_options.minutes == 45


def test_a_crash_between_name_and_session_loses_none(
    begun: Booking, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Session, "request", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reconcile(site_broker())
    begun.refresh_from_db()
    name = begun.session_name
    assert name and not Session.objects.exists()
    reconcile(site_broker())
    assert Session.objects.get().name == name


def test_no_session_starts_while_slurm_does_not_keep_the_booking(begun: Booking, broker: FakeBroker) -> None:
    Booking.objects.update(reserved=None)
    broker.reservations.clear()
    broker.refusal = AWAY
    reconcile(site_broker())
    assert not Session.objects.exists()
    broker.refusal = None
    for _ in range(2):
        reconcile(site_broker())
    assert Session.objects.count() == 1
