"""Reservations for bookings, through the broker's real socket."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from carme.bookings import ReservationSpec, Window
from carme.errors import Denied, InvalidRequest, SlurmError
from carme.jobs import JobRequest
from carme.slurm import parsing
from carme.slurm.refusals import refusal

NAME = "carme-aaaaaaaaaaaa"


def reservation_spec(first: int = 60, last: int = 180, **fields: Any) -> ReservationSpec:
    """A reservation that begins so many minutes from now and ends after so many."""
    now = datetime.now(UTC).replace(microsecond=0)
    values: dict[str, Any] = {
        "name": NAME, "partition": "gpu", "node_names": ["n1"], "users": ["ada"],
        "start": now + timedelta(minutes=first), "end": now + timedelta(minutes=last),
    }  # fmt: skip
    return ReservationSpec(**(values | fields))


@pytest.fixture
def settings(settings: Any) -> Any:
    return settings.model_copy(update={"bookings": settings.bookings.model_copy(update={"enabled": True})})


@pytest.fixture
def portal(site: Any) -> Any:
    """The broker as the portal sees it."""
    site.act("hub", trusted=True)
    return site


def changes(site: Any) -> list[list[str]]:
    """The commands that changed Slurm, without those that only read."""
    calls = [call["arguments"] for call in site.slurm.calls("scontrol")]
    return [call for call in calls if call[0] in ("create", "update", "delete")]


def job_in_it(state: str) -> dict[str, Any]:
    return {
        "A": 7, "j": "a", "u": "ada", "P": "gpu", "T": state, "D": 1, "C": 1, "m": "1M", "l": "1:00:00",
        "v": NAME,
    }  # fmt: skip


async def test_a_booking_becomes_a_reservation_of_slurm(portal: Any) -> None:
    wanted = reservation_spec(node_names=["n1", "n2"], users=["ada", "bob"])
    saved = await portal.client.reserve(wanted, user="ada")
    assert (saved.name, saved.start, saved.end) == (NAME, wanted.start, wanted.end)
    assert (saved.node_names, saved.users) == (["n1", "n2"], ["ada", "bob"])
    assert changes(portal) == [
        [
            *["create", "reservation", f"ReservationName={NAME}"],
            *[f"StartTime={wanted.start:%Y-%m-%dT%H:%M:%S}", f"EndTime={wanted.end:%Y-%m-%dT%H:%M:%S}"],
            *["PartitionName=gpu", "Nodes=n1,n2", "Users=ada,bob"],
            "Flags=NO_HOLD_JOBS_AFTER",
        ]
    ]
    (line,) = [line for line in portal.audit() if line["action"] == "reserve"]
    assert (line["by"], line["user"], line["result"], line["name"]) == ("hub", "ada", "ok", NAME)
    assert [reservation.name for reservation in await portal.client.reservations()] == [NAME]


async def test_slurm_gets_times_in_utc_whatever_the_zone_of_the_host(portal: Any) -> None:
    await portal.client.reserve(reservation_spec(), user="ada")
    created = next(call for call in portal.slurm.calls("scontrol") if call["arguments"][0] == "create")
    assert created["environment"]["TZ"] == "UTC"


async def test_a_repeated_booking_changes_nothing(portal: Any) -> None:
    wanted = reservation_spec()
    await portal.client.reserve(wanted, user="ada")
    await portal.client.reserve(wanted, user="ada")
    assert len(changes(portal)) == 1


async def test_only_what_differs_is_changed(portal: Any) -> None:
    wanted = reservation_spec()
    await portal.client.reserve(wanted, user="ada")
    longer = wanted.model_copy(update={"end": wanted.end + timedelta(hours=1)})
    assert (await portal.client.reserve(longer, user="ada")).end == longer.end
    assert changes(portal)[1] == [
        "update", f"ReservationName={NAME}", f"EndTime={longer.end:%Y-%m-%dT%H:%M:%S}",
    ]  # fmt: skip
    moved = longer.model_copy(update={"node_names": ["n2"], "users": ["ada", "bob"]})
    assert (await portal.client.reserve(moved, user="ada")).node_names == ["n2"]
    assert changes(portal)[2] == ["update", f"ReservationName={NAME}", "Nodes=n2", "Users=ada,bob"]


async def test_what_was_to_begin_earlier_begins_now_and_stays_so(portal: Any) -> None:
    late = reservation_spec(-60, 60)
    saved = await portal.client.reserve(late, user="ada")
    assert late.start < saved.start <= datetime.now(UTC)
    assert "StartTime=now" in changes(portal)[0]
    assert (await portal.client.reserve(late, user="ada")).start == saved.start
    assert len(changes(portal)) == 1


async def test_giving_back_deletes_the_reservation_and_may_be_repeated(portal: Any) -> None:
    await portal.client.reserve(reservation_spec(), user="ada")
    await portal.client.release(NAME, user="ada")
    await portal.client.release(NAME, user="ada")
    assert await portal.client.reservations() == []
    assert changes(portal)[1:] == [["delete", f"ReservationName={NAME}"]]


async def test_jobs_that_wait_for_a_deleted_booking_wait_like_all_others(portal: Any) -> None:
    await portal.client.reserve(reservation_spec(), user="ada")
    portal.slurm.jobs = [job_in_it("PENDING")]
    await portal.client.release(NAME, user="ada")
    assert portal.slurm.jobs[0]["v"] == "(null)"
    assert await portal.client.reservations() == []


async def test_a_booking_in_which_jobs_run_ends_now_and_slurm_ends_them(portal: Any) -> None:
    await portal.client.reserve(reservation_spec(-10, 60), user="ada")
    portal.slurm.jobs = [job_in_it("RUNNING")]
    await portal.client.release(NAME, user="ada")
    (left,) = parsing.reservations((portal.slurm.state / "reservations").read_text())
    assert left.end <= datetime.now(UTC) + timedelta(seconds=2)
    calls = len(changes(portal))
    portal.slurm.jobs = [job_in_it("RUNNING")]
    await asyncio.sleep(max(0.0, (left.end - datetime.now(UTC)).total_seconds()))
    await portal.client.release(NAME, user="ada")  # requested again, it is not given more time
    assert [call[0] for call in changes(portal)[calls:]] == ["delete"]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (reservation_spec(partition="none"), "There is no partition 'none'"),
        (reservation_spec(node_names=["n3"]), "has no node 'n3'"),
        (reservation_spec(-60, -1), "is over"),
        (reservation_spec(last=60 * 24 * 400), "within a year"),
    ],
)
async def test_what_there_is_not_is_refused_before_slurm_is_queried(
    portal: Any, wanted: ReservationSpec, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await portal.client.reserve(wanted, user="ada")
    assert changes(portal) == []
    assert [line["result"] for line in portal.audit() if line["action"] == "reserve"] == ["invalid"]


async def test_nothing_is_booked_where_the_site_does_not_allow_it(portal: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(portal.settings), "booking_policy", lambda *_: type(portal.settings.bookings)())
    with pytest.raises(InvalidRequest, match="cannot be booked"):
        await portal.client.reserve(reservation_spec(), user="ada")


@pytest.mark.parametrize("users", [["root"], ["ada", "hub"]])
async def test_only_people_can_use_a_booking(portal: Any, users: list[str]) -> None:
    with pytest.raises(Denied, match="system account"):
        await portal.client.reserve(reservation_spec(users=users), user="ada")
    assert changes(portal) == []


async def test_ordinary_users_make_and_delete_no_reservations(portal: Any) -> None:
    await portal.client.reserve(reservation_spec(users=["bob"]), user="bob")
    portal.act("ada")
    with pytest.raises(Denied, match="ada may not make or change reservations"):
        await portal.client.reserve(reservation_spec(), user="ada")
    with pytest.raises(Denied):
        await portal.client.release(NAME, user="ada")
    assert len(changes(portal)) == 1
    assert await portal.client.reservations() == []  # of others they see none
    portal.act("bob")
    assert [reservation.name for reservation in await portal.client.reservations()] == [NAME]


@pytest.mark.parametrize("name", ["maint", "carme-course", "*", "carme-aaaaaaaaaaaa,maint"])
async def test_the_administrators_reservations_cannot_be_deleted(portal: Any, name: str) -> None:
    with pytest.raises(Denied, match="not a booking of Carme's"):
        await portal.client.release(name, user="ada")
    assert changes(portal) == []


async def test_slurms_refusal_is_reported_in_plain_words(portal: Any) -> None:
    portal.slurm.fail("scontrol", "Error creating the reservation: Requested nodes are busy")
    with pytest.raises(SlurmError, match="Other jobs or bookings have these nodes at that time") as caught:
        await portal.client.reserve(reservation_spec(), user="ada")
    assert caught.value.field == "start"


@pytest.mark.parametrize(
    ("answer", "field", "words"),
    [
        (
            "Error creating the reservation: Requested reservation overlaps with another reservation",
            "start",
            "Other",
        ),
        ("slurm_update error: Reservation already started", "start", "has begun"),
        (
            "sbatch: error: Batch job submission failed: Access denied to requested reservation",
            "reservation",
            "You may not use this booking",
        ),
        ("allocation failure: Requested reservation is invalid", "reservation", "no such booking"),
    ],
)
def test_refusals_of_slurm_24_11_about_reservations_become_plain_words(
    answer: str, field: str, words: str
) -> None:
    error = refusal("scontrol", answer)
    assert error.field == field
    assert words in error.message


def test_maintenance_is_distinguished() -> None:
    booking, maintenance = parsing.reservations(Path(__file__).with_name("reservations.txt").read_text())
    assert (booking.name, booking.node_names, booking.users, booking.maintenance) == (
        NAME,
        ["n1", "n2"],
        ["ada", "bob"],
        False,
    )
    assert (maintenance.name, maintenance.node_names, maintenance.maintenance) == (
        "maint",
        ["n1", "n2", "n3"],
        True,
    )


async def test_a_booking_of_a_project_is_for_its_account(portal: Any) -> None:
    wanted = reservation_spec(users=[], accounts=["carme-vision"])
    saved = await portal.client.reserve(wanted, user="ada")
    assert (saved.accounts, saved.users) == (["carme-vision"], [])
    (call,) = changes(portal)
    assert "Accounts=carme-vision" in call and not any(word.startswith("Users=") for word in call)
    await portal.client.reserve(wanted, user="ada")
    assert len(changes(portal)) == 1, "it is as it is to be"
    for users, accounts in ([], []), (["ada"], ["carme-vision"]):
        with pytest.raises(ValueError, match="must be for users, or for an account"):
            reservation_spec(users=users, accounts=accounts)


def window(first: int = 60, last: int = 180, **fields: Any) -> Window:
    """A maintenance that begins so many minutes from now and ends after so many."""
    now = datetime.now(UTC).replace(microsecond=0)
    values: dict[str, Any] = {
        "name": "carme-maintenance-aaaaaaaaaaaa", "node_names": ["n1", "n2"],
        "start": now + timedelta(minutes=first), "end": now + timedelta(minutes=last),
    }  # fmt: skip
    return Window(**(values | fields))


async def test_a_maintenance_is_planned_changed_and_cancelled(portal: Any) -> None:
    wanted = window()
    saved = await portal.client.maintain(wanted, user="root")
    assert (saved.node_names, saved.users, saved.start) == (["n1", "n2"], ["root"], wanted.start)
    await portal.client.maintain(wanted, user="root")
    shorter = wanted.model_copy(update={"end": wanted.end - timedelta(minutes=30), "node_names": ["n1"]})
    assert (await portal.client.maintain(shorter, user="root")).end == shorter.end
    await portal.client.release(wanted.name, user="root")
    created, changed, deleted = changes(portal)
    assert "Flags=MAINT,IGNORE_JOBS" in created and "Nodes=n1,n2" in created and "Users=root" in created
    assert changed[2:] == [f"EndTime={shorter.end:%Y-%m-%dT%H:%M:%S}", "Nodes=n1"]
    assert deleted == ["delete", f"ReservationName={wanted.name}"]
    lines = [line for line in portal.audit() if line["action"] == "maintain"]
    assert [(line["by"], line["user"], line["result"]) for line in lines] == [("hub", "root", "ok")] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"node_names": ["n1", "n99"]}, "There is no node 'n99'"),
        ({"first": -20, "last": -10}, "The maintenance is over"),
        ({"last": 600_000}, "must end within a year"),
    ],
)
async def test_a_maintenance_with_wrong_nodes_or_times_is_refused(
    portal: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await portal.client.maintain(window(**fields), user="root")
    assert not changes(portal)


async def test_only_services_plan_maintenance(site: Any) -> None:
    with pytest.raises(Denied, match="may not reserve nodes for maintenance"):
        await site.client.maintain(window(), user="ada")
    for name in (
        "maint",
        "carme-aaaaaaaaaaaa",
        "carme-maintenance-AAAAAAAAAAAA",
        "carme-maintenance-aaaaaaaaaaaa\n",
    ):
        with pytest.raises(ValueError, match="name"):
            window(name=name)


async def test_a_job_runs_in_a_booking(site: Any, request_: JobRequest) -> None:
    await site.client.submit(request_.model_copy(update={"reservation": NAME}))
    assert f"--reservation={NAME}" in site.slurm.calls("sbatch")[0]["arguments"]
    await site.client.submit(request_)
    assert not [word for word in site.slurm.calls("sbatch")[1]["arguments"] if "reservation" in word]
