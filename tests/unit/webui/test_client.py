"""`carme.Client` and the commands that use it, over HTTP against the portal."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

import carme
from carme.cli import main
from carme.client import JobFailed, Login, Unreachable
from carme.errors import BrokerUnavailable, ConfigError, Denied, InvalidRequest, NotFound
from carme.jobs import JobState, contents
from carme_webui.accounts.models import User
from carme_webui.api.models import SCOPES, Token
from carme_webui.jobs.models import Job
from carme_webui.profile.notices import tell
from carme_webui.projects.models import Membership, Project
from patience import HANG

from .fake_broker import NOW, FakeBroker, make_job

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def token(transactional_db: None) -> str:
    alice = User.objects.create_user("alice", password="x")
    return Token.make(alice, "t", list(SCOPES), timezone.now() + timedelta(days=1))[1]


@pytest.fixture
def client(live_server: Any, token: str) -> Iterator[carme.Client]:
    with carme.Client(live_server.url, token) as found:
        yield found


@pytest.fixture
def run(broker: FakeBroker, tmp_path: Path) -> Callable[..., int]:
    """Runs a submitted job, or a task, here with its own command and files, and tells Slurm's end of it."""

    def run(job_id: int, task: int | None = None, **more: str) -> int:
        request, folder = broker.wanted[job_id], tmp_path / f"{job_id}-{task}"
        (folder / "files").mkdir(parents=True)
        for name, text in request.files.items():
            (folder / "files" / name).write_bytes(contents.to_bytes(text))
        environment = {"CARME_JOB_FOLDER": str(folder), "PATH": "/usr/bin:/bin", **more}
        if task is not None:
            environment["SLURM_ARRAY_TASK_ID"] = str(task)
        done = subprocess.run(request.command, env=environment, cwd="/", capture_output=True, check=False)
        number = job_id if task is None else 1000 * job_id + task
        broker.logs[number] = done.stdout + done.stderr
        if (folder / "result").exists():
            broker.results[number] = (folder / "result").read_bytes()
        state = JobState.COMPLETED if done.returncode == 0 else JobState.FAILED
        over = broker.queue[job_id].model_copy(
            update={"id": number, "state": state, "ended": NOW, "exit_code": done.returncode}
        )
        if task is not None:
            over = over.model_copy(update={"task": task, "tasks": ""})
        broker.put(over)
        Job.store([over])
        return done.returncode

    return run


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
    (requested,) = broker.asked_for("submit")
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
    requested = broker.asked_for("log")
    assert len(requested) == 5 and not any(one.offset < 1 << 25 for one in requested if one.tail is None)


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


def test_another_version_of_python_is_a_sentence(client: carme.Client, broker: FakeBroker, run: Any) -> None:
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
    (sent,) = broker.asked_for("submit")  # one array
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
    (requested,) = broker.asked_for("submit")
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


def test_a_task_that_was_cancelled_while_it_waited(client: carme.Client, broker: FakeBroker) -> None:
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


def test_results_of_a_map_with_a_task_that_was_cancelled_while_it_waited(
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
    with pytest.raises(NotFound, match=f"Job {job.id} is no array"):
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
    requested = [(one.job_id, one.task) for one in broker.asked_for("cancel")]
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
    with pytest.raises(InvalidRequest, match=r"no UTF-8: 'caf\\xe9'"):
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
    assert not broker.asked_for("submit")


def test_refusals_are_carmes_own_errors(client: carme.Client, broker: FakeBroker, live_server: Any) -> None:
    with pytest.raises(InvalidRequest, match="9 were asked for") as caught:
        client.submit(["true"], nodes=9)
    assert caught.value.field == "nodes"
    with pytest.raises(NotFound):
        client.jobs.get(12345)
    with carme.Client(live_server.url, "carme_wrong") as stranger, pytest.raises(Denied, match="valid token"):
        stranger.profile()
    with pytest.raises(ConfigError, match="https"):
        carme.Client("http://carme.example.org", "x")
    with (
        carme.Client("http://127.0.0.1:9", "x") as nobody,
        pytest.raises(Unreachable, match="does not answer"),
    ):
        nobody.profile()


def test_a_broker_that_is_away(client: carme.Client) -> None:
    with pytest.raises(BrokerUnavailable):
        client.cluster()


def test_lists_are_read_to_their_end(client: carme.Client) -> None:
    Job.store(
        make_job(number, state="COMPLETED", name="old" if number % 2 else "new") for number in range(1, 451)
    )
    assert [job.id for job in client.jobs.list(limit=None)] == list(range(450, 0, -1))
    assert len(client.jobs.list(limit=210)) == 210
    assert [job.id for job in client.jobs.list(q="old", limit=2)] == [449, 447]


def test_sessions_and_bookings(
    client: carme.Client, broker: FakeBroker, hub: Any, at_once: None, settings: Any
) -> None:
    rules = settings.SITE.bookings.model_copy(update={"enabled": True, "share_percent": 100})
    settings.SITE = settings.SITE.model_copy(update={"bookings": rules})
    session = client.sessions.start(
        "torch", minutes=30, title="from a program", stage=["ram:/data/x"], results="/scratch/r"
    )
    options = session.info().options
    assert [(one.source, one.target) for one in options.stage] == [("/data/x", "ram")]
    assert options.results == "/scratch/r"
    with pytest.raises(InvalidRequest, match="no dataset 'nothing'") as caught:
        client.sessions.start("torch", minutes=30, stage=["nothing"])
    assert caught.value.field == "stage"
    assert [one.name for one in client.sessions.list()] == [session.name]
    session.stop()
    assert session.state in ("stopping", "ended")
    (kind,) = client.bookings.kinds()
    wish = {"gpu_type": kind.gpu_type, "gpus": kind.gpus, "partition": kind.partition, "minutes": 60}
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=3)
    slots = client.bookings.free_slots(start=start, **wish)
    booking = client.bookings.create(start=slots[0].start, title="mine", **wish)
    assert booking.change(minutes=90).minutes == 90
    assert [one.name for one in client.bookings.usable()] == [booking.name]
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
    with carme.Client(client.connection.url, secret) as other:
        taken = other.bookings.get(booking.name)
        assert taken.accept().owner == "bob"
        with pytest.raises(NotFound):
            booking.info()
        taken.offer("alice")
    assert booking.info().stage == [] and booking.decline().offered_to == ""
    with carme.Client(client.connection.url, secret) as other:
        other.bookings.get(booking.name).delete()
        assert other.bookings.get(booking.name).info().state == "ended"


def test_my_projects(client: carme.Client, settings: Any) -> None:
    alice, bob = User.objects.get(username="alice"), User.objects.create_user("bob")
    vision = Project.objects.create(name="vision", title="Computer vision", gpus=8, used={"gpu_hours": 2.5})
    Project.objects.create(name="secret", title="Not Alice's")
    Membership.objects.create(project=vision, user=alice, manager=True)
    Membership.objects.create(project=vision, user=bob)
    (one,) = client.projects()
    assert (one.name, one.account, one.gpus, one.gpu_hours) == ("vision", "carme-vision", 8, None)
    assert one.manager and one.managers == ["alice"] and one.members == ["alice", "bob"]
    assert (one.gpu_hours_used, one.gpu_hours_booked) == (2.5, 0)


def test_a_booking_with_its_session_and_data_by_command(
    elsewhere: Any, broker: FakeBroker, settings: Any, capsys: Any
) -> None:
    rules = settings.SITE.bookings.model_copy(update={"enabled": True, "share_percent": 100})
    settings.SITE = settings.SITE.model_copy(update={"bookings": rules})
    start = (datetime.now() + timedelta(hours=3)).isoformat(timespec="minutes")
    words = ["bookings", "create", "--partition", "gpu", "--gpu-type", "a100", "--gpus", "4", "--time", "1h"]
    words += ["--start", start, "--image", "torch", "--stage", "/data/x", "--stage", "/data/y"]
    made = elsewhere(*words)
    assert made["session_image"] == "torch" and [one["name"] for one in made["stage"]] == ["x", "y"]
    assert elsewhere("bookings", "session", made["name"])["stage"] == []
    assert elsewhere("bookings", "delete", made["name"])
    wrong = [*words[:-4], "--image", "no-such"]
    capsys.readouterr()
    assert main(wrong) == 1 and "no-such" in capsys.readouterr().err
    assert elsewhere("bookings", "list") == [], "half of what was asked for is not kept"


# --- the commands ----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(
    live_server: Any, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[..., Any]:
    """A computer that is not the cluster's, signed in; runs a command and gives its JSON."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("carme.cli.portal.is_remote", lambda: True)
    Login().write(live_server.url, token)

    def command(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return command


def test_the_commands_work_from_elsewhere(
    elsewhere: Any, broker: FakeBroker, run: Any, tmp_path: Path, capsys: Any
) -> None:
    script = tmp_path / "hello.sh"
    script.write_text("echo hello\n")
    capsys.readouterr()
    assert main(["submit", "--json", str(script)]) == 0
    number = json.loads(capsys.readouterr().out)["job_id"]
    Job.store([broker.queue[number]])
    assert [job["id"] for job in elsewhere("jobs")] == [number]
    run(number)
    assert elsewhere("jobs") == [] and [job["id"] for job in elsewhere("jobs", "--history")] == [number]
    assert elsewhere("logs", str(number))["text"] == "hello\n"
    assert elsewhere("status")["nodes"] and main(["status"]) == 0
    assert "PARTITION" in capsys.readouterr().out
    assert elsewhere("bookings", "list") == []
    for group in ("session", "sessions"):
        assert elsewhere(group, "list") == []
        for action in ("stop", "show", "open"):
            assert main([group, action, "snothing1"]) == 1
            assert "not yours" in capsys.readouterr().err


def test_more_time_and_more_processors(
    elsewhere: Any, client: carme.Client, broker: FakeBroker, hub: Any, at_once: None, capsys: Any
) -> None:
    job, tasks = client.submit(["sleep", "60"]), client.array(["sleep", "60"], "0-1")
    Job.store([broker.put(broker.queue[job.id].model_copy(update={"state": JobState.RUNNING}))])
    broker.put(make_job(99, kind="batch", array_id=tasks.id, task=1))
    assert job.extend(30).minutes_limit == 30
    assert tasks[1].extend(45).minutes_limit == 45
    assert elsewhere("extend", str(job.id), "1h")["minutes_limit"] == 60
    requested = [(one.job_id, one.minutes, one.user) for one in broker.asked_for("extend")]
    assert requested == [(job.id, 30, "alice"), (99, 45, "alice"), (job.id, 60, "alice")]
    sizes = ["--cpus", "3", "--memory", "5000"]
    started = elsewhere("session", "start", "--image", "torch", "--time", "30", *sizes)
    options = started["options"]
    assert (options["cpus_per_node"], options["memory_mb_per_node"]) == (3, 5000)
    assert elsewhere("session", "show", started["name"]) == elsewhere("sessions", "list")[0]
    capsys.readouterr()
    assert main(["session", "open", started["name"]]) == 1
    assert "is not ready" in capsys.readouterr().err
    with pytest.raises(InvalidRequest, match="at most 16 processors") as caught:
        client.sessions.start("torch", minutes=30, cpus=17)
    assert caught.value.field == "cpus_per_node"


def test_arrays_from_elsewhere(elsewhere: Any, broker: FakeBroker, run: Any, capsys: Any) -> None:
    words = ["submit", "--json", "--array", "0-1%1", "--", "sh", "-c", "echo task $SLURM_ARRAY_TASK_ID"]
    assert main(words) == 0
    number = json.loads(capsys.readouterr().out)["job_id"]
    run(number, 0)
    assert main(["jobs", "--history"]) == 0
    assert f"{number}_0" in capsys.readouterr().out
    assert elsewhere("logs", f"{number}_0")["text"] == "task 0\n"
    assert elsewhere("cancel", f"{number}_1") == {"cancelled": [f"{number}_1"]}
    with pytest.raises(SystemExit):
        main(["cancel", "12_x"])
    assert "123_4" in capsys.readouterr().err


def test_a_token_that_others_may_read_is_not_used(elsewhere: Any, capsys: Any) -> None:
    login = Login()
    assert login.path.stat().st_mode & 0o777 == 0o600
    login.path.chmod(0o644)
    assert main(["jobs"]) == 1
    assert "Others may read" in capsys.readouterr().err


def test_a_computer_without_the_client_learns_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("carme.cli.portal.is_remote", lambda: True)
    monkeypatch.setitem(sys.modules, "carme.client", None)  # as when an import in it fails
    for words in (["login", "https://carme.example.org"], ["jobs"]):
        assert main(words) == 1
        assert "pip install 'carme[client]'" in capsys.readouterr().err


def test_a_login_is_tried_before_it_is_kept(
    live_server: Any, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from io import StringIO

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", StringIO("carme_wrong\n"))
    assert main(["login", live_server.url]) == 1 and not Login().exists()
    monkeypatch.setattr("sys.stdin", StringIO(f"{token}\n"))
    assert main(["login", live_server.url]) == 0
    assert "You are alice" in capsys.readouterr().out and Login().read() == (live_server.url, token)


def test_images_are_built_listed_and_deleted_from_elsewhere(
    elsewhere: Any, client: carme.Client, broker: FakeBroker, tmp_path: Path, capsys: Any
) -> None:
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("numpy\n")
    made = elsewhere("images", "build", "mine", "--requirements", str(wanted), "--base", "torch")
    assert (made["reference"], made["state"]) == ("mine@alice", "building")
    assert json.loads(broker.wanted[made["job_id"]].files["image.json"])["text"] == "numpy\n"
    with pytest.raises(TimeoutError):
        client.images.get("mine").wait(timeout=0)
    left = {"digest": f"sha256:{'0' * 64}", "size": 1, "packages": {"numpy": "2"}}
    broker.results[made["job_id"]] = json.dumps(left).encode()
    job = broker.queue[made["job_id"]]
    broker.put(job.model_copy(update={"state": JobState.COMPLETED, "ended": NOW, "exit_code": 0}))
    assert client.images.get("mine").wait(timeout=HANG).packages == {"numpy": "2"}
    listed = elsewhere("images", "list")
    assert {"torch", "mine@alice"} <= {one["name"] for one in listed["usable"]}
    assert client.submit(["true"], image="mine@alice").id
    broker.home.mkdir(exist_ok=True)
    file = Path(client.images.get("mine").info().file)
    file.parent.mkdir(parents=True)
    file.write_text("image")
    shared = elsewhere("images", "share", "mine", "--nobody", "--folder", str(tmp_path))
    assert (shared["project"], Path(shared["file"]).parent) == (None, tmp_path) and not file.exists()
    with pytest.raises(InvalidRequest, match="not in this project"):
        client.images.get("mine").share("vision", folder=str(tmp_path))
    assert elsewhere("images", "delete", "mine") == {"deleted": "mine"}
    capsys.readouterr()
    assert main(["images", "show", "mine"]) == 1
    assert elsewhere("images", "show", "torch")["packages"] == {"numpy": "2.1", "torch": "1.0"}
    with pytest.raises(InvalidRequest, match="either from requirements or"):
        client.images.build("x")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        client.images.build("x", definition=tmp_path / "nothing")


def test_data_is_named_from_elsewhere(elsewhere: Any, broker: FakeBroker, capsys: Any) -> None:
    words = ["--stage", "scratch:/data/x y", "--stage", "/data/y", "--results", "/scratch/r", "--", "true"]
    assert main(["submit", "--json", *words]) == 0
    (requested,) = broker.asked_for("submit")
    stages = [(stage.target, stage.source) for stage in requested.request.stage]
    assert stages == [("scratch", "/data/x y"), ("local", "/data/y")]
    assert requested.request.results == "/scratch/r"
    capsys.readouterr()
    assert main(["submit", "--results", "here", "--", "true"]) == 1
    assert main(["submit", "--stage", "nothing-known", "--", "true"]) == 1
    assert "nothing-known" in capsys.readouterr().err


def test_a_template_from_elsewhere_starts_what_lies_on_the_cluster(
    elsewhere: Any, broker: FakeBroker, capsys: Any
) -> None:
    words = ["--template", "jax", "--image", "torch", "--gpus", "0", "--", "/home/alice/train.py"]
    assert main(["submit", *words]) == 0
    (requested,) = broker.asked_for("submit")
    assert requested.request.command == ["carme-run", "--backend", "jax", "--", "/home/alice/train.py"]
    assert (requested.request.name, requested.request.nodes, requested.request.image) == ("jax", 2, "torch")
    capsys.readouterr()
    assert main(["submit", "--template", "jax", "--image", "torch", "train.py"]) == 1
    assert "'train.py' lies here. Copy it there" in capsys.readouterr().err
    assert main(["submit", "--template", "jax", "--", "/home/alice/train.py"]) == 1
    assert "Add --image NAME" in capsys.readouterr().err


# --- files, presets, notices, projects, administration ---------------------------------------------------


@pytest.fixture
def home(broker: FakeBroker) -> Path:
    broker.home.mkdir()
    return broker.home


def test_a_file_goes_there_and_back(client: carme.Client, home: Path, tmp_path: Path) -> None:
    here = tmp_path / "data & more.bin"
    here.write_bytes(bytes(range(256)) * 50_000)  # more than one part
    seen: list[tuple[int, int]] = []
    path = client.files.upload(here, f"{home}/", progress=lambda done, size: seen.append((done, size)))
    assert Path(path).read_bytes() == here.read_bytes() and [done for done, _size in seen] == [
        8 << 20,
        12_800_000,
    ]
    with pytest.raises(InvalidRequest, match="already"):
        client.files.upload(here, path)
    assert client.files.upload(here, path, replace=True) == path
    with pytest.raises(InvalidRequest, match="here already"):
        client.files.download(path, here)
    got = client.files.download(path, tmp_path / "back.bin")
    assert got.read_bytes() == here.read_bytes()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["back.bin", here.name]
    (entry,) = client.files.list().entries
    assert (entry.name, entry.size) == (here.name, 12_800_000)
    folder = client.files.make_folder(f"{home}/new")
    assert client.files.rename(folder, "newer") == f"{home}/newer"
    client.files.delete(f"{home}/newer")
    assert [one.name for one in home.iterdir()] == [here.name] and client.files.places()[0].path == str(home)
    assert client.files.room()[0].free > 0


def test_an_empty_file_goes_there_and_back(client: carme.Client, home: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    path = client.files.upload(tmp_path / "empty", f"{home}/")
    assert client.files.download(path, tmp_path / "back").read_bytes() == b""


def test_an_interrupted_upload_goes_on_where_it_was(
    client: carme.Client, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "data"
    here.write_bytes(b"0123456789")
    monkeypatch.setattr("carme.client.files.PART", 4)

    def interrupt(done: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.files.upload(here, f"{home}/data", progress=interrupt)
    assert not (home / "data").exists()
    seen: list[int] = []
    client.files.upload(here, f"{home}/data", progress=lambda done, size: seen.append(done))
    assert seen == [8, 10] and (home / "data").read_bytes() == b"0123456789"


def test_an_interrupted_download_goes_on_unless_the_file_has_changed(
    client: carme.Client, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "data").write_bytes(b"0123456789")
    monkeypatch.setattr("carme.client.files.CHUNK", 4)

    def interrupt(done: int, size: int) -> None:
        raise KeyboardInterrupt

    def begin() -> None:
        with pytest.raises(KeyboardInterrupt):
            client.files.download(f"{home}/data", tmp_path / "back", progress=interrupt)
        assert not (tmp_path / "back").exists()

    begin()
    seen: list[int] = []
    client.files.download(f"{home}/data", tmp_path / "back", progress=lambda done, size: seen.append(done))
    assert seen == [7, 10] and (tmp_path / "back").read_bytes() == b"0123456789"
    (tmp_path / "back").unlink()
    begin()
    (home / "data").write_bytes(b"abcdefghijkl")
    client.files.download(f"{home}/data", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"abcdefghijkl"


def test_what_cannot_be_read_or_found_is_reported(client: carme.Client, home: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        client.files.upload(tmp_path / "nothing", f"{home}/x")
    with pytest.raises(NotFound, match="no 'x'"):
        client.files.download(f"{home}/x", tmp_path / "x")
    with pytest.raises(InvalidRequest, match="does not show this folder"):
        client.files.list("/etc")


@pytest.mark.usefixtures("broker")
def test_presets_and_notices(client: carme.Client, killed: Any) -> None:
    tell(User.objects.get(username="alice"), "hello")
    client.presets.save("small", image="torch", minutes=30)
    assert [one.name for one in client.presets.list()] == ["small"]
    session = client.presets.start("small")
    assert session.info().options.minutes == 30
    client.presets.delete("small")
    with pytest.raises(NotFound, match="no preset 'small'"):
        client.presets.start("small")
    assert [one.text for one in client.notices.list(unread=True)] == ["hello"]
    client.notices.read()
    assert client.notices.list(unread=True) == []
    assert client.notices.choose("job-over", page=True, mail=True).mail
    assert {one.kind for one in client.notices.kinds()} >= {"job-over", "project"}


@pytest.mark.usefixtures("broker")
def test_projects_and_administration(client: carme.Client, live_server: Any) -> None:
    with pytest.raises(NotFound):
        client.admin.users()
    root = User.objects.create_user("root1", is_staff=True)
    User.objects.create_user("bob")
    secret = Token.make(root, "t", list(SCOPES), timezone.now() + timedelta(days=1))[1]
    with carme.Client(live_server.url, secret) as boss:
        assert boss.projects.create("vision", "Vision", "alice").managers == ["alice"]
        assert boss.projects.limit("vision", gpus=2, gpu_types={"a100": 1}).gpus == 2
        assert [one.name for one in boss.admin.users("bo")] == ["bob"]
        assert boss.admin.take_in("eve", project="vision").user.projects == ["vision"]
        assert not boss.admin.set_active("eve", False).active
        boss.admin.drain("n1", "fan")
        boss.admin.resume("n1")
        assert [one.name for one in boss.admin.nodes()] == ["n1", "n2", "n3"]
        assert boss.admin.record("gpus", who="root1", limit=1)[0].what == "vision"
        assert boss.admin.policies() and boss.admin.approvals() == [] and boss.admin.jobs() == []
        number = boss.admin.publish("Hello").number
        assert [one.title for one in boss.admin.news()] == ["Hello"]
        boss.admin.take_away(number)
        start = datetime.now(UTC) + timedelta(days=1)
        plan = boss.admin.plan_maintenance(
            "Cooling", start=start, end=start + timedelta(hours=1), nodes=["n1"]
        )
        assert boss.admin.change_maintenance(plan.name, nodes=["n2"]).node_names == ["n2"]
        boss.admin.call_off(plan.name)
        assert boss.admin.maintenance() == []
    assert client.projects.invite("vision", "bob").invited == ["bob"]
    assert client.projects.withdraw("vision", "bob").invited == []
    assert [one.name for one in client.projects()] == ["vision"] and client.projects.invitations() == []
    with pytest.raises(NotFound):
        client.projects.limit("vision", gpus=99)


@pytest.mark.usefixtures("broker")
def test_commands_of_files_projects_and_administration(
    live_server: Any, token: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CARME_URL", live_server.url)
    monkeypatch.setenv("CARME_TOKEN", token)
    (tmp_path / "here").write_text("hello")

    def seen(*words: str) -> Any:
        assert main([*words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    assert seen("files", "upload", str(tmp_path / "here"), f"{home}/") == {"path": f"{home}/here"}
    assert seen("files", "list")["entries"][0]["name"] == "here"
    assert main(["files", "list"]) == 0 and "here" in capsys.readouterr().out
    there = str(tmp_path / "there")
    assert seen("files", "download", f"{home}/here", there) == {"file": there}
    assert seen("presets", "save", "small", "--image", "torch", "--time", "30")["options"]["minutes"] == 30
    assert seen("notices", "choose", "job-over", "--page", "yes", "--mail", "no")["page"]
    assert seen("projects", "list") == [] and seen("projects", "invitations") == []
    assert main(["projects", "accept", "vision"]) == 1 and "Nobody asks you" in capsys.readouterr().err
    assert main(["admin", "users"]) == 1
    User.objects.filter(username="alice").update(is_staff=True)
    assert seen("admin", "users")[0]["name"] == "alice"
    assert seen("projects", "create", "vision", "--title", "Vision", "--manager", "alice")["name"] == "vision"
    assert seen("projects", "limit", "vision", "--gpus", "3", "--time", "2h")["minutes"] == 120
    assert seen("projects", "limit", "vision", "--gpus", "none")["gpus"] is None
    assert main(["projects", "show", "vision"]) == 0 and "carme-vision" in capsys.readouterr().out
    assert seen("admin", "record", "gpus", "--since", "2026-01-01")[0]["who"] == "alice"
    for words in (["nodes"], ["jobs"], ["approvals"], ["record"], ["policies"], ["maintenance"], ["news"]):
        assert main(["admin", *words]) == 0 and capsys.readouterr().out
    assert main(["admin", "record", "--since", "someday"]) == 1 and "is no day" in capsys.readouterr().err
    assert main(["admin", "disable", "alice"]) == 1
