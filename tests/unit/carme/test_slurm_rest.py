"""The adapter to slurmrestd reports the same as Slurm's commands, and says in a sentence what is wrong.

Both answer what a Slurm and its slurmrestd answered at the same moment of jobs of all kinds: 24.11 in the
versions v0.0.42 and v0.0.41 of its answers (slurm_rest_24_11.json), 26.05 in v0.0.43
(slurm_rest_26_05.json).
"""

import asyncio
import json
import os
import socket as sockets
import ssl
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import real_nginx
from free_ports import free_port
from pydantic import ValidationError

from carme.broker.submission import Submissions
from carme.config import Settings
from carme.errors import NotFound, SlurmError
from carme.jobs import JobRequest, JobState, Share
from carme.launch.spec import JobSpec
from carme.slurm import Order, SlurmCommands, UnixAccount, parsing
from carme.slurm.folder import job_folder
from carme.slurm.rest import RestServer, SlurmRest, server
from carme.slurm.selection import choose, opened
from carme.translation import translated
from patience import HANG

from .conftest import PYTHON
from .rest_server import NO_SUCH_URL, RECORDED, TOKEN, RecordedRest, serving

HERE = Path(__file__).parent
KEY = "0123456789abcdef" * 2
#: An answer that breaks off in the middle.
CUT = b'{"job_id": 77, "step_id": "batch", "errors": [], "warnings": []}'


@pytest.fixture
def socket(folder: Path) -> Path:
    return folder / "slurmrestd.socket"


@pytest.fixture
def token_file(folder: Path) -> Path:
    file = folder / "token"
    file.write_text(f"SLURM_JWT={TOKEN}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def rest(socket: Path) -> Iterator[RecordedRest]:
    rest = RecordedRest()
    with serving(rest, socket):
        yield rest


@pytest.fixture
def slurm(rest: RecordedRest, socket: Path, token_file: Path) -> SlurmRest:
    return SlurmRest(RestServer(str(socket), token_file), PYTHON, "try", "gpu")


def commands_of(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    """What the commands printed at the same moment."""
    (tmp_path / "slurm_24_11.json").symlink_to(HERE / f"slurm_rest_{release}.json")
    for name in ("squeue", "scontrol", "sinfo"):
        (tmp_path / name).write_text(f"#!{sys.executable} -IS\n{(HERE / 'recorded_commands.py').read_text()}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return SlurmCommands(cluster="try")


async def snapshot(slurm: SlurmCommands) -> dict[str, Any]:
    """Everything that the adapter reads, field by field, but for what slurmrestd does not report."""
    cluster = await slurm.cluster()
    return {
        "jobs": [job.model_dump() for job in sorted(await slurm.queue(), key=lambda job: job.id)],
        "nodes": [dict(node) for node in cluster.nodes],
        "partitions": [row.model_dump(exclude={"hidden", "suspends"}) for row in cluster.partitions],
        "reservations": [row.model_dump() for row in await slurm.reservations()],
        "licences": [row.model_dump() for row in await slurm.licences()],
    }


# What it reads


@pytest.mark.parametrize(
    ("release", "version"),
    [("24_11", "v0.0.42"), ("24_11", "v0.0.41"), ("26_05", "v0.0.43"), ("26_05", "v0.0.44")],
)
async def test_slurmrestd_reads_the_same_as_the_commands(
    *,
    rest: RecordedRest,
    slurm: SlurmRest,
    release: str,
    version: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = commands_of(release, tmp_path, monkeypatch)
    rest.version = version
    rest.recorded = json.loads((HERE / f"slurm_rest_{release}.json").read_text())["rest"]
    wanted, found = await snapshot(commands), await snapshot(slurm)
    for kind in wanted:
        assert found[kind] == wanted[kind]
    states = {job["state"] for job in found["jobs"]}
    assert states >= {JobState.SUSPENDED, JobState.NODE_FAIL, JobState.CANCELLED, JobState.TIMEOUT}


async def test_exit_statuses_are_read(slurm: SlurmRest) -> None:
    assert await slurm.exit_statuses([1, 2, 3, 999]) == {1: (3, 0), 2: (0, 0), 3: (0, 9)}


async def test_the_pulse_changes_with_a_job_and_not_by_itself(rest: RecordedRest, slurm: SlurmRest) -> None:
    first = await slurm.pulse()
    jobs = json.loads(json.dumps(RECORDED["rest"]["v0.0.42"]["jobs"]))
    jobs["jobs"][0]["last_sched_evaluation"]["number"] += 7
    jobs["last_update"]["number"] += 7
    rest.answers["jobs/"] = (200, json.dumps(jobs).encode())
    assert await slurm.pulse() == first
    jobs["jobs"][0]["job_state"] = ["RUNNING", "COMPLETING"]
    rest.answers["jobs/"] = (200, json.dumps(jobs).encode())
    assert await slurm.pulse() != first
    assert (await slurm.queue())[0].state is JobState.COMPLETING


async def test_what_users_see_is_requested_as_them(
    rest: RecordedRest, slurm: SlurmRest, accounts: None
) -> None:
    ada = UnixAccount.named("ada")
    assert await slurm.visible_jobs([1, 2, 999], ada) == {1, 2}
    assert "gpu" in await slurm.visible_partitions(ada)
    assert {(request.user, request.token) for request in rest.requests} == {("ada", TOKEN)}


def association(user: str, account: str, partition: str, most: int | None, default: bool) -> dict[str, Any]:
    """What slurmrestd reports of one, as far as it is read."""
    total = {"set": most is not None, "infinite": most is None, "number": most or 0}
    return {
        **{"account": account, "partition": partition, "user": user, "is_default": default},
        **{"qos": ["normal"], "default": {"qos": ""}, "max": {"jobs": {"total": total}}},
    }


async def test_associations_are_those_of_sacctmgr(rest: RecordedRest, slurm: SlurmRest) -> None:
    rows = [association("ada", "carme", "", None, True), association("ada", "poor", "long", 0, False)]
    answer = json.dumps({"associations": rows, "errors": []}).encode()
    rest.answers["dbassociations/?user=ada&cluster=try"] = (200, answer)
    output = "ada|carme|carme||normal||\nada|carme|poor|long|normal||0\n"  # by sacctmgr, of the same
    assert await slurm.associations("ada") == parsing.associations(output, "ada")
    assert await slurm.has_association("ada")
    nobody = json.dumps({"associations": [], "errors": []}).encode()
    rest.answers["dbassociations/?user=bob&cluster=try"] = (200, nobody)
    assert not await slurm.has_association("bob")


def test_a_node_under_maintenance_takes_no_jobs() -> None:
    assert not parsing.usable("IDLE+MAINTENANCE+RESERVED") and not parsing.usable("IDLE+MAINT")


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", True),
        ("IDLE+CLOUD+POWERING_DOWN", False),
        ("IDLE+DRAIN+POWERED_DOWN", False),
        ("DOWN+CLOUD+POWERED_DOWN", False),
        ("IDLE+CLOUD+NOT_RESPONDING", False),
    ],
)
def test_a_node_that_power_saving_has_switched_off_takes_jobs(state: str, usable: bool) -> None:
    assert parsing.usable(state) is usable


# What it does


def order(**values: Any) -> Order:
    request = JobRequest(
        name="train 1", kind="batch", command=["true"], minutes=30, nodes=2, gpus_per_node=1, gpu_type="a100"
    )
    return Order(KEY, request, "gpu", "carme", Share(2, 4096), JobSpec(command=["true"]), **values)


async def test_a_job_is_submitted_as_its_owner(rest: RecordedRest, slurm: SlurmRest, accounts: None) -> None:
    rest.answers["job/submit"] = (200, b'{"job_id": 77, "step_id": "batch", "errors": [], "warnings": []}')
    ada = UnixAccount.named("ada")
    assert await slurm.submit(order(after=6, constraint="big"), ada) == 77
    folder = job_folder(ada, KEY)
    assert (folder / "spec.json").exists()
    (request,) = rest.requests
    assert (request.method, request.user) == ("POST", "ada")
    job = request.body["job"]
    assert job["current_working_directory"] == str(folder)
    assert job["standard_output"] == f"{str(folder).replace('%', '%%')}/output.log"
    assert (job["minimum_nodes"], job["maximum_nodes"], job["tres_per_node"]) == (2, 2, "gres/gpu:a100:1")
    assert (job["dependency"], job["constraints"], job["shared"]) == ("afterany:6", "big", ["none"])
    assert job["memory_per_node"] == {"set": True, "infinite": False, "number": 4096}
    assert f"HOME={ada.home}" in job["environment"] and not any(TOKEN in line for line in job["environment"])
    assert "reservation" not in job and job["requeue"] is False
    assert job["script"].startswith("#!/bin/sh\nexec ")


async def test_the_folder_of_a_job_that_slurm_refuses_goes(
    rest: RecordedRest, slurm: SlurmRest, accounts: None
) -> None:
    complaint = {"description": "Batch job submission failed", "error": "Invalid partition name specified"}
    rest.answers["job/submit"] = (500, json.dumps({"errors": [complaint], "warnings": []}).encode())
    ada = UnixAccount.named("ada")
    with pytest.raises(SlurmError) as caught:
        await slurm.submit(order(), ada)
    assert caught.value.field == "partition"
    assert not job_folder(ada, KEY).exists()


class Direct:
    """Submits without a broker's records."""

    def __init__(self, slurm: SlurmRest) -> None:
        self._slurm = slurm

    async def start(self, order: Order, owner: UnixAccount) -> int:
        return await self._slurm.submit(order, owner)


async def submitted(slurm: SlurmRest, wanted: Order, owner: UnixAccount) -> int:
    """As the broker submits, which tries again without a preference that Slurm refuses."""
    nothing: Any = None
    submitter: Any = Direct(slurm)
    return await Submissions(nothing, nothing, nothing, submitter, nothing)._start(wanted, owner)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, CUT),
        (200, b'{"job_id": 77'),
        (200, b'{"errors": []}'),
        (200, b'{"job_id": 0, "errors": []}'),
        (502, b"<html>Bad gateway"),
        (504, b'{"errors": []}'),
        (500, b'{"message": "upstream timed out"}'),
    ],
)
async def test_a_job_that_slurm_may_hold_is_submitted_once_and_its_folder_stays(
    rest: RecordedRest, slurm: SlurmRest, accounts: None, status: int, body: bytes
) -> None:
    await slurm.queue()  # the version is known, and read whole
    rest.requests.clear()
    rest.cut = body == CUT
    rest.answers["job/submit"] = (status, body)
    ada = UnixAccount.named("ada")
    with pytest.raises(SlurmError, match=r"^Slurm does not answer: slurmrestd says") as caught:
        await submitted(slurm, order(prefer="copies"), ada)
    assert caught.value.code == "slurm-away"
    assert (job_folder(ada, KEY) / "spec.json").exists()
    assert [request[:2] for request in rest.requests] == [("POST", "job/submit")]


async def test_a_job_with_a_number_is_submitted_whatever_errors_stand_beside_it(
    rest: RecordedRest, slurm: SlurmRest, accounts: None
) -> None:
    why = {"error": "Requested partition configuration not available now", "error_number": 2015}
    rest.answers["job/submit"] = (500, json.dumps({"job_id": 77, "errors": [why]}).encode())
    ada = UnixAccount.named("ada")
    assert await submitted(slurm, order(prefer="copies"), ada) == 77
    assert (job_folder(ada, KEY) / "spec.json").exists()
    assert len(rest.requests) == 1


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, NO_SUCH_URL),
        (413, b"<html>Request entity too large"),
        (500, b'{"errors": [{"error": "Invalid node name specified"}]}'),
    ],
)
async def test_a_refused_job_is_submitted_again_without_its_preference(
    rest: RecordedRest, slurm: SlurmRest, accounts: None, status: int, body: bytes
) -> None:
    rest.answers["job/submit"] = (status, body)
    ada = UnixAccount.named("ada")
    with pytest.raises(SlurmError) as caught:
        await submitted(slurm, order(prefer="copies"), ada)
    assert caught.value.code == "slurm"
    assert not job_folder(ada, KEY).exists()
    assert [request.body["job"].get("prefer") for request in rest.requests] == ["copies", None]


async def test_the_folder_of_a_job_that_depends_on_an_unknown_one_goes(
    rest: RecordedRest, slurm: SlurmRest, accounts: None
) -> None:
    complaint = {"error": "Invalid job id specified", "error_number": 2017}
    rest.answers["job/submit"] = (500, json.dumps({"errors": [complaint]}).encode())
    ada = UnixAccount.named("ada")
    with pytest.raises(NotFound):
        await slurm.submit(order(after=6), ada)
    assert not job_folder(ada, KEY).exists()


async def test_an_unclear_answer_to_a_change_means_slurm_is_away(
    rest: RecordedRest, slurm: SlurmRest, accounts: None
) -> None:
    rest.answers |= {
        "job/5": (502, b"<html>Bad gateway"),
        "job/6": (200, b'{"status": [{}]}'),
    }
    changes = (slurm.set_limit("5", 25), slurm.cancel("6", UnixAccount.named("ada")))
    for change in changes:
        with pytest.raises(SlurmError) as caught:
            await change
        assert caught.value.code == "slurm-away"


def status(code: int, message: str) -> tuple[int, bytes]:
    """slurmrestd's answer to the end of a job: a success, whatever became of it."""
    error = {"string": message, "code": code, "message": message}
    return 200, json.dumps({"status": [{"error": error, "step_id": "6"}], "errors": []}).encode()


async def test_a_job_is_cancelled_as_its_owner(rest: RecordedRest, slurm: SlurmRest, accounts: None) -> None:
    ada = UnixAccount.named("ada")
    rest.answers["job/12_3"] = status(0, "No error")
    await slurm.cancel("12_3", ada)
    assert [request[:3] for request in rest.requests] == [("DELETE", "job/12_3", "ada")]
    rest.answers["job/6"] = status(2002, "Access/permission denied")
    with pytest.raises(SlurmError, match="Slurm denied access"):
        await slurm.cancel("6", ada)
    rest.answers["job/7"] = status(2017, "Invalid job id specified")
    with pytest.raises(NotFound):
        await slurm.cancel("7", ada)


async def test_jobs_and_nodes_are_changed_as_an_operator(rest: RecordedRest, slurm: SlurmRest) -> None:
    node = json.dumps({"nodes": [{"features": ["big"]}], "errors": []}).encode()
    rest.answers |= {"job/5": (200, b'{"errors": []}'), "node/n1": (200, node)}
    await slurm.set_limit("5", 25)
    await slurm.set_preference(5, "big")
    await slurm.drain_node("n1", "a disk fails")
    await slurm.resume_node("n1")
    await slurm.add_features("n1", ["big", "fast"])
    changes = [(request.path, request.body) for request in rest.requests if request.method == "POST"]
    assert changes == [
        ("job/5", {"time_limit": {"set": True, "infinite": False, "number": 25}}),
        ("job/5", {"prefer": "big"}),
        ("node/n1", {"state": ["DRAIN"], "reason": "a disk fails"}),
        ("node/n1", {"state": ["RESUME"]}),
        ("node/n1", {"features": ["big", "fast"], "features_act": ["big", "fast"]}),
    ]
    assert {request.user for request in rest.requests} == {""}


# When something is wrong


async def test_a_missing_socket_is_reported(tmp_path: Path) -> None:
    slurm = SlurmRest(RestServer(str(tmp_path / "none")))
    with pytest.raises(
        SlurmError, match=r"^Slurm does not answer: slurmrestd says '.*/none: No such file"
    ) as caught:
        await slurm.queue()
    assert caught.value.code == "slurm-away"


async def test_slurm_away_behind_slurmrestd_is_reported(rest: RecordedRest, slurm: SlurmRest) -> None:
    complaint = {"error": "Unable to contact slurm controller (connect failure)", "error_number": 1800}
    rest.answers["jobs/"] = (500, json.dumps({"jobs": [], "errors": [complaint]}).encode())
    for question in (slurm.pulse, slurm.queue):
        with pytest.raises(SlurmError, match=r"^Slurm does not answer: slurmrestd says 'Unable") as caught:
            await question()
        assert caught.value.code == "slurm-away"


async def test_a_refused_token_is_named_by_its_file_alone(
    rest: RecordedRest, slurm: SlurmRest, socket: Path
) -> None:
    rest.token = "another"
    with pytest.raises(SlurmError, match=r"does not accept the token in .*/token\. Put") as caught:
        await slurm.queue()
    assert TOKEN not in str(caught.value)
    rest.token, complaint = TOKEN, {"error": "Protocol authentication error", "error_number": 1007}
    rest.answers["jobs/"] = (511, json.dumps({"errors": [complaint]}).encode())  # to a token of an operator's
    with pytest.raises(SlurmError, match=r"does not accept the token in .*/token\. Put"):
        await slurm.queue()
    with pytest.raises(SlurmError, match=r"accepts no request without a token"):
        await SlurmRest(RestServer(str(socket))).queue()


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (TOKEN, 0o604, "other users may read it"),
        (TOKEN, 0o640, "other users may read it"),
        ("", 0o600, "it holds no token"),
        ("a b", 0o600, "it holds no token"),
    ],
)
async def test_an_unsafe_or_empty_token_file_is_refused(
    slurm: SlurmRest, token_file: Path, content: str, mode: int, reason: str
) -> None:
    write(token_file, content, mode)
    with pytest.raises(SlurmError, match=rf"is not used: {reason}\.") as caught:
        await slurm.queue()
    german = translated(caught.value.message, "de")
    assert "wird nicht verwendet: " in german and reason not in german


def write(file: Path, content: str, mode: int) -> None:
    file.write_text(content)
    file.chmod(mode)


async def test_a_missing_token_file_is_reported(slurm: SlurmRest, token_file: Path) -> None:
    os.unlink(token_file)  # noqa: PTH108  a moment
    with pytest.raises(SlurmError, match=r"cannot be read from .*: No such file"):
        await slurm.queue()


async def test_unsupported_versions_are_reported(rest: RecordedRest, slurm: SlurmRest) -> None:
    rest.version = "v0.0.38"
    with pytest.raises(SlurmError, match=r"supports none of the versions v0\.0\.41, v0\.0\.42, "):
        await slurm.queue()


async def test_another_release_is_recognised_at_the_next_request(
    rest: RecordedRest, slurm: SlurmRest
) -> None:
    jobs = await slurm.queue()
    rest.version = "v0.0.41"
    with pytest.raises(SlurmError):
        await slurm.queue()
    assert await slurm.queue() == jobs


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b'{"jobs": [{"job_id": 1}], "errors": []}', "KeyError"),
        (200, b'{"errors": []}', "TypeError"),
        (200, b'{"jobs": [', "HTTP 200"),
        (502, b"<html>Bad gateway", "HTTP 502"),
        (404, NO_SUCH_URL, "HTTP 404"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_reported(
    rest: RecordedRest, slurm: SlurmRest, status: int, body: bytes, reason: str
) -> None:
    rest.answers["jobs/"] = (status, body)
    with pytest.raises(SlurmError, match=rf"^The answer of slurmrestd cannot be read \({reason}"):
        await slurm.queue()


async def test_an_incomplete_answer_is_reported(rest: RecordedRest, slurm: SlurmRest) -> None:
    rest.cut = True
    with pytest.raises(SlurmError, match=r"^The answer of slurmrestd cannot be read \(IncompleteRead"):
        await slurm.queue()


async def test_a_server_that_never_answers_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TIMEOUT", 0.2)
    with sockets.socket(sockets.AF_UNIX) as silent:
        silent.bind(str(folder / "silent"))
        silent.listen()
        with pytest.raises(SlurmError, match=r"^Slurm does not answer: slurmrestd says 'timed out") as caught:
            await SlurmRest(RestServer(str(folder / "silent"))).queue()
    assert caught.value.code == "slurm-away"


async def test_a_server_that_stops_meanwhile_is_reported(folder: Path) -> None:
    stopped = await asyncio.start_unix_server(lambda _reader, writer: writer.close(), folder / "stopped")
    async with stopped:
        with pytest.raises(SlurmError, match=r"^Slurm does not answer: slurmrestd says '") as caught:
            await SlurmRest(RestServer(str(folder / "stopped"))).queue()
    assert caught.value.code == "slurm-away"


# Over the network


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_another_host_gets_the_token(
    tmp_path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    rest, port, tls = RecordedRest(), free_port(), None
    if scheme == "https":
        real_nginx.make_certificate(tmp_path)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(tmp_path / "site.pem", tmp_path / "site-key.pem")
    with serving(rest, port, tls):
        slurm = SlurmRest(RestServer(f"{scheme}://127.0.0.1:{port}", token_file), PYTHON, "try", "gpu")
        if tls:
            with pytest.raises(SlurmError, match="certificate"):  # which nobody vouches for
                await slurm.queue()
            assert rest.requests == []
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "site.pem"))
        assert await slurm.queue()
    assert {request.token for request in rest.requests} == {TOKEN}


# Its threads


async def test_answers_are_parsed_in_the_threads_of_its_requests(
    slurm: SlurmRest, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, read = [], json.loads

    def loads(text: str) -> Any:
        # The server of the tests parses with the same module, but in threads of its own.
        parsed.append(threading.current_thread())
        return read(text)

    monkeypatch.setattr(server, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
    await slurm.pulse()
    await slurm.queue()
    assert len(parsed) == 4  # a version that it does not know was requested, too
    assert all(thread.name.startswith("slurmrestd") for thread in parsed)


async def test_requests_run_in_threads_of_their_own(
    slurm: SlurmRest, accounts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = ThreadPoolExecutor(1)
    none.shutdown()
    monkeypatch.setattr(asyncio.get_running_loop(), "_default_executor", none)
    with pytest.raises(RuntimeError, match="after shutdown"):
        await asyncio.to_thread(int)
    assert await slurm.queue() and (await slurm.cluster()).nodes
    assert await slurm.visible_jobs([1], UnixAccount.named("ada")) == {1}


async def test_the_adapter_ends_its_threads(rest: RecordedRest, socket: Path, token_file: Path) -> None:
    wanted = settings(adapter="rest", rest_address=str(socket), rest_token_file=str(token_file))
    before = set(threading.enumerate())
    async with opened(wanted) as slurm:
        await slurm.queue()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("slurmrestd"):
            await asyncio.to_thread(thread.join, HANG)
            assert not thread.is_alive()


# Which one it is


def settings(**slurm: Any) -> Settings:
    values = {"site": {"url": "https://carme.example.org"}, "slurm": {"cluster": "try", **slurm}}
    return Settings.model_validate(values)


async def test_the_rest_adapter_is_chosen_by_setting_and_reported(
    rest: RecordedRest, socket: Path, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = settings(adapter="rest", rest_address=str(socket), rest_token_file=str(token_file))
    with caplog.at_level("INFO"):
        async with opened(wanted) as slurm:
            assert isinstance(slurm, SlurmRest) and await slurm.queue()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"Slurm is read through slurmrestd at {socket} (v0.0.42), and changed as users with a token."
    )
    rest.token = ""
    choice = await choose(settings(adapter="rest", rest_address=str(socket)))
    assert choice.sentence.endswith("and changed through its commands.")
    rest.token = "another"
    choice = await choose(wanted)
    assert (choice.adapter, choice.unwanted) == ("rest", True)
    assert choice.sentence.startswith(
        "Slurm is to be read through slurmrestd, but: slurmrestd does not accept"
    )


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"adapter": "rest"}, "no rest_address"),
        ({"rest_address": "slurm.example.org"}, "must be the path of a socket"),
        ({"rest_address": "http://slurm.example.org:6820/"}, "must be the path of a socket"),
        ({"rest_address": "http://slurm.example.org:6820"}, "needs rest_token_file"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, str], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        settings(**values)
