"""The broker over its real socket, as its peers see it."""

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carme.broker import AsyncBrokerClient, BrokerClient, protocol
from carme.broker.access import Peer, acting_for, identify, owner_of_job, require_person
from carme.broker.audit import REFUSALS_A_MINUTE
from carme.broker.files import log_part
from carme.config import Settings
from carme.errors import BrokerUnavailable, CarmeError, Denied, InvalidRequest, NotFound, SlurmError
from carme.jobs import Job, JobRequest, JobState, contents
from carme.jobs.scripts import sent, sent_script
from carme.slurm import UnixAccount

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NASTY = ["$(touch x); ' \" ` | &\nnewline", "*", "--help", "%j", ""]
RUNNING: dict[str, Any] = {
    "A": 7, "j": "a", "u": "ada", "P": "gpu", "T": "RUNNING", "D": 1, "C": 1, "m": "1M", "l": "1:00:00",
}  # fmt: skip


@pytest.fixture
def order() -> JobRequest:
    return JobRequest(
        name="train 1",
        kind="session",
        image="torch",
        command=["python", *NASTY],
        environment={"TOKEN": "s3cret"},
        files={"server.key": "s3cret key"},
        gpus_per_node=2,
        gpu_type="a100",
        minutes=30,
    )


async def until(condition: Callable[[], Any]) -> Any:
    """Wait for what the next polls bring; the test's own time limit ends it otherwise."""
    while not (result := await condition()):  # noqa: ASYNC110 - what changes is outside
        await asyncio.sleep(0.02)
    return result


async def raw(site: Any, data: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket, limit=1 << 24)
    writer.write(data)
    answer = await reader.readline()
    writer.close()
    return json.loads(answer)


# Submission


async def test_submission(site: Any, order: JobRequest) -> None:
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
    assert (spec["image"], spec["nodes"], spec["gpus"], spec["cpus"]) == (
        str(site.settings.images.directory / "torch.sif"), 1, 2, 4,
    )  # fmt: skip

    assert [job.id for job in await site.client.jobs()] == [job_id]
    job = await site.client.job(job_id)
    assert (job.key, job.kind, job.image, job.user) == (key, "session", "torch", "ada")


async def test_programs_of_a_user_run_as_that_user_and_know_nothing_of_ours(
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
    assert str(caught.value) == "A node has at most 4 GPUs of type a100; 9 were asked for. Ask for 1 to 4."
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


async def test_an_estimate(site: Any, order: JobRequest) -> None:
    before = datetime.now(UTC)
    estimate = await site.client.test(order)
    assert estimate.start == datetime.fromtimestamp(1795181538, UTC)
    # No job has ended lately by which it could be judged: half of what Slurm plans with.
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
        ({"uid": 65534}, "stands for no person"),
        ({"uid": 61200}, "stands for no person"),
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
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(UnixAccount, "numbered", lambda uid: impostor)
        if os.getuid() == 0:
            monkeypatch.setattr("carme.broker.access._CREDENTIALS", _Pretended(4711))
        assert not (await identify(ours, settings)).trusted
        monkeypatch.setattr(UnixAccount, "numbered", lambda uid: UnixAccount.named("hub"))
        assert (await identify(ours, settings)).trusted


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
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = await identify(ours, settings)
    assert (peer.pid, peer.account.uid) == (os.getpid(), os.getuid())
    assert peer.trusted is (os.getuid() == 0)


async def test_rules_by_name(settings: Settings, accounts: None) -> None:
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


async def test_events(site: Any) -> None:
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
    assert accounted or "forgotten" in job.explanation


async def test_slurm_away(site: Any, order: JobRequest) -> None:
    site.slurm.jobs = [RUNNING]
    await until(lambda: jobs_of(site.client))
    taken = (await site.client.cluster()).taken
    for program in ("squeue", "scontrol", "scancel", "sbatch"):
        site.slurm.fail(program, AWAY)
    polls = len(site.slurm.calls("scontrol"))

    async def polled() -> bool:
        return len(site.slurm.calls("scontrol")) > polls + 2

    await until(polled)
    # The last picture stays, and says how old it is.
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


# Logs


async def test_logs(site: Any, order: JobRequest) -> None:
    job_id = await site.client.submit(order)
    assert (await site.client.log(job_id)).model_dump() == {"text": "", "offset": 0, "size": 0}
    log = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "output.log"
    log.write_text("grüße\n")
    log.chmod(0o644)
    part = await site.client.log(job_id, limit=3)  # ends within the ü
    assert (part.text, part.offset, part.size) == ("gr", 2, 8)
    assert (await site.client.log(job_id, offset=2)).text == "üße\n"
    assert (await site.client.log(job_id, offset=99)).model_dump() == {"text": "", "offset": 8, "size": 8}


@pytest.mark.parametrize("ending", ["", "\n"])
async def test_the_end_of_a_log_is_read_from_its_end(site: Any, order: JobRequest, ending: str) -> None:
    job_id = await site.client.submit(order)
    log = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "output.log"
    lines = [f"line {number} {'x' * (number % 211)}" for number in range(5000)]
    log.write_text("\n".join(lines) + ending)
    log.chmod(0o644)
    size = log.stat().st_size
    for count in (0, 1, 2, 1000, 4999, 5000, 9000):
        part = await site.client.log(job_id, tail=count, limit=1 << 20)
        assert part.text == "\n".join(lines[len(lines) - min(count, 5000) :]) + (ending if count else "")
        assert (part.offset, part.size) == (size, size)
    # Of an endless log without lines (a hole, here) no more is read than its end.
    with log.open("r+b") as stream:
        stream.truncate(1 << 40)
        stream.seek(0, os.SEEK_END)
        stream.write(b"\nlast words\n")
    assert (await site.client.log(job_id, tail=1)).text == "last words\n"
    assert (await site.client.log(job_id, tail=2, limit=1)).offset > 1 << 39


async def test_a_log_that_is_no_file_of_the_user_is_not_read(
    site: Any, order: JobRequest, folder: Path
) -> None:
    job_id = await site.client.submit(order)
    log = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "output.log"
    secret = folder / "secret"
    secret.write_text("secret")
    log.symlink_to(secret)
    with pytest.raises(CarmeError, match="cannot be read: Too many levels of symbolic links"):
        await site.client.log(job_id)
    log.unlink()
    os.mkfifo(log)
    os.chmod(log, 0o644)  # noqa: PTH101
    with pytest.raises(CarmeError, match="it is not a plain file"):
        await site.client.log(job_id)
    if os.getuid() == 0:
        log.unlink()
        log.write_text("of root")
        log.chmod(0o600)
        with pytest.raises(CarmeError, match="Permission denied"):
            await site.client.log(job_id)


async def test_a_batch_job_is_submitted_again_with_its_secrets_which_stay_secret(
    site: Any, request_: JobRequest
) -> None:
    command, files = sent("#!/bin/sh -e\necho hello\n", ["a b"])
    secret = request_.model_copy(
        update={"environment": {"KEY": "s3cret"}, "command": command, "files": files}
    )
    job_id = await site.client.submit(secret)
    recipe = await site.client.recipe(job_id)
    assert recipe.variables == ["KEY"] and "s3cret" not in recipe.model_dump_json()
    assert sent_script(recipe.request.command, recipe.request.files) == (
        "#!/bin/sh -e\necho hello\n",
        ["a b"],
    )
    again = await site.client.job(await site.client.resubmit(job_id))
    folder = site.home / ".local/share/carme/jobs" / again.key
    assert again.id != job_id and again.name == request_.name
    assert json.loads((folder / "environment.json").read_text()) == {"KEY": "s3cret"}
    (folder / "request.json").unlink()
    with pytest.raises(NotFound, match="submitted with is not known"):
        await site.client.resubmit(again.id)
    with pytest.raises(NotFound):
        await site.client.recipe(999)


async def test_a_script_that_is_no_utf_8_reaches_the_job_as_it_is(site: Any, request_: JobRequest) -> None:
    data = b"#!/bin/sh\nprintf 'caf\xe9'\n"
    command, files = sent(contents.from_bytes(data))
    job_id = await site.client.submit(request_.model_copy(update={"command": command, "files": files}))
    again = await site.client.resubmit(job_id)
    for number in (job_id, again):
        folder = site.home / ".local/share/carme/jobs" / (await site.client.job(number)).key
        assert (folder / "files/script").read_bytes() == data
    recipe = await site.client.recipe(again)
    assert contents.to_bytes(recipe.request.files["script"]) == data
    (site.home / "old.sh").write_bytes(data)
    assert contents.to_bytes((await site.client.script("old.sh")).text) == data


async def test_what_an_owner_wrote_into_a_request_is_checked_anew(site: Any, request_: JobRequest) -> None:
    job_id = await site.client.submit(request_)
    file = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "request.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"nodes": 99}))
    with pytest.raises(InvalidRequest, match="99 were asked for"):
        await site.client.resubmit(job_id)
    file.write_text(json.dumps(values | {"kind": "session", "image": "torch"}))
    with pytest.raises(NotFound):
        await site.client.resubmit(job_id)
    file.write_text("{")
    with pytest.raises(InvalidRequest):
        await site.client.resubmit(job_id)


async def test_a_result_is_read_like_a_log(site: Any, request_: JobRequest) -> None:
    job_id = await site.client.submit(request_)
    assert (await site.client.result(job_id)).size == 0
    folder = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key
    (folder / "result").write_text("eHl6")
    assert (await site.client.result(job_id, offset=2)).text == "l6"


async def test_a_script_is_read_as_its_user(site: Any, folder: Path) -> None:
    (site.home / "train.sh").write_text("echo hello\n")
    found = await site.client.script("train.sh")
    assert (found.path, found.text) == (str(site.home / "train.sh"), "echo hello\n")
    (site.home / "binary").write_bytes(b"\x7fELF\0\0")
    (site.home / "large").write_text("x" * 300_000)
    (folder / "of-root").write_text("secret")
    (folder / "of-root").chmod(0o600)
    (site.home / "link").symlink_to(folder / "of-root")
    for path in ("nothing.sh", "binary", "large", ".", "a\nb", "link"):
        with pytest.raises(InvalidRequest) as caught:
            await site.client.script(path)
        assert caught.value.field == "script_path" and "secret" not in str(caught.value)
    if os.getuid() == 0:
        with pytest.raises(InvalidRequest, match="Permission denied"):
            await site.client.script(str(folder / "of-root"))
    with pytest.raises(Denied):
        await site.client.script("train.sh", user="bob")


def test_a_script_that_travels_runs_as_its_first_line_says(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    hostile = ["a b", "$(echo no)", "--", "", "*"]
    python = (
        f"#!{sys.executable} -I\nimport sys\nprint(''.join(f'[{{word}}]' for word in sys.argv[1:]), end='')\n"
    )
    for text in ("#!/bin/sh\nprintf '[%s]' \"$@\"\n", "printf '[%s]' \"$@\"\n", python):
        command, files = sent(text, hostile)
        (tmp_path / "files/script").write_text(files["script"])
        done = subprocess.run(
            command, env={"CARME_JOB_FOLDER": str(tmp_path)}, capture_output=True, cwd=tmp_path
        )
        assert done.stdout.decode() == "".join(f"[{word}]" for word in hostile), done.stderr


def test_parts_of_a_log_join_to_the_whole() -> None:
    whole = "a€ß😀\n".encode() * 3 + b"\xff\xc3"
    text, offset = "", 0
    while offset < len(whole):
        part = log_part(whole[offset : offset + 5], offset, len(whole))
        if not part.text:
            break
        text, offset = text + part.text, part.offset
    assert text == "a€ß😀\n" * 3 + "\ufffd"
    assert offset == len(whole) - 1  # half a character waits for its rest


# Bad peers


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\n", "The broker does not know this method|not valid"),
        (b"{}\n", "does not know this method"),
        (b'{"method": "fly"}\n', "It knows: access, accounts_led, bring, cancel"),
        (b'{"method": 3}\n', "does not know this method"),
        (b'{"method": "job"}\n', "'job_id' is missing"),
        (b'{"method": "job", "job_id": 0}\n', "'job_id' must be at least 1, not 0"),
        (b'{"method": "job", "job_id": 1, "usr": "x"}\n', "There is no field 'usr'.*'user'"),
        (b'{"method": "submit", "request": {"nam": 1}}\n', "'name' is missing"),
        (b'{"method": "submit", "request": 3}\n', "must be a table, not 3"),
        (b'{"method": "events", "wait": NaN}\n', "not valid"),
        (b'{"method": "jobs", "user": "a\\u0000b"}\n', "may not act for"),
        (b"[" * 10000 + b"\n", "not valid"),
        (b"\xff\xfe\n", "not valid"),
        (b"GET / HTTP/1.1\r\n\r\n", "not valid"),
    ],
)
async def test_malformed_requests_get_an_answer(site: Any, line: bytes, words: str) -> None:
    error = (await raw(site, line))["error"]
    with pytest.raises(CarmeError, match=words):
        raise CarmeError(error["message"], error["remedy"])
    assert await site.client.jobs() == []


async def test_the_broker_outlives_noise(site: Any) -> None:
    import random

    noise = random.Random(1)
    for _ in range(100):
        line = bytes(noise.randrange(256) for _ in range(noise.randrange(80))).replace(b"\n", b"")
        assert (await raw(site, line + b"\n"))["error"]
    assert await site.client.jobs() == []


async def test_a_huge_request_is_refused(site: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket)
    writer.write(b"x" * (protocol.MAXIMUM_LINE + 10) + b"\n")
    answer = json.loads(await reader.readline())
    assert "longer than 1048576 bytes" in answer["error"]["message"]
    assert await reader.read() == b""
    writer.close()


async def test_a_huge_request_does_not_leave_the_client(site: Any, order: JobRequest) -> None:
    with pytest.raises(InvalidRequest, match=r"at most 1048576 are allowed. Put large values into a file"):
        await site.client.submit(order.model_copy(update={"environment": {"A": "x" * (1 << 20)}}))


@pytest.mark.parametrize("line_seconds", [0.5])
async def test_a_slow_writer_is_sent_away(site: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket)
    writer.write(b'{"method": ')
    assert "No request arrived" in json.loads(await reader.readline())["error"]["message"]
    assert await reader.read() == b""
    writer.close()


async def test_a_half_request_gets_an_answer(site: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket)
    writer.write(b'{"method": "cluster"}')
    writer.write_eof()
    assert "without a line end" in json.loads(await reader.readline())["error"]["message"]
    writer.close()


async def test_several_requests_on_one_connection(site: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(site.settings.broker.socket, limit=1 << 20)
    writer.write(b'{"method": "jobs"}\n{"method": "nope"}\n{"method": "jobs"}\n')
    answers = [json.loads(await reader.readline()) for _ in range(3)]
    assert [answer["error"] is None for answer in answers] == [True, False, True]
    writer.close()


async def test_one_user_cannot_take_all_connections(site: Any) -> None:
    cursor = (await site.client.events()).cursor
    line = json.dumps({"method": "events", "cursor": cursor, "wait": 30}).encode() + b"\n"
    streams = []
    for _ in range(16):
        streams.append(await asyncio.open_unix_connection(site.settings.broker.socket))
        streams[-1][1].write(line)
    with pytest.raises(CarmeError, match="ada has 16 connections to the broker already") as caught:
        await site.client.jobs()
    assert caught.value.code == "busy"
    site.slurm.jobs = [RUNNING]
    for reader, writer in streams:
        assert json.loads(await reader.readline())["result"]["jobs"][0]["id"] == 7
        writer.close()


async def test_many_at_once(site: Any, order: JobRequest) -> None:
    site.act("hub", trusted=True)
    ids = await asyncio.gather(*(site.client.submit(order, user="ada") for _ in range(12)))
    assert len(set(ids)) == 12
    assert sorted(job.id for job in await site.client.jobs()) == sorted(ids)


async def test_a_defect_is_one_failed_request(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr("carme.broker.jobs.Jobs.history", broken)
    with pytest.raises(CarmeError, match="The broker failed at this request") as caught:
        await site.client.history()
    assert caught.value.code == "internal"
    assert await site.client.jobs() == []


async def test_the_socket_is_for_everybody(site: Any) -> None:
    assert stat.S_IMODE(site.settings.broker.socket.stat().st_mode) == 0o666


# Clients


async def test_both_clients_have_the_same_methods_and_words(site: Any) -> None:
    client = BrokerClient(site.settings.broker.socket)
    assert await asyncio.to_thread(client.jobs) == await site.client.jobs()
    with pytest.raises(Denied, match="may not act for 'bob'"):
        await asyncio.to_thread(client.jobs, user="bob")

    def methods(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert methods(BrokerClient) == methods(AsyncBrokerClient)
    assert methods(BrokerClient) == protocol.OPERATIONS.keys() - {
        "files"
    }  # which hands the connection over: open_files


async def test_no_broker(tmp_path: Path) -> None:
    for words in ("no such file", "refused"):
        with pytest.raises(
            BrokerUnavailable, match=f"does not answer: .*{words}.*systemctl status carme-broker"
        ):
            await AsyncBrokerClient(tmp_path / "s").jobs()
        with pytest.raises(BrokerUnavailable, match=words):
            BrokerClient(tmp_path / "s").jobs()
        if words == "no such file":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(tmp_path / "s"))


@pytest.mark.parametrize("answer", [b"", b"what?\n", b'{"result": "x"}\n', b'{"result": 7'])
async def test_a_broker_that_talks_nonsense(tmp_path: Path, answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(talk, tmp_path / "s"):
        with pytest.raises(BrokerUnavailable):
            await AsyncBrokerClient(tmp_path / "s").jobs()
        with pytest.raises(BrokerUnavailable):
            await asyncio.to_thread(BrokerClient(tmp_path / "s").jobs)


async def test_which_accounts_somebody_leads(site: Any) -> None:
    assert await site.client.accounts_led() == ["physics"]
    with pytest.raises(Denied):
        await site.client.accounts_led(user="bob")
    site.act("hub", trusted=True)
    assert await site.client.accounts_led(user="bob") == []
    assert await site.client.accounts_led() == []
