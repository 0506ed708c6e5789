"""Through slurmrestd the accounting reports the same as through sacct, and reservations are made and changed.

What both answered at the same moment of jobs of all kinds is recorded (slurm_rest_accounting.json): sacct and
slurmrestd of Slurm 24.11 and 26.05.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from carme.bookings.models import ReservationSpec, Window
from carme.errors import SlurmError
from carme.jobs import Job, JobState
from carme.slurm import parsing
from carme.slurm.rest import RestServer, SlurmRest, accounting

from .conftest import PYTHON
from .rest_server import TOKEN, RecordedRest, serving

RECORDED = json.loads((Path(__file__).parent / "slurm_rest_accounting.json").read_text())
NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def rest(folder: Path) -> Iterator[RecordedRest]:
    rest = RecordedRest(version="v0.0.43")
    with serving(rest, folder / "slurmrestd.socket"):
        yield rest


@pytest.fixture
def token_file(folder: Path) -> Path:
    file = folder / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return file


@pytest.fixture
def slurm(rest: RecordedRest, folder: Path, token_file: Path) -> SlurmRest:
    return SlurmRest(RestServer(str(folder / "slurmrestd.socket"), token_file), PYTHON, "try", "gpu")


def by_name(jobs: list[Job]) -> dict[tuple[int, int | None], dict[str, Any]]:
    return {(job.id, job.task): job.model_dump() for job in jobs}


CASES = [(release, version) for release, case in RECORDED.items() for version in case["slurmdb"]]


@pytest.mark.parametrize(("release", "version"), CASES)
def test_jobs_are_those_of_sacct(release: str, version: str) -> None:
    case = RECORDED[release]
    wanted = by_name(parsing.accounting(case["sacct"]["accounting"], case["separator"]))
    found = by_name(accounting.jobs(case["slurmdb"][version]["between"]))
    assert found.keys() == wanted.keys()
    for which, job in wanted.items():
        assert found[which] == job
    states = {job["state"] for job in found.values()}
    assert states >= {
        *(JobState.COMPLETED, JobState.FAILED, JobState.TIMEOUT, JobState.CANCELLED, JobState.NODE_FAIL),
        *(JobState.RUNNING, JobState.PENDING),
    }
    assert {job["kind"] for job in found.values()} == {"session", "other"}
    assert {"owner", "root", "other"} <= {job["cancelled_by"] for job in found.values()}


@pytest.mark.parametrize(("release", "version"), CASES)
def test_exit_statuses_are_those_of_sacct(release: str, version: str) -> None:
    case = RECORDED[release]
    sacct, separator = case["sacct"], case["separator"]
    wanted = parsing.outcomes(sacct["outcomes"], separator)
    for job, node in parsing.failed_nodes(sacct["failed"], separator).items():
        wanted[job] = wanted[job]._replace(failed_node=node)
    assert accounting.outcomes(case["slurmdb"][version]["of_jobs"], set(sacct["node_fail"])) == wanted
    assert max(outcome.peak_memory_mb or 0 for outcome in wanted.values()) > 50
    assert "n3" in {outcome.failed_node for outcome in wanted.values()}


async def test_history_is_requested_as_sacct_requests_it(rest: RecordedRest, slurm: SlurmRest) -> None:
    rows = next(iter(next(iter(RECORDED.values()))["slurmdb"].values()))["between"]
    answer = (200, json.dumps({"jobs": rows, "errors": []}).encode())
    since = NOW - timedelta(days=2)
    when = f"start_time=uts{int(since.timestamp())}&end_time=uts{int(NOW.timestamp())}"
    same = "disable_truncate_usage_time=true&skip_steps=true&cluster=try"
    rest.answers[f"dbjobs/?{when}&users=ada&{same}"] = answer
    jobs = await slurm.history("ada", since, 3, NOW)
    assert len(jobs) == 3
    assert jobs == sorted(jobs, key=lambda job: (job.submitted or since, job.id), reverse=True)
    rest.answers[f"dbjobs/?step={jobs[0].id}&{same}"] = answer
    assert await slurm.accounted(jobs[0].id) == jobs[0]
    numbers = sorted(job.id for job in jobs[:2])
    rest.answers[f"dbjobs/?step={numbers[0]}&step={numbers[1]}&{same}"] = answer
    assert await slurm.accounted_jobs(numbers) == {job.id: job for job in jobs[:2]}


NAME, MAINTENANCE = "carme-0123456789ab", "carme-maintenance-0123456789ab"
HOLD = ReservationSpec(
    name=NAME,
    partition="gpu",
    node_names=["n1", "n2"],
    users=["ada"],
    start=NOW + timedelta(hours=1),
    end=NOW + timedelta(hours=2),
)


def at(moment: datetime) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": int(moment.timestamp())}


async def test_reservations_are_made_and_changed_as_slurms_user(rest: RecordedRest, slurm: SlurmRest) -> None:
    done = (200, b'{"reservations": [], "errors": []}')
    listed = (200, json.dumps({"reservations": [{"name": NAME}], "errors": []}).encode())
    rest.answers |= {"reservation": done, f"reservation/{NAME}": done, "reservations/": done}
    await slurm.make_reservation(HOLD)
    await slurm.make_maintenance(Window(name=MAINTENANCE, node_names=["n1"], start=HOLD.start, end=HOLD.end))
    rest.answers["reservations/"] = listed
    await slurm.change_reservation(NAME, end=HOLD.start, node_names=["n1"])
    await slurm.delete_reservation(NAME)
    times = {"start_time": at(HOLD.start), "end_time": at(HOLD.end)}
    wanted = [
        {
            **{"name": NAME, **times, "partition": "gpu", "node_list": ["n1", "n2"], "users": ["ada"]},
            "flags": ["NO_HOLD_JOBS_AFTER_END"],
        },
        {
            **{"name": MAINTENANCE, **times, "node_list": ["n1"], "users": ["root"]},
            "flags": ["MAINT", "IGNORE_JOBS"],
        },
        {"name": NAME, "end_time": at(HOLD.start), "node_list": ["n1"]},
    ]
    changes = [request for request in rest.requests if request.method != "GET"]
    assert [request.body for request in changes] == [*wanted, None]
    assert [request.method for request in changes] == ["POST", "POST", "POST", "DELETE"]
    assert {(request.user, request.token) for request in rest.requests} == {("", TOKEN)}


async def test_a_reservation_for_accounts_names_no_users_and_begins_now_if_its_start_has_passed(
    rest: RecordedRest, slurm: SlurmRest
) -> None:
    rest.answers |= {"reservation": (200, b'{"errors": []}'), "reservations/": (200, b'{"reservations": []}')}
    await slurm.make_reservation(
        HOLD.model_copy(update={"accounts": ["research"], "start": NOW - timedelta(hours=1)})
    )
    body = rest.requests[-1].body
    assert body["accounts"] == ["research"] and "users" not in body
    assert body["start_time"]["number"] >= int(NOW.timestamp())


async def test_making_an_existing_reservation_changes_nothing(rest: RecordedRest, slurm: SlurmRest) -> None:
    rest.answers["reservations/"] = (200, json.dumps({"reservations": [{"name": NAME}]}).encode())
    with pytest.raises(SlurmError, match="Duplicate reservation name"):
        await slurm.make_reservation(HOLD)
    assert {request.method for request in rest.requests} == {"GET"}


async def test_changing_a_missing_reservation_makes_none(rest: RecordedRest, slurm: SlurmRest) -> None:
    rest.answers["reservations/"] = (200, b'{"reservations": [{"name": "carme-8"}], "errors": []}')
    with pytest.raises(SlurmError, match=r"^There is no such booking \(any more\)"):
        await slurm.change_reservation(NAME, end=HOLD.end)
    assert [request.method for request in rest.requests] == ["GET"]


async def test_older_releases_make_reservations_by_scontrol(
    rest: RecordedRest, slurm: SlurmRest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest.version = "v0.0.42"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    await slurm.make_reservation(HOLD)
    await slurm.delete_reservation(NAME)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].startswith(f"create reservation ReservationName={NAME} ")
    assert calls[1] == f"delete ReservationName={NAME}" and rest.requests == []
