"""The broker over its real socket, as its peers see it."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carme.broker import AsyncBrokerClient
from carme.broker.audit import REFUSALS_A_MINUTE
from carme.broker.peers import Peer, acting_for, identify, owner_of_job, require_person
from carme.config import Settings
from carme.errors import Denied, InvalidRequest, NotFound, SlurmError
from carme.jobs import Job, JobRequest, JobState
from carme.slurm import UnixAccount
from patience import HANG

from .conftest import NASTY, RUNNING

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until the next polls fulfil a condition; the test's own time limit ends it otherwise."""
    while not (result := await condition()):  # noqa: ASYNC110 - what changes is outside
        await asyncio.sleep(0.02)
    return result


# Submission


async def test_a_job_is_submitted_with_all_its_options_and_its_own_folder(
    site: Any, order: JobRequest
) -> None:
    job_id = await site.client.submit(order)
    (call,) = site.slurm.calls("sbatch")
    folder = Path(call["cwd"]) if call["cwd"] != "/" else None
    words = [word.removeprefix("--").partition("=") for word in call["arguments"]]
    options: dict[str, str] = {key: value for key, _, value in words}
    folder = Path(options["chdir"])
    key = folder.name
    assert folder == site.home / ".local/share/carme/jobs" / key
    assert options | {"output": "", "error": "", "chdir": ""} == {
        "parsable": "",
        "no-requeue": "",
        "export": "ALL",
        "job-name": "train 1",
        "comment": f"carme/1 kind=session image=torch key={key}",
        "partition": "gpu",
        "nodes": "1",
        "ntasks-per-node": "1",
        "gres": "gpu:a100:2",
        "cpus-per-task": "4",
        "mem": "8000M",
        "time": "30",
        "open-mode": "append",
        "output": "",
        "error": "",
        "chdir": "",
    }
    # Slurm makes file names of %j and the like.
    assert options["output"] == options["error"] == str(folder / "output.log").replace("%", "%%")
    assert call["stdin"].startswith("#!/bin/sh\nexec ") and call["stdin"].endswith('carme-job "$PWD"\n')
    assert " -I " in call["stdin"]  # nothing that anybody sets for Python reaches the launcher
    # What Slurm itself would read of the user's login files could take minutes, or HOME from the job.
    assert options["export"] == "ALL"
    assert "s3cret" not in json.dumps(call)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "files").stat().st_mode) == 0o700
    assert (folder / "files/server.key").read_text() == "s3cret key"
    for name in ("spec.json", "environment.json", "fabric.key", "fabric.pem", "files/server.key"):
        status = (folder / name).stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, UnixAccount.named("ada").uid)
    assert len(bytes.fromhex((folder / "fabric.key").read_text())) == 32
    assert json.loads((folder / "environment.json").read_text()) == {"TOKEN": "s3cret"}
    spec = json.loads((folder / "spec.json").read_text())
    assert spec["command"] == ["python", *NASTY]
    assert spec["help"] == f"{site.settings.site.url}/help"
    assert (spec["image"], spec["nodes"], spec["gpus"], spec["cpus"]) == (
        str(site.settings.images.directory / "torch.sif"), 1, 2, 4,
    )  # fmt: skip

    assert [job.id for job in await site.client.jobs()] == [job_id]
    job = await site.client.job(job_id)
    assert (job.key, job.kind, job.image, job.user) == (key, "session", "torch", "ada")


async def test_programs_of_a_user_run_as_that_user_without_the_brokers_environment(
    site: Any, order: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_BROKER", "1")
    await site.client.submit(order)
    await site.client.cancel(100)
    for call in (*site.slurm.calls("sbatch"), *site.slurm.calls("scancel")):
        assert call["uid"] == UnixAccount.named("ada").uid
        assert set(call["environment"]) - {"LC_CTYPE"} == {
            "HOME",
            "USER",
            "LOGNAME",
            "PATH",
            "LANG",
            "LC_ALL",
        }


async def test_the_audit_log_shows_who_did_what_but_no_secret(site: Any, order: JobRequest) -> None:
    job_id = await site.client.submit(order)
    await site.client.cancel(job_id)
    with pytest.raises(Denied):
        await site.client.jobs(user="bob")
    text = site.settings.broker.audit_log.read_text()
    assert "s3cret" not in text and "touch x" not in text
    assert [(e["by"], e["user"], e["action"], e["result"]) for e in site.audit()] == [
        ("ada", "ada", "submit", "ok"),
        ("ada", "ada", "cancel", "ok"),
        ("ada", "bob", "jobs", "denied"),
    ]
    assert stat.S_IMODE(site.settings.broker.audit_log.stat().st_mode) == 0o640


async def test_what_cannot_start_never_reaches_slurm(site: Any, order: JobRequest) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await site.client.submit(order.model_copy(update={"gpus_per_node": 9}))
    assert caught.value.field == "gpus_per_node"
    assert str(caught.value) == "A node has at most 4 GPUs of type a100; 9 were requested. Ask for 1 to 4."
    assert site.slurm.calls("sbatch") == []
    assert site.audit()[-1]["result"] == "invalid"


async def test_slurms_refusal_is_reported_and_leaves_nothing_behind(site: Any, order: JobRequest) -> None:
    site.slurm.fail("sbatch", "sbatch: error: Batch job submission failed: Invalid account or ...")
    with pytest.raises(SlurmError, match="does not let you use this account") as caught:
        await site.client.submit(order)
    assert "sacctmgr" in caught.value.remedy
    assert list((site.home / ".local/share/carme/jobs").iterdir()) == []


async def test_a_home_that_cannot_be_written_is_reported(site: Any, order: JobRequest) -> None:
    (site.home / ".local").write_text("in the way")
    with pytest.raises(
        SlurmError, match=r"The job's folder cannot be made: .*Not a directory|File exists"
    ) as caught:
        await site.client.submit(order)
    assert "home directory" in caught.value.remedy
    site.home.rename(site.home.with_name("gone"))
    with pytest.raises(SlurmError, match="there is no home directory"):
        await site.client.submit(order)
    assert site.slurm.calls("sbatch") == []


async def test_a_job_whose_submission_got_no_answer_is_cancelled_when_it_turns_up(
    site: Any, order: JobRequest
) -> None:
    site.slurm.fail(
        "sbatch", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    )
    with pytest.raises(SlurmError, match="does not answer"):
        await site.client.submit(order)
    (call,) = site.slurm.calls("sbatch")
    comment = next(word for word in call["arguments"] if word.startswith("--comment="))
    site.slurm.jobs = [RUNNING | {"k": comment.removeprefix("--comment=")}]

    async def cancelled() -> bool:
        return site.slurm.jobs[0]["T"] == "CANCELLED"

    await until(cancelled)


async def unanswered(site: Any, order: JobRequest) -> dict[str, Any]:
    """The job of a submission that got no answer, as squeue prints it."""
    site.slurm.fail("sbatch", "sbatch: error: Batch job submission failed: Socket timed out")
    with pytest.raises(SlurmError, match="does not answer"):
        await site.client.submit(order)
    (call,) = site.slurm.calls("sbatch")
    comment = next(word for word in call["arguments"] if word.startswith("--comment="))
    return RUNNING | {"k": comment.removeprefix("--comment=")}


async def test_a_job_whose_submission_got_no_answer_is_cancelled_by_the_next_broker(
    start: Callable[[], Any], slurm: Any, request_: JobRequest
) -> None:
    async with start() as site:
        job = await unanswered(site, request_)
    slurm.jobs = [job]
    async with start() as site:

        async def cancelled() -> bool:
            return site.slurm.jobs[0]["T"] == "CANCELLED"

        await until(cancelled)


async def test_such_a_job_that_cannot_be_cancelled_leaves_polls_whole(
    site: Any, request_: JobRequest
) -> None:
    job = await unanswered(site, request_)
    site.slurm.fail("scancel", "scancel: error: Kill job error on job id 7: Unspecified error")
    async with asyncio.timeout(HANG):
        await site.queue([job])

    async def tried() -> bool:
        return len(site.slurm.calls("scancel")) > 1

    await until(tried)
    assert site.broker._watch._failure is None
    site.slurm.heal("scancel")

    async def cancelled() -> bool:
        return site.slurm.jobs[0]["T"] == "CANCELLED"

    await until(cancelled)


async def test_a_start_estimate_is_a_range_around_slurms_plan(site: Any, order: JobRequest) -> None:
    before = datetime.now(UTC)
    estimate = await site.client.test(order)
    assert estimate.start == datetime.fromtimestamp(1795181538, UTC)
    # No job that ended recently shows how good the plan is: half of Slurm's planned wait.
    latest, moment = max(estimate.start, before), timedelta(minutes=5)
    assert estimate.earliest is not None
    assert -moment < estimate.earliest - (before + (latest - before) / 2) < moment
    assert estimate.nodes == "n1"
    assert not (site.home / ".local").exists()


# Who may ask what


async def test_ordinary_peers_see_and_end_their_own_jobs_only(site: Any) -> None:
    site.slurm.jobs = [RUNNING, RUNNING | {"A": 8, "u": "bob"}]
    await until(lambda: jobs_of(site.client))
    assert [job.id for job in await site.client.jobs()] == [7]
    assert [job.id for job in (await site.client.events()).jobs] == [7]
    for ask in (site.client.job, site.client.cancel, site.client.log):
        with pytest.raises(NotFound, match="There is no job 8 of ada"):
            await ask(8)
    with pytest.raises(Denied, match=r"ada may not act for 'bob'. Leave the user out"):
        await site.client.cancel(8, user="bob")
    assert site.slurm.calls("scancel") == []


async def jobs_of(client: AsyncBrokerClient) -> list[Job]:
    return await client.jobs()


async def test_services_act_for_users(site: Any, order: JobRequest) -> None:
    site.act("hub", trusted=True)
    with pytest.raises(InvalidRequest, match="Name the user that the job is for"):
        await site.client.submit(order)
    job_id = await site.client.submit(order, user="ada")
    assert (await site.client.job(job_id)).user == "ada"
    assert [job.id for job in await site.client.jobs()] == [job_id]
    assert await site.client.jobs(user="bob") == []
    with pytest.raises(NotFound):
        await site.client.cancel(job_id, user="bob")
    await site.client.cancel(job_id)
    with pytest.raises(Denied, match="system account"):
        await site.client.submit(order, user="root")
    assert (site.audit()[0]["by"], site.audit()[0]["user"]) == ("hub", "ada")


async def test_system_accounts_have_no_jobs(site: Any, order: JobRequest) -> None:
    site.act("hub")
    with pytest.raises(Denied, match="The account hub is a system account"):
        await site.client.submit(order)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"uid": 0}, "system account"),
        ({"uid": 65534}, "belongs to no person"),
        ({"uid": 61200}, "belongs to no person"),
        ({"shell": "/usr/sbin/nologin"}, "closed"),
        ({"shell": "/bin/false"}, "closed"),
    ],
)
def test_only_people_have_jobs(settings: Settings, changes: dict[str, Any], words: str) -> None:
    person = UnixAccount("eva", 2000, 2000, "/home/eva", "/bin/bash")
    require_person(person, settings)
    with pytest.raises(Denied, match=words):
        require_person(replace(person, **changes), settings)


async def test_a_service_is_one_account_not_a_name(
    settings: Settings, accounts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory server may know another number by the name of a service."""
    impostor = UnixAccount("hub", 4711, 4711, "/home/hub")
    connection, peer_end = socket.socketpair()
    with connection, peer_end:
        monkeypatch.setattr(UnixAccount, "numbered", lambda uid: impostor)
        if os.getuid() == 0:
            monkeypatch.setattr("carme.broker.peers._CREDENTIALS", _Pretended(4711))
        assert not (await identify(connection, settings)).trusted
        monkeypatch.setattr(UnixAccount, "numbered", lambda uid: UnixAccount.named("hub"))
        assert (await identify(connection, settings)).trusted


class _Pretended:
    """Stands for the kernel's answer, which root cannot make say anything but root."""

    size = 12

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def unpack(self, raw: bytes) -> tuple[int, int, int]:
        return 1, self.uid, self.uid


async def test_refusals_cannot_flood_the_audit_log(
    site: Any, order: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carme.broker.audit.time", SimpleNamespace(monotonic=lambda: 0.0))
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket, limit=1 << 20)
    for _ in range(REFUSALS_A_MINUTE + 20):
        writer.write(b'{"method": "jobs", "user": "bob"}\nnonsense\n')
        assert b"denied" in await reader.readline()
        assert b"invalid" in await reader.readline()
    writer.close()
    # What is done is on record all the same, and says that something is missing.
    await site.client.submit(order)
    lines = site.audit()
    assert lines[-1]["action"] == "submit" and lines[-1]["left_out"] > 0
    recorded = [line for line in lines if line["action"] in ("jobs", "malformed")]
    # The minute may turn while this runs.
    assert REFUSALS_A_MINUTE <= len(recorded) <= 2 * REFUSALS_A_MINUTE
    assert len(recorded) + sum(line.get("left_out", 0) for line in lines) == 2 * (REFUSALS_A_MINUTE + 20)


async def test_the_audit_log_shows_who_requested_others_jobs(site: Any) -> None:
    site.slurm.jobs = [RUNNING | {"A": 8, "u": "bob"}]
    site.act("hub", trusted=True)
    await until(lambda: jobs_of(site.client))
    site.act("ada")
    for ask in (site.client.job, site.client.cancel, site.client.log):
        with pytest.raises(NotFound):
            await ask(8)
    assert [(e["action"], e["result"], e["job_id"]) for e in site.audit()] == [
        ("job", "not-found", 8),
        ("cancel", "not-found", 8),
        ("log", "not-found", 8),
    ]


async def test_the_kernel_says_who_the_peer_is(settings: Settings, accounts: None) -> None:
    connection, peer_end = socket.socketpair()
    with connection, peer_end:
        peer = await identify(connection, settings)
    assert (peer.pid, peer.account.uid) == (os.getpid(), os.getuid())
    assert peer.trusted is (os.getuid() == 0)


async def test_a_person_acts_as_itself_and_a_service_for_any_user(settings: Settings, accounts: None) -> None:
    ada, hub = UnixAccount.named("ada"), UnixAccount.named("hub")
    person, service = Peer(1, ada, trusted=False), Peer(1, hub, trusted=True)
    assert await acting_for(person, None, settings) == ada
    assert await acting_for(person, "ada", settings) == ada
    assert await acting_for(service, None, settings) is None
    assert await owner_of_job(service, "ada", settings) == ada


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another account")
async def test_another_account_is_recognised(settings: Settings, accounts: None, folder: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "s"))
    (folder / "s").chmod(0o666)
    listening.listen()
    child = os.fork()
    if child == 0:
        os.setgid(54321)
        os.setuid(54321)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(folder / "s"))
        connection.recv(1)
        os._exit(0)
    connection, _ = listening.accept()
    peer = await identify(connection, settings)
    connection.close()
    listening.close()
    os.waitpid(child, 0)  # noqa: ASYNC222
    assert (peer.account.name, peer.pid, peer.trusted) == ("ada", child, False)


# What changes


async def test_events_report_each_change_once(site: Any) -> None:
    first = await site.client.events()
    assert (first.complete, first.jobs) == (True, [])
    waiting = asyncio.create_task(site.client.events(first.cursor, wait=30))
    site.slurm.jobs = [RUNNING]
    batch = await waiting
    assert (batch.complete, [job.state for job in batch.jobs]) == (False, [JobState.RUNNING])
    quiet = await site.client.events(batch.cursor)
    assert (quiet.jobs, quiet.complete, quiet.cursor) == ([], False, batch.cursor)
    site.slurm.jobs = [RUNNING | {"T": "FAILED", "exit": 3 << 8}]
    batch = await site.client.events(batch.cursor, wait=30)
    assert [(job.state, job.exit_code) for job in batch.jobs] == [(JobState.FAILED, 3)]
    for unknown in ("nonsense", "abcd1234-0", batch.cursor.split("-")[0] + "-9999", "-", "٣-٣"):
        assert (await site.client.events(unknown)).complete


async def test_a_cursor_from_before_a_forgotten_job_gets_everything(site: Any) -> None:
    old = (await site.client.events()).cursor
    site.slurm.jobs = [RUNNING | {"T": "COMPLETED"}]
    new = await site.client.events(old, wait=30)
    site.slurm.jobs = []

    async def forgotten() -> bool:
        return (await site.client.events(old)).complete

    await until(forgotten)
    assert not (await site.client.events(new.cursor)).complete


@pytest.mark.parametrize("accounted", [True, False])
async def test_a_job_that_vanishes_has_an_end(site: Any, accounted: bool) -> None:
    site.slurm.jobs = [RUNNING]
    await until(lambda: jobs_of(site.client))
    if accounted:
        ended = {"State": "TIMEOUT", "ExitCode": "0:0", "Start": "1795181538"}
        site.slurm.account({"JobIDRaw": 7, "User": "ada", "JobName": RUNNING["j"]} | ended)
    cursor = (await site.client.events()).cursor
    site.slurm.jobs = []
    (job,) = (await site.client.events(cursor, wait=30)).jobs
    assert job.is_over
    assert (job.state is JobState.TIMEOUT) is accounted
    assert accounted or "has no record of the job" in job.explanation


async def test_while_slurm_is_away_the_last_snapshot_stays_and_changes_fail(
    site: Any, order: JobRequest
) -> None:
    site.slurm.jobs = [RUNNING]
    await until(lambda: jobs_of(site.client))
    taken = (await site.client.cluster()).taken
    for program in ("squeue", "scontrol", "scancel", "sbatch"):
        site.slurm.fail(program, AWAY)
    polls = len(site.slurm.calls("scontrol"))

    async def polled() -> bool:
        return len(site.slurm.calls("scontrol")) > polls + 2

    await until(polled)
    # The last snapshot stays, and says how old it is.
    assert [job.id for job in await site.client.jobs()] == [7]
    assert (await site.client.cluster()).taken >= taken
    with pytest.raises(SlurmError, match="Slurm does not answer: scancel says"):
        await site.client.cancel(7)
    site.slurm.jobs = [RUNNING | {"A": 9}]
    site.slurm.account({"JobIDRaw": 7, "User": "ada", "State": "COMPLETED", "ExitCode": "0:0"})
    site.slurm.heal("squeue")
    site.slurm.heal("scontrol")

    async def back() -> bool:
        return 9 in [job.id for job in await site.client.jobs()]

    await until(back)


async def test_slurm_is_queried_once_while_nothing_changes(site: Any) -> None:
    site.slurm.jobs = [RUNNING]
    await until(lambda: jobs_of(site.client))

    def requested() -> list[list[str]]:
        return [call["arguments"] for name in ("squeue", "scontrol") for call in site.slurm.calls(name)]

    async def quiet() -> bool:
        before = len(requested())
        polled = len(site.slurm.calls("scontrol")) + 5
        await until(lambda: polls(polled))
        return all(arguments[-1] == "job" for arguments in requested()[before:])

    async def polls(count: int) -> bool:
        return len(site.slurm.calls("scontrol")) >= count

    await until(quiet)
    site.slurm.jobs = [RUNNING | {"T": "SUSPENDED"}]

    async def seen() -> bool:
        (job,) = await site.client.jobs()
        return job.state is JobState.SUSPENDED

    await until(seen)


async def test_ended_jobs_come_from_the_accounting(site: Any) -> None:
    record = {"User": "ada", "State": "COMPLETED", "ExitCode": "0:0", "JobName": "x"}
    site.slurm.account(
        record | {"JobIDRaw": 3, "Submit": 1795181538}, record | {"JobIDRaw": 4, "Submit": 1795181599}
    )
    assert (await site.client.job(3)).state is JobState.COMPLETED
    assert [job.id for job in await site.client.history()] == [4, 3]
    assert [job.id for job in await site.client.history(limit=1)] == [4]
    assert "--user=ada" in site.slurm.calls("sacct")[-1]["arguments"]
    with pytest.raises(NotFound, match=r"There is no job 5 of ada. See 'carme jobs --history'"):
        await site.client.job(5)
    await site.client.cancel(3)  # over already: nothing to do
    assert site.slurm.calls("scancel") == []
    site.slurm.fail("sacct", "Slurm accounting storage is disabled")
    with pytest.raises(NotFound):
        await site.client.job(3)
