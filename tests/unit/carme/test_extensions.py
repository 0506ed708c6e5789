"""Whether a job may run longer, how much, and why not more."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carme.cli import main
from carme.config import SessionSettings
from carme.errors import InvalidRequest, NotFound, SlurmError
from carme.jobs import Cluster, Job, JobState, Node, Partition, Reservation
from carme.jobs.extensions import extended_limit
from carme.jobs.limits import Limits
from carme.slurm import parsing

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
START = NOW - timedelta(minutes=30)


def node(name: str) -> Node:
    return Node(name=name, cpus=8, memory_mb=16000, gpus={"a100": 4})


CLUSTER = Cluster(
    taken=NOW,
    partitions=[Partition(name="gpu", max_minutes=600, node_names=["n1", "n2"])],
    nodes=[node("n1"), node("n2")],
)


def job(number: int = 7, **values: Any) -> Job:
    """A session with half of n1, and 30 of its 60 minutes left."""
    base: dict[str, Any] = {
        "id": number, "name": "a", "user": "ada", "account": "lab", "kind": "session", "partition": "gpu",
        "state": JobState.RUNNING, "nodes": 1, "node_list": "n1", "cpus": 4, "memory_mb": 8000, "gpus": 2,
        "minutes_limit": 60, "started": START,
    }  # fmt: skip
    return Job.model_validate(base | values)


def waiting(minutes: int, **values: Any) -> Job:
    """A job that Slurm means to start on all of n1 in so many minutes."""
    plan = {"planned_start": NOW + timedelta(minutes=minutes), "planned_nodes": "n[1-2]", "started": None}
    return job(8, **({"state": JobState.PENDING, "node_list": "", "cpus": 8, "gpus": 4} | plan | values))


def booking(minutes: int, **values: Any) -> Reservation:
    start = NOW + timedelta(minutes=minutes)
    base = {"name": "course", "start": start, "end": start + timedelta(hours=1), "node_names": ["n1"]}
    return Reservation.model_validate(base | {"cpus": 8} | values)


def limit_of(minutes: int, running: Job | None = None, **values: Any) -> int:
    given: dict[str, Any] = {
        "policy": SessionSettings(maximum_minutes=600), "cluster": CLUSTER, "jobs": [], "reservations": [],
        "limits": [], "now": NOW,
    }  # fmt: skip
    return extended_limit(running or job(), minutes, **(given | values))


def refused(minutes: int, running: Job | None = None, **values: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        limit_of(minutes, running, **values)
    assert caught.value.field == "minutes"
    assert caught.value.remedy
    return caught.value


def at(minutes: int) -> str:
    return (NOW + timedelta(minutes=minutes)).astimezone().strftime("%H:%M")


def test_an_extension_that_nothing_limits_is_granted() -> None:
    assert limit_of(45) == 105


def test_the_site_policy_limits_an_extension() -> None:
    assert "does not let users extend" in str(refused(5, policy=SessionSettings(extend=False)))
    error = refused(60, policy=SessionSettings(default_minutes=60, maximum_minutes=100))
    assert f"by at most 40 minutes, until {at(70)}" in error.message
    assert "a session in partition gpu lasts at most 1 hour 40 minutes" in error.message
    assert error.remedy == "Ask for at most 40 minutes."
    # That is a rule for sessions; a batch job has its partition's limit alone.
    batch = job(kind="batch")
    assert limit_of(400, batch, policy=SessionSettings(default_minutes=60, maximum_minutes=100)) == 460


def test_the_partition_limits_an_extension() -> None:
    error = refused(600, job(kind="batch"))
    assert "by at most 9 hours" in error.message
    assert "a job in partition gpu lasts at most 10 hours" in error.message


def test_limits_of_associations_limit_an_extension() -> None:
    own = [Limits(account="lab", user="ada", parent="", minutes=80), Limits(account="lab", minutes=500)]
    assert "a job of ada lasts at most 1 hour 20 minutes" in refused(30, limits=own).message
    quality = [*own, Limits(qos="long", minutes=200)]
    assert limit_of(30, job(qos="long"), limits=quality) == 90
    above = [
        Limits(account="lab", parent="all"),
        Limits(account="all", minutes=70),
        Limits(account="other", minutes=1),
    ]
    assert "by at most 10 minutes" in refused(30, limits=above).message


def test_a_booking_that_follows_limits_an_extension() -> None:
    error = refused(60, reservations=[booking(65)])
    assert f"by at most 35 minutes, until {at(65)}" in error.message
    assert "the booking course follows on n1" in error.message
    assert limit_of(35, reservations=[booking(65)]) == 95
    assert limit_of(60, reservations=[booking(65, node_names=["n2"])]) == 120
    # A booking of the other half of the node does not limit the job.
    assert limit_of(60, reservations=[booking(65, cpus=4, gpus=2)]) == 120
    assert "by at most 35 minutes" in refused(60, reservations=[booking(65, cpus=4, gpus=3)]).message


def test_a_booking_at_the_very_end_leaves_nothing() -> None:
    error = refused(1, reservations=[booking(30)])
    assert f"cannot be extended beyond {at(30)}" in error.message
    assert "booking course" in error.message


def test_the_end_of_its_booking_limits_an_extension() -> None:
    error = refused(60, job(reservation="course"), reservations=[booking(-10)])
    assert "by at most 20 minutes" in error.message
    assert "its booking course ends then" in error.message


def test_jobs_that_wait_for_the_node_limit_an_extension() -> None:
    error = refused(60, jobs=[job(), waiting(40)])
    assert f"by at most 10 minutes, until {at(40)}" in error.message
    assert "another job waits and is planned to start there then" in error.message
    assert limit_of(60, jobs=[job(), waiting(40, planned_nodes="n2")]) == 120
    assert limit_of(60, jobs=[job(), waiting(120)]) == 120
    assert limit_of(60, jobs=[job(), waiting(40, planned_start=None)]) == 120
    # The other half of the node is free.
    assert limit_of(60, jobs=[job(), waiting(40, cpus=4, gpus=2, memory_mb=8000)]) == 120
    # It was, but for a third job that runs on.
    third = job(9, cpus=2, gpus=0, memory_mb=1, minutes_limit=600)
    assert "another job waits" in str(
        refused(60, jobs=[job(), third, waiting(40, cpus=4, gpus=2, memory_mb=8000)])
    )


def test_the_nearest_bound_is_reported() -> None:
    error = refused(600, jobs=[waiting(50)], reservations=[booking(45)])
    assert "booking" in error.message and "15 minutes" in error.message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"state": JobState.PENDING, "started": None}, "has not started"),
        ({"state": JobState.COMPLETING}, "is over or about to end"),
        ({"state": JobState.COMPLETED}, "is over or about to end"),
        ({"minutes_limit": None}, "has no time limit"),
    ],
)
def test_what_does_not_run_cannot_be_extended(values: dict[str, Any], words: str) -> None:
    assert words in refused(5, job(**values)).message


@given(st.integers(1, 1000), st.integers(31, 200), st.integers(31, 200))
def test_what_is_offered_is_granted_and_one_minute_more_is_not(
    minutes: int, booked: int, planned: int
) -> None:
    around: dict[str, Any] = {"jobs": [waiting(planned)], "reservations": [booking(booked)]}
    try:
        assert limit_of(minutes, **around) == 60 + minutes
    except InvalidRequest as error:
        most = int(error.remedy.split()[-2])
        assert most == min(booked, planned) - 30 < minutes
        assert limit_of(most, **around) == 60 + most
        refused(most + 1, **around)


# Over the broker's socket

RUNNING: dict[str, Any] = {
    "A": 7, "j": "session-s1", "u": "ada", "P": "gpu", "T": "RUNNING", "D": 1, "N": "n1", "C": 1, "m": "1M",
    "l": "1:00:00", "S": str(int(datetime.now(UTC).timestamp())),
    "k": f"carme/1 kind=session image=torch key={'0' * 32}",
}  # fmt: skip


async def test_the_broker_extends_a_job_from_its_present_limit(site: Any) -> None:
    site.slurm.jobs = [RUNNING]
    site.slurm.account({"JobIDRaw": 7, "User": "ada", "State": "RUNNING", "ExitCode": "0:0"})
    extension = await site.client.extend(7, 30)
    assert extension.minutes_limit == 90
    assert extension.ends == datetime.fromtimestamp(int(RUNNING["S"]), UTC) + timedelta(minutes=90)
    # A second one counts from what the first one made of it, however old the broker's snapshot is.
    assert (await site.client.extend(7, 30)).minutes_limit == 120
    (*_, call) = [call for call in site.slurm.calls("scontrol") if "update" in call["arguments"]]
    assert call["arguments"] == ["update", "JobId=7", "TimeLimit=120"]
    assert [(entry["action"], entry["result"]) for entry in site.audit()] == [("extend", "ok")] * 2


async def test_the_broker_refuses_an_extension_beyond_limits_or_by_another_user(site: Any) -> None:
    site.slurm.jobs = [RUNNING]
    site.slurm.account({"JobIDRaw": 7, "User": "ada", "State": "RUNNING", "ExitCode": "0:0"})
    with pytest.raises(InvalidRequest, match="can be extended by at most"):
        await site.client.extend(7, 100_000)
    assert site.audit()[-1]["result"] == "invalid"
    site.slurm.jobs = [RUNNING | {"T": "COMPLETED"}]
    with pytest.raises(InvalidRequest, match="is over"):
        await site.client.extend(7, 1)
    site.act("bob")
    with pytest.raises(NotFound):
        await site.client.extend(7, 1)
    assert not [call for call in site.slurm.calls("scontrol") if "update" in call["arguments"]]


async def test_a_job_that_ends_before_its_extension_is_reported(site: Any) -> None:
    site.slurm.jobs = [RUNNING]
    site.slurm.account({"JobIDRaw": 7, "User": "ada", "State": "RUNNING", "ExitCode": "0:0"})
    assert (await site.client.extend(7, 1)).minutes_limit == 61
    # scontrol writes this for a job that has ended since squeue showed it.
    refuse = (
        'any("TimeLimit=" in word for word in sys.argv) and sys.exit("Job has already finished for job 7")'
    )
    source = (site.slurm.folder / "scontrol").read_text()
    assert "import fake_slurm" in source
    (site.slurm.folder / "scontrol").write_text(
        source.replace("import fake_slurm", f"{refuse}\nimport fake_slurm")
    )
    with pytest.raises(InvalidRequest, match=r"Job 7 ended before it could be extended. Start it again"):
        await site.client.extend(7, 1)
    site.slurm.fail("scontrol", "slurm_update error: Access/permission denied")
    with pytest.raises(SlurmError):
        await site.client.extend(7, 1)


# What Slurm 24.11 writes


def test_reservations_are_parsed() -> None:
    output = (
        "ReservationName=coreb StartTime=1795200364 EndTime=1795203964 Duration=01:00:00 Nodes=n[1-2] "
        "NodeCnt=2 CoreCnt=8 Features=(null) PartitionName=gpu Flags=   NodeName=n1 CoreIDs=0-7 "
        "TRES=cpu=8,gres/gpu=2 "
        "Users=user1,user2 Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null)\n"
    )
    (found,) = parsing.reservations(output)
    assert (found.name, found.node_names, found.users, found.cpus, found.gpus) == (
        "coreb", ["n1", "n2"], ["user1", "user2"], 8, 2,
    )  # fmt: skip
    assert found.end - found.start == timedelta(hours=1)
    assert parsing.reservations("No reservations in the system\n") == []


def test_limits_of_associations_are_parsed() -> None:
    records = Path(__file__).with_name("limits.txt").read_text()
    root, account, user, quality = parsing.limits(records)
    assert (root.account, root.parent, root.resources, root.jobs) == ("root", "", {}, None)
    assert (account.account, account.user, account.parent) == ("carme", "", "root")
    assert (user.user, user.resources, user.minutes) == ("user2", {"gres/gpu": (1, 1)}, 120)
    assert (quality.qos, quality.resources, quality.minutes) == ("normal", {}, None)


async def test_the_limit_that_holds_a_job_back_is_reported(site: Any) -> None:
    text = Path(__file__).with_name("limits.txt").read_text().replace("user2", "ada")
    (site.slurm.state / "limits").write_text(text)
    site.slurm.jobs = [RUNNING | {"A": 8, "T": "PENDING", "a": "carme", "r": "AssocGrpGRES", "q": "normal"}]
    cursor = None
    while True:
        batch = await site.client.events(cursor, wait=30)
        cursor = batch.cursor
        if batch.jobs and batch.jobs[-1].detail:
            break
    sentence = batch.jobs[-1].explanation
    assert "(ada: at most 1 GPU at a time, 1 in use)" in sentence
    assert "end one of them or ask for less" in sentence
    assert json.dumps(site.slurm.calls("scontrol")).count("assoc_mgr") == 1


async def test_the_booking_that_has_not_begun_is_reported(site: Any) -> None:
    start = int(datetime.now(UTC).timestamp()) + 7200
    (site.slurm.state / "reservations").write_text(
        f"ReservationName=course StartTime={start} EndTime={start + 60} Nodes=n1 Users=ada TRES=cpu=8\n"
    )
    site.slurm.jobs = [RUNNING | {"A": 8, "T": "PENDING", "r": "Reservation", "v": "course"}]
    cursor = None
    while True:
        batch = await site.client.events(cursor, wait=30)
        cursor = batch.cursor
        if batch.jobs and batch.jobs[-1].detail:
            break
    sentence = batch.jobs[-1].explanation
    assert "(course begins " in sentence and f"{datetime.fromtimestamp(start, UTC):%H:%M} UTC)" in sentence


async def test_a_batch_job_is_extended_by_command(
    site: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = RUNNING | {"A": 8, "j": "train", "k": f"carme/1 kind=batch image= key={'1' * 32}"}
    site.slurm.jobs = [batch]
    site.slurm.account({"JobIDRaw": 8, "User": "ada", "State": "RUNNING", "ExitCode": "0:0"})
    file = folder / "carme.toml"
    settings = f'[slurm]\ncluster = "c"\n[broker]\nsocket = "{site.settings.broker.socket}"\n'
    await asyncio.to_thread(file.write_text, f'[site]\nurl = "https://carme.example.org"\n{settings}')
    monkeypatch.setenv("CARME_CONFIG", str(file))
    assert await asyncio.to_thread(main, ["extend", "8", "1h", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["minutes_limit"] == 120
    assert await asyncio.to_thread(main, ["extend", "8", "soon"]) == 1
    assert "'soon' is not a length of time" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["extend", "9", "1h"]) == 1
    assert "no job 9 of ada" in capsys.readouterr().err
