"""Sessions: the form, the hub, Slurm, and what the owner reads."""

import re
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from kombu import pools

from carme_webui.celery import app as celery_app
from carme_webui.jobs.tasks import mirror_jobs
from carme_webui.sessions.models import OVER, TRANSITIONS, Event, Session, State, new_name
from carme_webui.sessions.tasks import reconcile_sessions, start_session

from .conftest import Browser
from .fake_broker import CLUSTER, NOW, FakeBroker, make_job
from .fake_hub import FakeHub

FORM = {
    "name": "s0123abcd", "title": "My run", "image": "torch", "partition": "gpu", "gpu_type": "a100",
    "gpus_per_node": "2", "nodes": "1", "minutes": "60",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("worker")


def start(browser: Browser, **fields: object):
    return browser.send("/", "/sessions/start/", **(FORM | fields))


def the() -> Session:
    return Session.objects.get()


def later(seconds: float) -> None:
    """Let that time pass for all sessions."""
    for session in Session.objects.all():
        for field in ("created", "changed", "asked", "gone"):
            if value := getattr(session, field):
                setattr(session, field, value - timedelta(seconds=seconds))
        session.save()


def rounds(*, seconds: float = 20) -> None:
    """One round of each background task, after a while."""
    later(seconds)
    mirror_jobs()
    reconcile_sessions()


@pytest.fixture
def running(browser: Browser, broker: FakeBroker, hub: FakeHub) -> Session:
    """Alice's running session with its Slurm job 7."""
    start(browser)
    broker.put(make_job(7, name=the().job_name, kind="session", started=NOW))
    mirror_jobs()
    reconcile_sessions()
    assert the().state == State.RUNNING and the().job_id == 7
    return the()


# --- starting --------------------------------------------------------------------------------------------


def test_a_start_makes_the_hubs_user_and_server(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    answer = start(browser)
    assert (answer.status_code, answer["Location"]) == (302, "/sessions/s0123abcd/")
    assert hub.users == {"alice"}
    path, body = hub.called("POST")[-1]
    assert path == "users/alice/servers/s0123abcd"
    assert body["user_options"] == {
        "image": "torch", "nodes": 1, "gpus_per_node": 2, "gpu_type": "a100", "minutes": 60,
        "partition": "gpu", "title": "My run",
    }  # fmt: skip
    assert the().state == State.RUNNING
    page = browser.get("/").content.decode()
    assert 'href="/jupyter/user/alice/s0123abcd/"' in page


def test_a_form_sent_twice_starts_one_session(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    first, second = start(browser), start(browser)
    assert first["Location"] == second["Location"]
    assert Session.objects.count() == 1
    assert len(hub.servers) == 1


def test_a_name_that_is_another_persons_gives_a_fresh_one(
    browser: Browser, other: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    start(browser)
    assert start(other)["Location"] != "/sessions/s0123abcd/"
    assert Session.objects.filter(owner__username="bob").exclude(name="s0123abcd").count() == 1


def test_a_slow_start_is_followed(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    hub.starts = "pending"
    start(browser)
    broker.put(make_job(7, name=the().job_name, state="PENDING", reason="Priority"))
    rounds(seconds=0)
    page = browser.get("/sessions/s0123abcd/live/").content.decode()
    assert the().state == State.STARTING
    assert "Waiting in the queue" in page and "higher priority are waiting in front" in page
    assert "Open" not in page

    broker.put(make_job(7, name=the().job_name, started=NOW))
    hub.set("alice", "s0123abcd", ready=True)
    rounds(seconds=0)
    page = browser.get("/sessions/s0123abcd/live/").content.decode()
    assert the().state == State.RUNNING
    assert 'href="/jupyter/user/alice/s0123abcd/"' in page
    assert "Job submitted" in page and "Job started" in page and "Slurm job 7" in page


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gpus_per_node": "5"}, "A node has at most 4 GPUs of type a100; 5 were asked for. Ask for 1 to 4."),
        ({"minutes": "601"}, "A session lasts at most 10 hours"),
        ({"minutes": "500"}, "lasts at most 8 hours"),
        ({"nodes": "3"}, "has 2 nodes; 3 were asked for"),
        ({"image": "none"}, "There is no image &#x27;none&#x27;; there are: keras and torch."),
        ({"gpu_type": "h100"}, "has no GPUs of type h100; its types are: a100."),
        ({"partition": "cpu", "gpu_type": ""}, "have no GPUs; 2 were asked for"),
        ({"partition": "x y"}, "must be 1 to 64 letters"),
        ({"title": "t" * 81}, "at most 80 characters"),
        ({"title": "a\u202eb"}, "a character that cannot be seen"),
        ({"title": "a\0b"}, "Null characters are not allowed"),
        ({"minutes": ""}, "required"),
        ({"minutes": "soon"}, "whole number"),
        ({"minutes": "9" * 5000}, "whole number"),
        ({"minutes": "9" * 100}, "must be at most"),
        ({"gpus_per_node": "-1"}, "greater than or equal to 0"),
        ({"nodes": "0"}, "greater than or equal to 1"),
        ({"nodes": "1.5"}, "whole number"),
    ],
)
def test_what_can_never_start_is_refused_with_a_sentence(
    browser: Browser, broker: FakeBroker, hub: FakeHub, fields: dict[str, str], sentence: str
) -> None:
    answer = start(browser, **fields)
    assert answer.status_code == 422
    assert sentence in answer.content.decode()
    assert not Session.objects.exists() and not hub.calls


HOSTILE = [
    "$(touch /tmp/x)", "`id`", "; rm -rf /", "a\nb", "../../etc/passwd", "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>", "%s%n", "a  b", "\U0001f9ec", "x" * 100_000, "\u202e",
    "'; DROP TABLE x; --",
]  # fmt: skip


@pytest.mark.parametrize("field", FORM)
def test_hostile_values_do_no_harm(browser: Browser, broker: FakeBroker, hub: FakeHub, field: str) -> None:
    token = browser.token("/")
    for value in HOSTILE:
        answer = browser.send_with(token, "/sessions/start/", **(FORM | {"name": new_name(), field: value}))
        assert answer.status_code in (302, 422)
        page = answer.content.decode()
        assert "<script>alert" not in page and "<img src=x" not in page
    for session in Session.objects.all():
        assert re.fullmatch(r"s[a-z0-9]{8}", session.name)
        assert session.state == State.RUNNING, "the form lets nothing through that the hub refuses"
        page = browser.get(session.get_absolute_url()).content.decode()
        assert "<script>alert" not in page and "<img src=x" not in page
    page = browser.get("/").content.decode()
    assert "<script>alert" not in page and "<img src=x" not in page
    if field in ("title", "name"):
        assert Session.objects.exists(), "what is allowed was shown"
    else:
        assert not Session.objects.exists()


def test_a_refusal_of_the_hub_is_the_sentence_on_the_page(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "refuse"
    hub.refusal = "Your account has <no> hours left. Ask your project's head."
    start(browser)
    assert the().state == State.FAILED
    page = browser.get("/sessions/s0123abcd/").content.decode()
    assert "Your account has &lt;no&gt; hours left." in page
    assert "Start again" in page


@pytest.mark.parametrize("fault", ["stopped", "unreachable", "token"])
def test_a_hub_that_does_not_serve_is_a_sentence(
    browser: Browser, broker: FakeBroker, hub: FakeHub, settings, fault: str
) -> None:
    if fault == "stopped":
        hub.down = True
    elif fault == "unreachable":
        broken = settings.SITE.hub.model_copy(update={"proxy_url": "http://127.0.0.1:1"})
        settings.SITE = settings.SITE.model_copy(update={"hub": broken})
    else:
        hub.token = "another"
    start(browser)
    assert the().state == State.FAILED
    expected = {
        "stopped": "JupyterHub is not running.",
        "unreachable": "JupyterHub cannot be reached.",
        "token": "JupyterHub refused the portal: Missing or invalid credentials.",
    }[fault]
    assert expected in browser.get("/sessions/s0123abcd/").content.decode()


def test_a_broker_that_is_down_is_a_banner_and_refuses_starts(browser: Browser, hub: FakeHub) -> None:
    answer = browser.get("/")
    assert answer.status_code == 200
    assert "The broker at" in answer.content.decode() and "does not answer" in answer.content.decode()
    answer = start(browser)
    assert answer.status_code == 422
    assert "Nothing can be started now" in answer.content.decode()
    assert not Session.objects.exists()


def test_a_queue_that_is_down_is_a_sentence(
    browser: Browser, broker: FakeBroker, hub: FakeHub, monkeypatch, tmp_path
) -> None:
    celery_app.conf.task_always_eager = False
    nowhere = celery_app.connection_for_write(url=f"redis+socket://{tmp_path}/none.sock")
    monkeypatch.setattr(celery_app.amqp, "_producer_pool", pools.producers[nowhere])
    start(browser)
    assert the().state == State.FAILED
    assert "task queue does not answer" in browser.get("/sessions/s0123abcd/").content.decode()


def test_a_start_that_fails_later_tells_the_spawners_words(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "pending"
    start(browser)
    broker.put(make_job(7, name=the().job_name, state="FAILED", exit_code=1, ended=NOW))
    broker.logs[7] = b"FATAL: no such file"
    hub.fail("alice", "s0123abcd", "The image could not be opened. Choose another one.")
    rounds()
    assert (the().state, the().sentence) == (
        State.FAILED, "The image could not be opened. Choose another one.",
    )  # fmt: skip
    assert "FATAL: no such file" in browser.get("/sessions/s0123abcd/").content.decode()
    assert not hub.servers, "the hub keeps no record of it"


def test_a_start_whose_job_dies_is_explained_by_slurm_when_the_hub_is_silent(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "pending"
    start(browser)
    broker.put(make_job(7, name=the().job_name, state="NODE_FAIL", ended=NOW))
    rounds()
    assert (the().state, the().sentence) == (State.FAILED, "A node of the job failed; start it again.")


def test_a_start_that_the_hub_gives_up_leaves_no_job(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "pending"
    start(browser)
    broker.put(make_job(7, name=the().job_name, state="PENDING", reason="Priority"))
    hub.fail("alice", "s0123abcd", "It took too long.")
    rounds()
    assert the().state == State.FAILED
    assert [(request.job_id, request.user) for request in broker.asked_for("cancel")] == [(7, "alice")]


def test_a_start_that_got_lost_is_found_out(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    hub.starts = "silent"
    start(browser)
    assert the().state == State.STARTING
    rounds()
    assert the().state == State.STARTING, "it may still be on its way"
    rounds(seconds=61)
    assert the().state == State.FAILED
    assert "interrupted" in the().sentence


def test_a_task_that_got_lost_is_queued_again(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    celery_app.conf.task_always_eager = False
    start(browser)
    assert the().state == State.REQUESTED
    celery_app.conf.task_always_eager = True
    rounds(seconds=21)
    assert the().state == State.RUNNING


def test_the_task_delivered_twice_starts_once(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    hub.starts = "pending"
    start(browser)
    start_session("s0123abcd")
    assert len([path for path, _ in hub.called("POST") if "servers" in path]) == 2, "404, then the start"


def test_a_start_that_fails_at_once_tells_the_spawners_words(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "refuse"
    hub.refusal = "Internal Server Error"
    hub.users.add("alice")
    hub.failures["alice", "s0123abcd"] = "Slurm refuses the account. Choose another one."
    start(browser)
    assert (the().state, the().sentence) == (State.FAILED, "Slurm refuses the account. Choose another one.")


# --- running, stopping, ending ---------------------------------------------------------------------------


def test_stopping_asks_first(browser: Browser, running: Session, broker: FakeBroker, hub: FakeHub) -> None:
    page = browser.get("/sessions/s0123abcd/stop/").content.decode()
    assert "Stop the session" in page and the().state == State.RUNNING
    answer = browser.send("/sessions/s0123abcd/stop/", "/sessions/s0123abcd/stop/")
    assert answer.status_code == 302
    assert the().state == State.STOPPING
    assert hub.called("DELETE") == [("users/alice/servers/s0123abcd", {"remove": True})]
    broker.leave(make_job(7, name=running.job_name, state="CANCELLED", ended=NOW))
    rounds()
    assert (the().state, the().sentence) == (State.ENDED, "You stopped this session.")


def test_a_stop_that_the_hub_lost_is_asked_for_again(
    browser: Browser, running: Session, broker: FakeBroker, hub: FakeHub
) -> None:
    browser.send("/sessions/s0123abcd/stop/", "/sessions/s0123abcd/stop/")
    hub.set("alice", "s0123abcd", ready=True)  # it came up again
    rounds(seconds=1)
    assert len(hub.called("DELETE")) == 1, "two requests at once disturb each other"
    rounds(seconds=11)
    assert len(hub.called("DELETE")) == 2


def test_stopping_before_the_hub_knew_of_it(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    celery_app.conf.task_always_eager = False
    start(browser)
    celery_app.conf.task_always_eager = True
    browser.send("/sessions/s0123abcd/stop/", "/sessions/s0123abcd/stop/")
    start_session("s0123abcd")  # the task comes late
    rounds()
    assert the().state == State.ENDED
    assert not hub.servers


@pytest.mark.parametrize(
    ("job_state", "fields", "state", "sentence"),
    [
        ("CANCELLED", {}, State.ENDED, "The job was cancelled."),
        ("TIMEOUT", {}, State.ENDED, "The job reached its time limit and was ended; ask for more time."),
        ("COMPLETED", {}, State.ENDED, "The job ended without an error."),
        ("OUT_OF_MEMORY", {}, State.FAILED, "The job used more memory than it had asked for; ask for more."),
        ("FAILED", {"exit_code": 3}, State.FAILED, "The job ended with exit code 3; its log says more."),
    ],
)
def test_a_session_that_slurm_ends_shows_the_cause(
    browser: Browser, running: Session, broker: FakeBroker, hub: FakeHub,
    job_state: str, fields: dict[str, Any], state: State, sentence: str,
) -> None:  # fmt: skip
    broker.put(make_job(7, name=running.job_name, state=job_state, ended=NOW, **fields))
    rounds(seconds=0)
    assert (the().state, the().sentence) == (state, sentence)
    assert not hub.servers, "the hub forgets the server that Slurm ended"
    assert sentence in browser.get("/").content.decode()


def test_slurms_word_counts_while_the_hub_is_down(running: Session, broker: FakeBroker, hub: FakeHub) -> None:
    hub.down = True
    broker.put(make_job(7, name=running.job_name, state="TIMEOUT", ended=NOW))
    rounds()
    assert the().state == State.ENDED


def test_a_hub_that_restarts_disturbs_no_session(running: Session, broker: FakeBroker, hub: FakeHub) -> None:
    hub.down = True
    rounds()
    assert the().state == State.RUNNING
    hub.down = False
    hub.set("alice", "s0123abcd", pending="check")
    rounds()
    assert the().state == State.RUNNING


def test_a_server_stopped_in_the_hub_ends_the_session_when_its_job_ends(
    running: Session, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.set("alice", "s0123abcd", stopped=True)
    rounds()
    assert the().state == State.RUNNING, "its job still runs"
    broker.leave(make_job(7, name=running.job_name, state="CANCELLED", ended=NOW))
    rounds()
    assert (the().state, the().sentence) == (State.ENDED, "The job was cancelled.")


def test_a_job_without_a_server_is_cancelled(running: Session, broker: FakeBroker, hub: FakeHub) -> None:
    hub.servers.clear()
    rounds()
    assert not broker.asked_for("cancel"), "it is given some time"
    rounds(seconds=31)
    assert [(request.job_id, request.user) for request in broker.asked_for("cancel")] == [(7, "alice")]
    rounds()
    assert the().state == State.ENDED


def test_a_running_session_is_not_asked_about_all_the_time(running: Session, hub: FakeHub) -> None:
    before = len(hub.calls)
    for _ in range(5):
        rounds(seconds=0)
    assert len(hub.calls) == before


# --- owners ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "live/", "stop/"])
def test_another_persons_session_does_not_exist_for_me(
    other: Browser, running: Session, broker: FakeBroker, hub: FakeHub, path: str
) -> None:
    assert other.get(f"/sessions/s0123abcd/{path}").status_code == 404
    assert "My run" not in other.get("/").content.decode()
    assert "My run" not in other.get("/?again=s0123abcd").content.decode()


def test_another_persons_session_cannot_be_stopped(
    other: Browser, running: Session, broker: FakeBroker, hub: FakeHub
) -> None:
    assert other.send("/", "/sessions/s0123abcd/stop/").status_code == 404
    assert the().state == State.RUNNING and not hub.called("DELETE")


def test_an_ended_session_can_be_started_again_as_it_was(
    browser: Browser, running: Session, broker: FakeBroker
) -> None:
    page = browser.get("/?again=s0123abcd").content.decode()
    assert 'value="My run"' in page and 'name="gpus_per_node" value="2"' in page


# --- the table of states ---------------------------------------------------------------------------------


@pytest.mark.parametrize("start_state", State)
@pytest.mark.parametrize("to", State)
def test_only_the_tables_transitions_happen(alice, start_state: State, to: State) -> None:
    session = Session.objects.create(name="s00000000", owner=alice, options={}, state=start_state)
    allowed = to in TRANSITIONS[start_state]
    assert session.move(to, "why") is allowed
    assert session.state == (to if allowed else start_state)
    assert Event.objects.count() == allowed
    assert session.is_over is (session.state in OVER)


def test_every_state_can_end() -> None:
    for state in State:
        seen, todo = set(), [state]
        while todo:
            seen.add(current := todo.pop())
            todo += [following for following in TRANSITIONS[current] if following not in seen]
        assert seen & set(OVER)


def test_free_gpus_leave_out_nodes_that_take_no_jobs(browser: Browser, broker: FakeBroker) -> None:
    page = browser.get("/").content.decode()
    assert "3 of 8 free" in page


def test_the_partition_is_asked_for_only_where_there_is_a_choice(
    browser: Browser, broker: FakeBroker
) -> None:
    assert 'name="partition"' in browser.get("/").content.decode()
    broker.cluster = CLUSTER.model_copy(update={"partitions": CLUSTER.partitions[:1]})
    assert 'name="partition"' not in browser.get("/").content.decode()


def test_time_left_is_shown(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    start(browser)
    broker.put(make_job(7, name=the().job_name, started=timezone.now(), minutes_limit=30))
    mirror_jobs()
    reconcile_sessions()
    assert "minutes left" in browser.get("/live/").content.decode()
