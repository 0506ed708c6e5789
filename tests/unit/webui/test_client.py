"""`carme.Client` over HTTP against the portal: functions, maps, jobs, sessions and bookings."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

import carme
from carme.cli import main
from carme.client import JobFailed, Unreachable
from carme.errors import BrokerUnavailable, ConfigError, Denied, InvalidRequest, NotFound
from carme.jobs import JobState, contents
from carme_webui.accounts.models import User
from carme_webui.api.models import SCOPES, Token
from carme_webui.jobs.models import Job
from carme_webui.projects.models import Membership, Project

from .client_steps import client, elsewhere, home, run, token
from .fake_broker import NOW, FakeBroker, make_job

__all__ = ["client", "elsewhere", "home", "run", "token"]

pytestmark = pytest.mark.django_db(transaction=True)


def add(first: int, second: int = 1) -> int:
    """A function of a module that the job cannot import."""
    print("adding")
    return helper(first, second)


def length(text: str) -> tuple[str, int]:
    return text[0], len(text)


def helper(first: int, second: int) -> int:
    return first + second


def fail() -> None:
    raise LookupError("nothing there")


def test_a_function_returns_its_value(client: carme.Client, broker: FakeBroker, run: Any) -> None:
    job = client.submit(add, 40, named={"second": 2}, gpus=2, nodes=1, image="torch", minutes=5)
    (requested,) = broker.requests_of("submit")
    assert (requested.user, requested.request.gpus_per_node, requested.request.name) == ("alice", 2, "add")
    assert job.state is JobState.PENDING and not job.done()
    with pytest.raises(TimeoutError, match="not over after 0"):
        job.result(timeout=0)
    assert run(job.id) == 0
    assert job.result() == 42
    assert "".join(job.logs(follow=True)) == "adding\n"


def test_a_function_that_dies_after_much_output_shows_its_end_at_once(
    client: carme.Client, broker: FakeBroker
) -> None:
    job = client.submit(add, 1)
    broker.logs[job.id] = b"x" * (1 << 26) + b"\n" + b"\n".join(b"line %d" % n for n in range(50)) + b"\n"
    Job.store([broker.put(broker.queue[job.id].model_copy(update={"state": JobState.FAILED, "ended": NOW}))])
    with pytest.raises(JobFailed) as caught:
        job.result()
    assert str(caught.value).endswith("Its last lines:\n" + "\n".join(f"line {n}" for n in range(30, 50)))
    assert "".join(job.logs(tail=2)) == "line 48\nline 49\n"
    # An endless line, as of a progress bar, too.
    broker.logs[job.id] = b"x" * (1 << 26)
    with pytest.raises(JobFailed) as caught:
        job.result()
    assert len(str(caught.value)) < 20_000
    requested = broker.requests_of("log")
    assert len(requested) == 5 and not any(
        request.offset < 1 << 25 for request in requested if request.tail is None
    )


def test_a_module_of_the_users_is_not_taken_for_the_librarys(
    client: carme.Client, run: Any, tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    job = client.submit(add, 1)
    assert run(job.id, PYTHONPATH=str(tmp_path)) == 0
    assert job.result() == 2


def test_a_function_that_raises_says_so(client: carme.Client, run: Any) -> None:
    job = client.submit(fail)
    assert run(job.id) == 1
    with pytest.raises(JobFailed, match="nothing there") as caught:
        job.result()
    assert isinstance(caught.value.__cause__, LookupError)


def test_another_version_of_python_is_reported(client: carme.Client, broker: FakeBroker, run: Any) -> None:
    job = client.submit(add, 1)
    wanted = broker.wanted[job.id]
    order = json.loads(wanted.files["function.json"]) | {"python": "3.5"}
    files = wanted.files | {"function.json": json.dumps(order)}
    broker.wanted[job.id] = wanted.model_copy(update={"files": files})
    assert run(job.id) == 1
    with pytest.raises(JobFailed, match=r"sent from Python 3\.5"):
        job.result()


def test_a_map_gives_its_results_in_order(client: carme.Client, broker: FakeBroker, run: Any) -> None:
    jobs = client.map(add, [1, 2, 3], [10, 20, 30], at_once=2, gpus=1)
    (sent,) = broker.requests_of("submit")  # one array
    assert (sent.request.array, sent.request.gpus_per_node, sent.request.name) == ("0-2%2", 1, "add")
    assert jobs.id is not None
    Job.store([broker.queue[jobs.id]])
    assert not jobs.done() and [job.state for job in jobs] == [JobState.PENDING] * 3
    with pytest.raises(TimeoutError, match="3 tasks of array"):
        jobs.results(timeout=0)
    for job in reversed(jobs):
        run(job.id, job.task)
    # The last one to start has the array's own number.
    last = broker.queue.pop(jobs.id * 1000 + 2)
    Job.objects.filter(id=last.id).delete()
    broker.results[jobs.id] = broker.results.pop(last.id)
    Job.store([broker.put(last.model_copy(update={"id": jobs.id}))])
    assert jobs.results() == [11, 22, 33] and jobs.done()
    assert "".join(jobs[0].logs()) == "adding\n"
    assert client.map(add, []).results() == []


def test_items_of_many_megabytes_travel_beside_the_request(
    client: carme.Client, broker: FakeBroker, run: Any, home: Path
) -> None:
    items = [str(number) * 4_000_000 for number in range(3)]  # the second and third part split items
    tasks = client.map(length, items, image="torch")
    (requested,) = broker.requests_of("submit")
    assert sum(map(len, requested.request.files.values())) < 200_000
    (saved,) = (home / ".local/share/carme/inputs").iterdir()
    assert saved.stat().st_size > 12_000_000 and saved.stat().st_mode & 0o077 == 0
    assert saved.parent.stat().st_mode & 0o077 == 0
    for job in tasks:
        run(job.id, job.task)
    assert tasks.results() == [("0", 4_000_000), ("1", 4_000_000), ("2", 4_000_000)]
    single = client.submit(length, "x" * 700_000)
    run(single.id)
    assert single.result() == ("x", 700_000)


def test_items_that_are_gone_are_reported(client: carme.Client, run: Any, home: Path) -> None:
    job = client.submit(length, "x" * 700_000)
    (saved,) = (home / ".local/share/carme/inputs").iterdir()
    saved.unlink()
    run(job.id)
    with pytest.raises(JobFailed, match=r"cannot be read: No such file or directory\. Submit the job anew"):
        job.result()


def test_old_items_are_removed_when_new_ones_come(client: carme.Client, home: Path) -> None:
    client.submit(length, "x" * 700_000)
    (saved,) = (home / ".local/share/carme/inputs").iterdir()
    os.utime(saved, (0, 0))
    client.submit(length, "y" * 700_000)
    (fresh,) = (home / ".local/share/carme/inputs").iterdir()
    assert fresh.name != saved.name


def test_a_task_that_was_cancelled_while_it_waited_is_reported(
    client: carme.Client, broker: FakeBroker
) -> None:
    tasks = client.array(["sleep", "60"], "0-2")
    assert tasks.id is not None
    # Of one that is cancelled before it begins, Slurm keeps nothing.
    Job.store([broker.put(broker.queue[tasks.id].model_copy(update={"tasks": "0,2"}))])
    assert [job.state for job in tasks] == [JobState.PENDING, JobState.CANCELLED, JobState.PENDING]
    tasks.infos()
    assert tasks[1].done() and not tasks.done()
    with pytest.raises(NotFound):
        client.jobs.get(tasks.id, 3)
    # The row of the array itself stays what it is.
    assert client.jobs.get(tasks.id).state is JobState.PENDING


def test_a_cancelled_task_of_a_map_is_named_with_its_reason(
    client: carme.Client, broker: FakeBroker, run: Any
) -> None:
    tasks = client.map(add, [1, 2], [10, 20])
    assert tasks.id is not None
    Job.store([broker.put(broker.queue[tasks.id].model_copy(update={"tasks": "0"}))])
    run(tasks.id, 0)
    Job.store(broker.queue.values())
    with pytest.raises(JobFailed, match=f"Job {tasks.id}_1 left no result. You cancelled this job before it"):
        tasks.results()


def test_an_array_says_which_of_its_tasks_failed(client: carme.Client, broker: FakeBroker) -> None:
    tasks = client.array(["true"], "0-5%2")
    assert tasks.id is not None
    waiting = broker.queue.pop(tasks.id)
    Job.store([waiting])
    assert (tasks.progress().sentence, tasks.progress().failed) == ("6 tasks: 6 waiting", "")
    assert tasks.progress().active and not tasks.failed()
    states = ["COMPLETED", "FAILED", "COMPLETED", "TIMEOUT", "COMPLETED", "COMPLETED"]
    for number, state in enumerate(states):
        # Slurm gives the last task to start the array's own number: the state of that one is not the whole's.
        which = tasks.id if number == 5 else 1000 + number
        ended = {"state": JobState(state), "exit_code": 0 if state == "COMPLETED" else 3, "ended": NOW}
        row = waiting.model_copy(update={"id": which, "task": number, "tasks": "", "started": NOW, **ended})
        Job.store([broker.put(row)])
    progress = tasks.progress()
    assert (progress.sentence, progress.state) == ("2 of 6 tasks failed.", JobState.FAILED)
    assert progress.states == {"COMPLETED": "0,2,4-5", "FAILED": "1", "TIMEOUT": "3"} and not progress.active
    assert [job.name for job in tasks.failed()] == [f"{tasks.id}_1", f"{tasks.id}_3"]
    whole = client.jobs.get(tasks.id).info()
    assert (whole.state, whole.explanation) == (JobState.FAILED, "2 of 6 tasks failed.")
    assert (whole.task, whole.tasks, whole.exit_code, whole.active) == (None, "0-5", None, False)
    assert client.jobs.get(tasks.id, 5).state is JobState.COMPLETED
    found = client.jobs.get_array(tasks.id)
    assert [job.task for job in found] == [0, 1, 2, 3, 4, 5] and found.done()
    again = found.resubmit_failed()
    assert [job.task for job in again] == [1, 3] and broker.wanted[again.id or 0].array == "1,3%2"


def test_a_job_that_is_no_array_has_no_tasks(client: carme.Client, broker: FakeBroker) -> None:
    job = client.submit(["true"])
    Job.store([broker.queue[job.id]])
    with pytest.raises(NotFound, match=f"Job {job.id} is not an array"):
        client.jobs.get_array(job.id)
    tasks = client.array(["true"], "0-1")
    assert tasks.id is not None
    Job.store([broker.queue[tasks.id]])
    with pytest.raises(InvalidRequest, match="No task of this array failed"):
        tasks.resubmit_failed()


def test_tasks_of_a_command_are_cancelled_alone_or_together(client: carme.Client, broker: FakeBroker) -> None:
    tasks = client.array(["sleep", "60"], "0-4:2%2", minutes=5)
    assert [job.name for job in tasks] == [f"{tasks.id}_{number}" for number in (0, 2, 4)]
    again = tasks[2].resubmit()
    assert broker.wanted[again.id].array == "4" and again.task == 4
    tasks[1].cancel()
    tasks.cancel()
    requested = [(request.job_id, request.task) for request in broker.requests_of("cancel")]
    assert requested == [(tasks.id, 2), (tasks.id, None)]
    with pytest.raises(InvalidRequest, match="gpus") as caught:
        client.submit(["true"], gpu=1)  # pyright: ignore[reportCallIssue]
    assert caught.value.field == "gpu"
    with pytest.raises(InvalidRequest) as caught:
        client.array(["true"], "5-1")
    assert caught.value.field == "array"


def test_a_script_of_this_computer_keeps_bytes_that_are_no_utf_8(
    client: carme.Client, broker: FakeBroker, run: Any, tmp_path: Path
) -> None:
    script, data = tmp_path / "old.sh", b"#!/bin/sh\n#SBATCH --time=7 --caf\xe9\nprintf 'caf\xe9'\n"
    script.write_bytes(data)
    job = client.submit(script)
    run(job.id)
    assert broker.logs[job.id] == b"caf\xe9"
    assert broker.wanted[job.id].minutes == 7
    again = job.resubmit()
    assert contents.to_bytes(broker.wanted[again.id].files["script"]) == data
    script.write_bytes("echo hello".encode("utf-16"))
    with pytest.raises(InvalidRequest, match="text in UTF-16"):
        client.submit(script)
    for wrong in ({"base64": "*"}, {"base64": 1}, {}, 7):
        with pytest.raises(InvalidRequest, match="base64") as caught:
            client.connection.ask("POST", "jobs", {"script": wrong})
        assert caught.value.field == "script"
    with pytest.raises(InvalidRequest, match=r"not UTF-8: 'caf\\xe9'"):
        client.submit(["cat", "caf\udce9"])


def test_a_script_of_this_computer_is_sent_along(client: carme.Client, run: Any, tmp_path: Path) -> None:
    script = tmp_path / "hello.sh"
    script.write_text('#!/bin/sh\necho "hello $1"\n')
    job = client.submit(script, "you there")
    run(job.id)
    assert job.result() == "hello you there\n"
    again = job.resubmit()
    run(again.id)
    assert again.result() == "hello you there\n"
    failing = client.submit(["false"])
    run(failing.id)
    with pytest.raises(JobFailed, match="left no result"):
        failing.result()


def test_what_cannot_be_sent_is_refused_here(
    client: carme.Client, broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(InvalidRequest, match="at most 700000 can be sent"):
        patch.setattr("carme.client.jobs.MAXIMUM_BYTES", 700_000)
        client.submit(add, "x" * 700_000)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        client.submit(add, broker)  # holds sockets and locks
    with pytest.raises(InvalidRequest, match="cannot be read"):
        client.submit(tmp_path / "nothing.sh")
    with pytest.raises(InvalidRequest, match="list of words"):
        client.submit(7)  # pyright: ignore[reportArgumentType]
    assert not broker.requests_of("submit")


def test_refusals_are_carmes_own_errors(client: carme.Client, broker: FakeBroker, live_server: Any) -> None:
    with pytest.raises(InvalidRequest, match="9 were requested") as caught:
        client.submit(["true"], nodes=9)
    assert caught.value.field == "nodes"
    with pytest.raises(NotFound):
        client.jobs.get(12345)
    with (
        carme.Client(live_server.url, "carme_wrong") as stranger,
        pytest.raises(Denied, match="does not accept the token"),
    ):
        stranger.profile()
    with pytest.raises(ConfigError, match="https"):
        carme.Client("http://carme.example.org", "x")
    with (
        carme.Client("http://127.0.0.1:9", "x") as nobody,
        pytest.raises(Unreachable, match="does not answer"),
    ):
        nobody.profile()


def test_a_broker_that_is_away_raises_an_error(client: carme.Client) -> None:
    with pytest.raises(BrokerUnavailable):
        client.cluster()


def test_lists_are_read_to_their_end(client: carme.Client) -> None:
    Job.store(
        make_job(number, state="COMPLETED", name="old" if number % 2 else "new") for number in range(1, 451)
    )
    assert [job.id for job in client.jobs.list(limit=None)] == list(range(450, 0, -1))
    assert len(client.jobs.list(limit=210)) == 210
    assert [job.id for job in client.jobs.list(q="old", limit=2)] == [449, 447]


def test_sessions_and_bookings_are_made_changed_and_ended(
    client: carme.Client, broker: FakeBroker, hub: Any, at_once: None, settings: Any
) -> None:
    rules = settings.SITE.bookings.model_copy(update={"enabled": True, "share_percent": 100})
    settings.SITE = settings.SITE.model_copy(update={"bookings": rules})
    session = client.sessions.start(
        "torch", minutes=30, title="from a program", stage=["ram:/data/x"], results="/scratch/r"
    )
    options = session.info().options
    assert [(data.source, data.target) for data in options.stage] == [("/data/x", "ram")]
    assert options.results == "/scratch/r"
    with pytest.raises(InvalidRequest, match="no dataset 'nothing'") as caught:
        client.sessions.start("torch", minutes=30, stage=["nothing"])
    assert caught.value.field == "stage"
    assert [listed.name for listed in client.sessions.list()] == [session.name]
    session.stop()
    assert session.state in ("stopping", "ended")
    (kind,) = client.bookings.kinds()
    proposed = {"gpu_type": kind.gpu_type, "gpus": kind.gpus, "partition": kind.partition, "minutes": 60}
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=3)
    slots = client.bookings.free_slots(start=start, **proposed)
    booking = client.bookings.create(start=slots[0].start, title="mine", **proposed)
    assert booking.change(minutes=90).minutes == 90
    assert [listed.name for listed in client.bookings.usable()] == [booking.name]
    planned = booking.start_session("torch", stage=["scratch:/data/x"], results="/home/alice/out")
    assert (planned.session_image, planned.stage[0].target) == ("torch", "scratch")
    with pytest.raises(InvalidRequest, match="no-such"):
        booking.start_session("no-such")
    with pytest.raises(InvalidRequest, match="nothing-known") as caught:
        booking.start_session("torch", stage=["nothing-known"])
    assert caught.value.field == "stage"
    assert booking.start_session(None).stage == []
    bob = User.objects.create_user("bob")
    assert booking.offer("bob").offered_to == "bob"
    with pytest.raises(NotFound):
        booking.accept()  # is bob's to say
    secret = Token.make(bob, "t", list(SCOPES), timezone.now() + timedelta(days=1))[1]
    with carme.Client(client.connection.url, secret) as bobs_client:
        taken = bobs_client.bookings.get(booking.name)
        assert taken.accept().owner == "bob"
        with pytest.raises(NotFound):
            booking.info()
        taken.offer("alice")
    assert booking.info().stage == [] and booking.decline().offered_to == ""
    with carme.Client(client.connection.url, secret) as bobs_client:
        bobs_client.bookings.get(booking.name).delete()
        assert bobs_client.bookings.get(booking.name).info().state == "ended"


def test_projects_of_the_user_are_listed(client: carme.Client, settings: Any) -> None:
    alice, bob = User.objects.get(username="alice"), User.objects.create_user("bob")
    vision = Project.objects.create(name="vision", title="Computer vision", gpus=8, used={"gpu_hours": 2.5})
    Project.objects.create(name="secret", title="Not Alice's")
    Membership.objects.create(project=vision, user=alice, manager=True)
    Membership.objects.create(project=vision, user=bob)
    (project,) = client.projects()
    assert (project.name, project.account, project.gpus, project.gpu_hours) == (
        "vision",
        "carme-vision",
        8,
        None,
    )
    assert project.manager and project.managers == ["alice"] and project.members == ["alice", "bob"]
    assert (project.gpu_hours_used, project.gpu_hours_booked) == (2.5, 0)


def test_a_booking_with_its_session_and_data_is_made_by_command(
    elsewhere: Any, broker: FakeBroker, settings: Any, capsys: Any
) -> None:
    rules = settings.SITE.bookings.model_copy(update={"enabled": True, "share_percent": 100})
    settings.SITE = settings.SITE.model_copy(update={"bookings": rules})
    start = (datetime.now() + timedelta(hours=3)).isoformat(timespec="minutes")
    words = ["bookings", "create", "--partition", "gpu", "--gpu-type", "a100", "--gpus", "4", "--time", "1h"]
    words += ["--start", start, "--image", "torch", "--stage", "/data/x", "--stage", "/data/y"]
    created = elsewhere(*words)
    assert created["session_image"] == "torch" and [data["name"] for data in created["stage"]] == ["x", "y"]
    assert elsewhere("bookings", "session", created["name"])["stage"] == []
    assert elsewhere("bookings", "delete", created["name"])
    wrong = [*words[:-4], "--image", "no-such"]
    capsys.readouterr()
    assert main(wrong) == 1 and "no-such" in capsys.readouterr().err
    assert elsewhere("bookings", "list") == [], "half of what was requested is not kept"
