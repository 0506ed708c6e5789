"""Sessions that run and end: stopping, time, apps, starting again, and what owners read."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from carme.errors import InvalidRequest
from carme.sessions import ENDINGS, STATES, TRANSITIONS, Ending, SessionState
from carme.translation import translated
from carme_webui.accounts.models import User
from carme_webui.sessions.models import BEFORE, Session

from .conftest import Browser
from .fake_broker import CLUSTER, NOW, FakeBroker, make_session
from .fake_hub import FakeHub
from .session_steps import NAME, PAGE, ready, shown, start, sync_all, the_session, without_times

__all__ = ["ready"]

pytestmark = pytest.mark.usefixtures("at_once", "frozen_clock")


# --- running, stopping, ending ---------------------------------------------------------------------------


def stop(browser: Browser):
    return browser.send(f"{PAGE}stop/", f"{PAGE}stop/")


def test_stopping_asks_first(browser: Browser, ready: Session, broker: FakeBroker, hub: FakeHub) -> None:
    assert "Stop the session" in shown(browser, f"{PAGE}stop/") and the_session().state == "ready"
    assert stop(browser).status_code == 302
    assert the_session().state == "stopping"
    assert hub.called("DELETE") == [("users/alice/servers/s0123abcd", {"remove": True})]
    sync_all()
    assert the_session().state == "stopping", "the broker still has it as ready"
    broker.publish(make_session(NAME, "ended", 8, ending="stopped", sentence="You stopped this session."))
    sync_all()
    assert (the_session().label, the_session().sentence) == ("Stopped", "You stopped this session.")
    assert not broker.requests_of("cancel"), "the hub did it"
    sync_all(seconds=11)
    assert the_session().settled
    calls = len(hub.calls)
    sync_all(seconds=11)
    assert len(hub.calls) == calls, "an old session costs nothing"


def test_a_stop_that_the_hub_lost_is_requested_again(
    browser: Browser, ready: Session, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.down = True
    stop(browser)
    hub.down = False
    sync_all(seconds=1)
    assert len(hub.called("DELETE")) == 1, "two requests at once disturb each other"
    sync_all(seconds=11)
    assert len(hub.called("DELETE")) == 2 and not hub.servers


def test_a_slow_stop_is_waited_for(
    browser: Browser, ready: Session, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.stops = "slow"
    stop(browser)
    broker.published.clear()
    sync_all(seconds=11)
    assert the_session().state == "stopping"


def test_stopping_a_job_that_the_hub_does_not_know_cancels_it(
    browser: Browser, ready: Session, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.servers.clear()
    stop(browser)
    assert [(request.job_id, request.user) for request in broker.requests_of("cancel")] == [(7, "alice")]
    sync_all()
    assert (the_session().state, the_session().ending) == ("ended", "stopped")


def test_a_session_can_be_stopped_before_it_has_a_job(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "pending"
    start(browser)
    stop(browser)
    assert (the_session().state, the_session().ending) == ("ended", "stopped")
    assert "before it had begun" in shown(browser)
    assert (
        translated(the_session().sentence, "de")
        == "Sie haben diese Sitzung beendet, bevor sie begonnen hatte."
    )
    assert not hub.servers


def test_a_session_can_be_stopped_before_the_hub_was_queried(
    browser: Browser, broker: FakeBroker, hub: FakeHub, resume_sync
) -> None:
    start(browser)
    stop(browser)
    assert the_session().state == "stopping" and not hub.calls
    resume_sync()
    sync_all()
    assert (the_session().state, the_session().ending) == ("ended", "stopped")
    assert not [path for path, _ in hub.called("POST")]


@pytest.mark.parametrize("ending", Ending)
def test_every_ending_is_shown_with_its_words(
    browser: Browser, ready: Session, broker: FakeBroker, ending: Ending
) -> None:
    broker.publish(make_session(NAME, "ended", 8, ending=ending, sentence="This is why. Do that."))
    sync_all()
    label, failed = ENDINGS[ending]
    page = shown(browser)
    assert f'state ended{" failed" if failed else ""}">{label}</span> This is why. Do that.' in page
    assert label in shown(browser, "/")
    assert "/jupyter/user/" not in page


def test_a_later_and_better_sentence_is_taken_over(ready: Session, broker: FakeBroker) -> None:
    broker.publish(make_session(NAME, "ended", 8, ending="died", sentence="The job failed."))
    sync_all()
    broker.publish(make_session(NAME, "ended", 8, ending="home_not_writable", sentence="Your home is full."))
    sync_all()
    assert (the_session().ending, the_session().sentence) == ("home_not_writable", "Your home is full.")


def test_a_lost_session_says_so_and_may_come_back(
    browser: Browser, ready: Session, broker: FakeBroker
) -> None:
    broker.publish(make_session(NAME, "lost", 8, sentence="Node n1 does not answer."))
    sync_all()
    page = shown(browser)
    assert "Out of reach" in page and "Node n1 does not answer." in page
    assert "/jupyter/user/" not in page and 'id="stop"' in page
    broker.publish(make_session(NAME, "ready", 8))
    sync_all()
    assert the_session().state == "ready" and "Node n1" not in shown(browser)


def test_the_hub_is_not_queried_about_sessions_that_run(ready: Session, hub: FakeHub) -> None:
    before = len(hub.calls)
    for _ in range(5):
        sync_all(seconds=60)
    assert len(hub.calls) == before


def test_a_broker_that_is_silent_leaves_nothing_shown_as_certain(
    browser: Browser, ready: Session, broker: FakeBroker, folder
) -> None:
    assert "uncertain" not in shown(browser)
    (folder / "broker.sock").rename(folder / "away.sock")
    sync_all()
    page = shown(browser)
    assert "state ready uncertain" in page and "Last known state, from" in page
    assert "state ready uncertain" in shown(browser, "/")
    (folder / "away.sock").rename(folder / "broker.sock")
    sync_all()
    assert "uncertain" not in shown(browser)


@pytest.mark.usefixtures("frozen_clock")
def test_while_slurm_is_silent_nothing_is_shown_as_certain(
    browser: Browser, ready: Session, broker: FakeBroker
) -> None:
    assert "has not answered" not in shown(browser, "/")
    broker.cluster = CLUSTER.model_copy(update={"taken": timezone.now() - timedelta(minutes=3)})
    for page in (PAGE, "/"):
        assert "Slurm has not answered for 3 minutes." in shown(browser, page)
        assert "state ready uncertain" in shown(browser, page)
    # The broker looks at the nodes every half minute, so that much age is no sign of anything.
    broker.cluster = CLUSTER.model_copy(update={"taken": timezone.now() - timedelta(seconds=35)})
    assert "has not answered" not in shown(browser, "/")


# --- time ------------------------------------------------------------------------------------------------


def runs_until(broker: FakeBroker, minutes: float, **fields: object) -> None:
    """The session was given 60 minutes, and so many are left."""
    ends = timezone.now() + timedelta(minutes=minutes)
    reported = make_session(NAME, "ready", 8, ends=ends, **fields)
    marks = tuple(
        mark.model_copy(update={"at": ends - timedelta(minutes=60)}) if mark.step == "allocated" else mark
        for mark in reported.marks
    )
    broker.publish(reported.model_copy(update={"marks": marks}))
    sync_all()


def title(page: str) -> str:
    return re.findall(r"<title>(.*?)</title>", page)[0]


@pytest.mark.usefixtures("frozen_clock")
@pytest.mark.parametrize(
    ("minutes", "level", "words", "heading"),
    [
        (45.5, "", "46 minutes left", "Ready"),
        (14.5, "near", "15 minutes left", "15 minutes left"),
        (4.4, "urgent", "5 minutes left", "5 minutes left"),
        (0.5, "urgent", "less than a minute left", "less than a minute left"),
        (-1, "urgent", "less than a minute left", "less than a minute left"),
    ],
)
def test_the_remaining_time_is_shown_with_its_warnings(
    browser: Browser, ready: Session, broker: FakeBroker, minutes: float, level: str, words: str, heading: str
) -> None:
    runs_until(broker, minutes)
    page = shown(browser)
    assert words in page and words in shown(browser, "/")
    assert f'class="remaining {level}"' in page
    assert ('role="alert"' in page) is bool(level)
    assert f'max="100" value="{max(0, round(minutes * 100 / 60))}"' in page
    assert title(page).startswith(f"{heading} · My run")
    assert title(shown(browser, f"{PAGE}live/")) == title(page), "the title follows with the page"


@pytest.mark.usefixtures("frozen_clock")
def test_an_idle_session_is_warned_before_it_is_stopped(
    browser: Browser, ready: Session, broker: FakeBroker
) -> None:
    runs_until(broker, 45, stops_idle=timezone.now() + timedelta(minutes=9.5))
    page = shown(browser)
    assert "Nothing runs in it: it is stopped in 10 minutes" in page and "45 minutes left" in page
    assert title(page).startswith("10 minutes left")


def test_a_session_is_extended(browser: Browser, ready: Session, broker: FakeBroker) -> None:
    runs_until(broker, 4)
    answer = browser.send(PAGE, f"{PAGE}extend/", minutes="120")
    assert answer.status_code == 302
    (request,) = broker.requests_of("extend")
    assert (request.job_id, request.minutes, request.user) == (7, 120, "alice")
    page = without_times(shown(browser))
    # Slurm gave its job 60 minutes.
    assert "The session now ends at 20 Nov, 15:00 UTC." in page, "it may be tomorrow"
    reported = the_session().last_reported
    assert reported is not None and reported.ends == NOW + timedelta(hours=3)


def test_a_refused_extension_says_why(browser: Browser, ready: Session, broker: FakeBroker) -> None:
    runs_until(broker, 4)
    broker.refusal = InvalidRequest("A booking of <others> follows at 13:00.", "Ask for at most 20 minutes.")
    browser.send(PAGE, f"{PAGE}extend/", minutes="60")
    page = shown(browser)
    assert "A booking of &lt;others&gt; follows at 13:00. Ask for at most 20 minutes." in page


@pytest.mark.parametrize("minutes", ["", "0", "-5", "x", "601", "9" * 5000, "1e3", "1\n2"])
def test_an_invalid_time_to_add_is_refused(
    browser: Browser, ready: Session, broker: FakeBroker, minutes: str
) -> None:
    runs_until(broker, 4)
    browser.send(PAGE, f"{PAGE}extend/", minutes=minutes)
    assert not broker.requests_of("extend")
    assert "must be a number of minutes from 1 to 600" in shown(browser)


def test_a_session_that_is_over_cannot_be_extended(
    browser: Browser, ready: Session, broker: FakeBroker
) -> None:
    broker.publish(make_session(NAME, "ended", 8, ending="finished"))
    sync_all()
    assert 'id="extend"' not in shown(browser)
    browser.send("/", f"{PAGE}extend/", minutes="60")
    assert not broker.requests_of("extend")
    assert "does not run" in shown(browser)


def test_extending_is_offered_where_the_partition_allows_it(
    browser: Browser, ready: Session, broker: FakeBroker, settings
) -> None:
    runs_until(broker, 30)
    assert 'id="extend"' in shown(browser)
    policy = type(settings.SITE).model_validate(
        settings.SITE.model_dump() | {"partitions": {"gpu": {"extend": False}}}
    )
    settings.SITE = policy
    assert 'id="extend"' not in shown(browser)


# --- what can be opened ----------------------------------------------------------------------------------

APPS = """{"name": "torch", "title": "T",
    "entry_points": {"lab": "JupyterLab", "vscode": "VS <Code>", "own": "My app"}}"""


@pytest.fixture
def apps(folder):
    manifest = folder / "images/torch.json"
    before = manifest.read_text()
    manifest.write_text(APPS)
    yield
    manifest.write_text(before)


def test_each_app_of_the_image_can_be_opened(
    browser: Browser, apps: None, broker: FakeBroker, hub: FakeHub
) -> None:
    start(browser, app="vscode")
    assert the_session().requested_options.app == "vscode"
    broker.publish(make_session(NAME, "ready", 8))
    sync_all()
    page = shown(browser)
    base = "/jupyter/user/alice/s0123abcd/"
    links = re.findall(rf'id="(open[^"]*)" href="{base}([^"]*)">([^<]*)<', page)
    assert links == [
        ("open", "vscode/", "Open VS &lt;Code&gt;"),
        ("open-lab", "lab", "Open JupyterLab"),
        ("open-own", "app/own/", "Open My app"),
    ]
    assert f'href="{base}vscode/"' in shown(browser, "/")


def test_an_app_that_the_image_lacks_is_refused(
    browser: Browser, apps: None, broker: FakeBroker, hub: FakeHub
) -> None:
    answer = start(browser, image="keras", app="vscode")
    assert answer.status_code == 422
    assert (
        "The image &#x27;keras&#x27; has no app &#x27;vscode&#x27;; it has: lab." in answer.content.decode()
    )
    assert start(browser, app="../../hub").status_code == 422
    assert not Session.objects.exists()


def test_apps_are_requested_only_where_there_is_a_choice(
    browser: Browser, broker: FakeBroker, apps: None, folder
) -> None:
    assert 'name="app"' in shown(browser, "/")
    (folder / "images/torch.json").write_text('{"name": "torch", "title": "T"}')
    assert 'name="app"' not in shown(browser, "/")


# --- again -----------------------------------------------------------------------------------------------


def test_starting_again_as_before_is_one_click(
    browser: Browser, ready: Session, broker: FakeBroker, hub: FakeHub
) -> None:
    broker.publish(make_session(NAME, "ended", 8, ending="time_limit"))
    sync_all()
    answer = browser.send(PAGE, f"{PAGE}again/", name="s11111111")
    assert (answer.status_code, answer["Location"]) == (302, "/sessions/s11111111/")
    fresh = Session.objects.get(name="s11111111")
    assert fresh.requested_options == ready.requested_options
    assert ("alice", "s11111111") in hub.servers
    again = browser.send(PAGE, f"{PAGE}again/", name="s11111111")
    assert again["Location"] == "/sessions/s11111111/" and Session.objects.count() == 2, "pressed twice"


def test_what_cannot_be_started_again_leads_to_the_filled_in_form(
    browser: Browser, ready: Session, broker: FakeBroker, hub: FakeHub
) -> None:
    broker.cluster = CLUSTER.model_copy(
        update={"nodes": [node.model_copy(update={"gpus": {"a100": 1}}) for node in CLUSTER.nodes[:2]]}
    )
    answer = browser.send(PAGE, f"{PAGE}again/", name="s11111111")
    assert answer.status_code == 422
    page = answer.content.decode()
    assert "2 were requested" in page and 'value="My run"' in page
    assert Session.objects.count() == 1


def test_several_sessions_lie_side_by_side(browser: Browser, ready: Session, broker: FakeBroker) -> None:
    sync_all(seconds=1)
    start(browser, name="s00000002", title="Another")
    broker.publish(make_session("s00000002", "queued", 2, job_id=8))
    sync_all()
    page = shown(browser, "/")
    assert page.index("Another") < page.index("My run")
    assert "Waiting in the queue" in page and "Ready" in page


# --- owners ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "live/", "stop/"])
def test_another_persons_session_does_not_exist_for_me(
    bobs_browser: Browser, ready: Session, broker: FakeBroker, hub: FakeHub, path: str
) -> None:
    assert bobs_browser.get(f"/sessions/s0123abcd/{path}").status_code == 404
    assert "My run" not in bobs_browser.get("/").content.decode()
    assert "My run" not in bobs_browser.get("/?again=s0123abcd").content.decode()


def test_another_persons_session_cannot_be_touched(
    bobs_browser: Browser, ready: Session, broker: FakeBroker, hub: FakeHub
) -> None:
    for action in ("stop", "extend", "again"):
        assert bobs_browser.send("/", f"{PAGE}{action}/", minutes="60").status_code == 404
    assert the_session().state == "ready" and not hub.called("DELETE") and not broker.requests_of("extend")
    assert Session.objects.count() == 1


def test_an_ended_session_can_be_started_again_as_it_was(
    browser: Browser, ready: Session, broker: FakeBroker
) -> None:
    page = browser.get("/?again=s0123abcd").content.decode()
    assert 'value="My run"' in page and 'name="gpus_per_node" value="2"' in page


# --- the table of states ---------------------------------------------------------------------------------


@pytest.mark.parametrize("start_state", SessionState)
@pytest.mark.parametrize("to", SessionState)
def test_the_portal_itself_goes_only_where_the_table_leads(
    alice, start_state: SessionState, to: SessionState
) -> None:
    session = Session.objects.create(name="s00000000", owner=alice, options={}, state=start_state)
    allowed = to in TRANSITIONS[start_state]
    assert session.move(to, sentence="why") is allowed
    assert session.state == (to if allowed else start_state)


@pytest.mark.parametrize("start_state", SessionState)
@pytest.mark.parametrize("to", SessionState)
def test_the_brokers_word_holds_as_far_as_the_table_leads(
    alice, start_state: SessionState, to: SessionState
) -> None:
    session = Session.objects.create(name="s00000000", owner=alice, options={}, state=start_state)
    session.follow(make_session("s00000000", to))
    leads_there = start_state in BEFORE[to] or start_state == to
    assert session.state == (to if leads_there else start_state)
    assert session.last_reported is not None and session.last_reported.state == to


def test_what_is_over_stays_over_and_a_stop_is_a_stop() -> None:
    assert all(SessionState.ENDED not in before for before in BEFORE.values())
    assert [to for to in SessionState if SessionState.STOPPING in BEFORE[to]] == [SessionState.ENDED]
    assert set(BEFORE[SessionState.ENDED]) == set(SessionState) - {SessionState.ENDED}


@pytest.mark.parametrize("state", SessionState)
def test_every_state_has_a_page(browser: Browser, ready: Session, broker: FakeBroker, state) -> None:
    Session.objects.update(state=state, ending="finished" if state == "ended" else "")
    assert ("Finished" if state == "ended" else STATES[state]) in shown(browser)
    assert ("/jupyter/user/" in shown(browser)) is (state == "ready")
    assert shown(browser, "/")


def test_free_gpus_leave_out_nodes_that_take_no_jobs(browser: Browser, broker: FakeBroker) -> None:
    page = browser.get("/").content.decode()
    assert "3 of 8 free" in page


def test_the_partition_is_requested_only_where_there_is_a_choice(
    browser: Browser, broker: FakeBroker
) -> None:
    assert 'name="partition"' in browser.get("/").content.decode()
    broker.cluster = CLUSTER.model_copy(update={"partitions": CLUSTER.partitions[:1]})
    assert 'name="partition"' not in browser.get("/").content.decode()


@pytest.mark.parametrize(
    ("name", "written"), [("x@lab.org", "x@lab.org"), ("a+b", "a%2Bb"), ("anna.maria", "anna.maria")]
)
def test_an_address_has_the_name_as_jupyterhub_writes_it(name: str, written: str) -> None:
    session = Session(owner=User(username=name), name=NAME)
    assert session.address("lab") == f"/jupyter/user/{written}/{NAME}/lab"
