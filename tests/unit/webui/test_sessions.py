"""Sessions from the form to the job: the form, the hub, and what the broker says."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from carme.jobs import LOG_FOLLOWS
from carme.sessions import QueueEstimate
from carme.translation import message
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Mirror
from carme_webui.sessions import actions
from carme_webui.sessions.models import Session, new_name

from .conftest import Browser, tend_all
from .fake_broker import NOW, FakeBroker, make_job, make_session
from .fake_hub import FakeHub
from .session_steps import FORM, NAME, PAGE, ready, shown, start, sync_all, the_session, without_times

__all__ = ["ready"]

pytestmark = pytest.mark.usefixtures("at_once", "frozen_clock")


def test_a_start_makes_the_hubs_user_and_server(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    answer = start(browser)
    assert (answer.status_code, answer["Location"]) == (302, "/sessions/s0123abcd/")
    assert hub.users == {"alice"}
    path, body = hub.called("POST")[-1]
    assert path == "users/alice/servers/s0123abcd"
    assert body["user_options"] == {
        "image": "torch", "nodes": 1, "gpus_per_node": 2, "gpu_type": "a100", "minutes": 60,
        "partition": "gpu", "account": None, "qos": None, "reservation": None, "title": "My run",
        "app": "lab", "stage": [], "results": None, "prediction": None,
        "cpus_per_node": None, "memory_mb_per_node": None, "language": "en",
    }  # fmt: skip
    assert (the_session().state, the_session().label) == ("requested", "Requested")


def test_jupyterlab_begins_in_the_language_of_the_owners_pages(
    browser: Browser, alice: User, broker: FakeBroker, hub: FakeHub
) -> None:
    browser.defaults["HTTP_ACCEPT_LANGUAGE"] = "de"
    start(browser)
    assert hub.called("POST")[-1][1]["user_options"]["language"] == "de"
    # What they have chosen in their profile comes before what the browser asks for.
    alice.language = "en"
    alice.save()
    start(browser, name="s0000000a")
    assert hub.called("POST")[-1][1]["user_options"]["language"] == "en"
    # A program that starts one by the API names no language.
    alice.language = "de"
    options = Session.objects.earliest("pk").requested_options
    assert actions.start(alice, options, "s0000000b")[0].language == "de"


def test_data_and_results_go_to_the_hub_and_wrong_words_are_refused(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    answer = start(browser, stage="tape:/data/imagenet")
    assert answer.status_code == 422 and "names the target &#x27;tape&#x27;" in answer.content.decode()
    assert "no dataset &#x27;imagenet&#x27;" in start(browser, stage="imagenet").content.decode()
    start(browser, stage="/data/imagenet, scratch:/data/labels", results="/home/alice/out")
    options = hub.called("POST")[-1][1]["user_options"]
    assert [(data["target"], data["source"]) for data in options["stage"]] == [
        ("local", "/data/imagenet"),
        ("scratch", "/data/labels"),
    ]
    assert options["results"] == "/home/alice/out"


def test_a_session_that_is_to_be_opened_says_so_on_its_page(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    answer = start(browser, then="open")
    assert answer["Location"] == f"{PAGE}?open=1"
    assert "It opens here as soon as it is ready." in shown(browser, answer["Location"])
    assert "It opens here" not in shown(browser)
    broker.publish(make_session(NAME, "ended", 8, ending="time_limit", sentence="Its time was over."))
    sync_all()
    page = shown(browser, answer["Location"])
    assert "Its time was over." in page and "It opens here" not in page


def test_a_form_sent_twice_starts_one_session(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    first, second = start(browser), start(browser)
    assert first["Location"] == second["Location"]
    assert Session.objects.count() == 1
    assert len(hub.servers) == 1


def test_a_name_that_is_another_persons_gives_a_fresh_one(
    browser: Browser, bobs_browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    start(browser)
    assert start(bobs_browser)["Location"] != "/sessions/s0123abcd/"
    assert Session.objects.filter(owner__username="bob").exclude(name="s0123abcd").count() == 1


def test_a_session_is_followed_from_the_queue_to_the_end(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "pending"
    start(browser)
    broker.publish(make_session(NAME, "queued", 2, sentence="Jobs of higher priority are in front."))
    sync_all()
    page = shown(browser)
    assert "Waiting in the queue" in page and "Jobs of higher priority are in front." in page
    assert "/jupyter/user/" not in page

    broker.publish(make_session(NAME, "starting", 4, node_list="n1"))
    sync_all()
    page = shown(browser)
    assert "Starting" in page and "Starting the container." in page
    assert "Jobs of higher priority" not in page, "what held it up is over"
    assert "/jupyter/user/" not in page, "nothing that is not known to run can be opened"

    broker.publish(make_session(NAME, "ready", 8, node_list="n1"))
    sync_all()
    page = shown(browser)
    assert 'href="/jupyter/user/alice/s0123abcd/lab"' in page
    for step in ("Submitted to Slurm", "Nodes allocated", "Container started", "First opened"):
        assert step in page
    assert re.search(r"Container started</th>.*?1\.0</td>", page, re.S)

    sentence = "It used 9 GiB of memory and was allowed 8 GiB. Ask for more GPUs."
    message = f"{sentence}{LOG_FOLLOWS}Killed"
    broker.publish(make_session(NAME, "ended", 8, ending="out_of_memory", sentence=message))
    broker.logs[7] = b"<i>Killed</i>"
    broker.put(make_job(7, state="OUT_OF_MEMORY", ended=NOW))
    sync_all()
    page = shown(browser)
    assert "Out of memory" in page and sentence in page and page.count("Killed") == 1
    assert "&lt;i&gt;Killed&lt;/i&gt;" in page and "<i>" not in page
    assert "Killed" not in shown(browser, "/")
    assert "/jupyter/user/" not in page and "Start again as before" in page


def test_states_that_passed_unseen_are_skipped(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    start(browser)
    broker.publish(make_session(NAME, "ready", 7))
    sync_all()
    assert the_session().state == "ready"


def test_what_the_broker_says_of_another_persons_job_of_that_name_does_not_count(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    start(browser)
    broker.publish(make_session(NAME, "ready", 7, owner="bob"))
    sync_all()
    assert (the_session().state, the_session().job_id) == ("requested", None)


def test_an_earlier_job_of_that_name_does_not_count(ready: Session, broker: FakeBroker) -> None:
    broker.publish(make_session(NAME, "ended", job_id=6, ending="finished"))
    sync_all()
    assert (the_session().state, the_session().job_id) == ("ready", 7)


def test_a_session_whose_job_got_a_lower_number_is_followed(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    start(browser)
    for number, state in ((7, "queued"), (5, "queued"), (5, "ready")):
        broker.publish(make_session(NAME, state, job_id=number))
        sync_all()
        assert (the_session().state, the_session().job_id) == (state, number)


@pytest.mark.parametrize(
    ("estimate", "words"),
    [
        (
            QueueEstimate(place=1, waiting=4, reason="It waits."),
            ["It is next in line", "No estimated start time yet", "It waits."],
        ),
        (
            QueueEstimate(
                place=3,
                waiting=7,
                reason="r",
                earliest=NOW,
                latest=NOW + timedelta(hours=1),
                correct=9,
                judged=10,
            ),
            [
                "It is 3rd of 7 in line",
                "between 20 Nov, 12:00 UTC and 20 Nov, 13:00 UTC",
                "9 of the last 10 estimates were right",
            ],
        ),
        (
            QueueEstimate(place=2, waiting=2, reason="", earliest=NOW, latest=NOW),
            ["2nd of 2", "about 20 Nov, 12:00 UTC."],
        ),
    ],
)
def test_while_it_waits_the_page_says_what_to_expect(
    browser: Browser, broker: FakeBroker, hub: FakeHub, estimate: QueueEstimate, words: list[str]
) -> None:
    start(browser)
    broker.publish(make_session(NAME, "queued", 2, estimate=estimate))
    sync_all()
    page = " ".join(without_times(shown(browser)).split())
    for word in words:
        assert word in page


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gpus_per_node": "5"}, "A node has at most 4 GPUs of type a100; 5 were requested. Ask for 1 to 4."),
        ({"minutes": "601"}, "A session lasts at most 10 hours"),
        ({"minutes": "500"}, "lasts at most 8 hours"),
        ({"nodes": "3"}, "has 2 nodes; 3 were requested"),
        ({"image": "none"}, "There is no image &#x27;none&#x27;; there are: keras and torch."),
        ({"gpu_type": "h100"}, "has no GPUs of type h100; its types are: a100."),
        ({"partition": "cpu", "gpu_type": ""}, "have no GPUs; 2 were requested"),
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
        assert session.state == "requested", "the form lets nothing through that the hub refuses"
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
    assert (the_session().state, the_session().ending) == ("ended", "refused")
    page = shown(browser)
    assert "Your account has &lt;no&gt; hours left." in page and "Refused" in page
    assert "Start again" in page
    sync_all(seconds=11)
    assert the_session().settled and hub.called("DELETE"), "the hub keeps no record of it"


@pytest.mark.parametrize("fault", ["stopped", "unreachable", "token"])
def test_a_hub_that_does_not_serve_is_reported(
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
    expected = {
        "stopped": "JupyterHub is not running.",
        "unreachable": "JupyterHub cannot be reached.",
        "token": "JupyterHub refused the portal: Missing or invalid credentials.",
    }[fault]
    assert expected in shown(browser)
    if fault != "token":
        assert the_session().state == "requested" and "retries for a minute" in shown(browser)
        sync_all(seconds=61)
    assert (the_session().state, the_session().ending) == ("ended", "refused")
    assert expected in shown(browser) and "retries for a minute" not in shown(browser)


def test_a_hub_that_comes_back_gets_the_start(browser: Browser, broker: FakeBroker, hub: FakeHub) -> None:
    hub.down = True
    start(browser)
    sync_all(seconds=5)
    assert the_session().state == "requested" and not hub.servers
    hub.down = False
    sync_all(seconds=5)
    assert len(hub.servers) == 1
    broker.publish(make_session(NAME, "starting", 3))
    sync_all()
    assert (the_session().state, the_session().sentence) == ("starting", "")


def test_a_broker_that_is_down_is_a_banner_and_refuses_starts(browser: Browser, hub: FakeHub) -> None:
    answer = browser.get("/")
    assert answer.status_code == 200
    assert "The broker at" in answer.content.decode() and "does not answer" in answer.content.decode()
    answer = start(browser)
    assert answer.status_code == 422
    assert "Nothing can be started now" in answer.content.decode()
    assert not Session.objects.exists()


def test_a_start_that_fails_later_reports_the_spawners_words(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "pending"
    start(browser)
    sync_all(seconds=3)
    assert the_session().state == "requested", "the hub is at it"
    hub.fail("alice", NAME, "Slurm refuses the account. Choose another one.")
    sync_all(seconds=3)
    assert (the_session().ending, the_session().sentence) == (
        "refused",
        "Slurm refuses the account. Choose another one.",
    )
    sync_all(seconds=11)
    assert not hub.servers, "the hub keeps no record of it"


def test_a_start_that_fails_at_once_reports_the_spawners_words(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "refuse"
    hub.refusal = "Internal Server Error"
    hub.users.add("alice")
    hub.failures["alice", NAME] = "Slurm refuses the account. Choose another one."
    start(browser)
    assert (the_session().ending, the_session().sentence) == (
        "refused",
        "Slurm refuses the account. Choose another one.",
    )


def test_sentences_keep_their_templates_from_the_hub_to_the_page(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "refuse"
    hub.refusal = "Internal Server Error"
    hub.users.add("alice")
    hub.failures["alice", NAME] = message("There is no account {name!r} on this host.", name="alice")
    start(browser)
    assert the_session().sentence == "There is no account 'alice' on this host."
    assert "Auf diesem Rechner gibt es kein Konto &#x27;alice&#x27;." in german(browser)
    # What the broker says is in the database as well.
    broker.publish(
        make_session(NAME, "ended", 3, ending="stopped", sentence=message("You stopped this session."))
    )
    sync_all()
    for reader, text in ((shown, "You stopped this session."), (german, "Sie haben diese Sitzung beendet.")):
        assert text in reader(browser)


def german(browser: Browser) -> str:
    """The session's page for a browser that asks for German."""
    return browser.get(PAGE, headers={"accept-language": "de"}).content.decode()


def test_once_there_is_a_job_the_broker_reports_how_it_failed(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    broker.publish(make_session(NAME, "starting", 3))
    hub.starts = "refuse"
    start(browser)
    assert the_session().state == "starting"
    broker.publish(make_session(NAME, "ended", 3, ending="died_at_start", sentence="It died: no space left."))
    sync_all()
    assert (the_session().ending, the_session().sentence) == ("died_at_start", "It died: no space left.")


def test_a_start_that_the_hub_never_got_is_requested_again(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "silent"
    start(browser)
    assert the_session().state == "requested"
    hub.starts = "pending"
    sync_all(seconds=3)
    assert len(hub.servers) == 1


def test_a_start_whose_answer_was_lost_is_not_requested_twice(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "silent"
    start(browser)
    requested = len(hub.called("POST"))
    broker.publish(make_session(NAME, "queued", 2))
    # The hub has forgotten all about it, but there is a job.
    Session.objects.update(requested_at=timezone.now() - timedelta(seconds=3))
    tend_all()
    assert len(hub.called("POST")) == requested
    assert the_session().state == "queued"
    hub.set("alice", NAME, pending="spawn")
    Session.objects.update(state="requested", requested_at=timezone.now() - timedelta(seconds=3))
    broker.published.clear()
    tend_all()
    assert len(hub.called("POST")) == requested, "the hub is at it"


def test_a_start_that_comes_to_nothing_is_given_up(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "pending"
    start(browser)
    sync_all(seconds=61)
    assert (the_session().state, the_session().ending) == ("ended", "refused")
    assert "no job came of it" in the_session().sentence
    sync_all(seconds=11)
    assert not hub.servers and the_session().settled


def test_a_job_that_comes_after_the_start_was_given_up_is_ended(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    hub.starts = "silent"
    start(browser)
    sync_all(seconds=61)
    sync_all(seconds=11)
    assert the_session().is_over and the_session().settled
    broker.put(make_job(7, name=f"session-{NAME}", kind="session"))
    broker.publish(make_session(NAME, "starting", 3))
    sync_all(seconds=11)
    assert [(request.job_id, request.user) for request in broker.requests_of("cancel")] == [(7, "alice")]
    sync_all(seconds=11)
    assert the_session().is_over and the_session().settled


def test_a_portal_that_dies_before_it_queried_the_hub_asks_when_it_is_back(
    browser: Browser, broker: FakeBroker, hub: FakeHub, resume_sync
) -> None:
    start(browser)
    assert the_session().state == "requested" and not hub.calls
    resume_sync()
    sync_all()
    assert len(hub.servers) == 1


def test_a_portal_that_was_away_for_long_starts_nothing_late(
    browser: Browser, broker: FakeBroker, hub: FakeHub, resume_sync
) -> None:
    start(browser)
    resume_sync()
    sync_all(seconds=61)
    assert (the_session().state, the_session().ending) == ("ended", "refused")
    assert not hub.servers


def test_what_ended_while_the_portal_was_away_is_found_out(ready: Session, broker: FakeBroker) -> None:
    broker.published[NAME] = make_session(
        NAME, "ended", 8, ending="time_limit", sentence="Its time was over."
    )
    Mirror.objects.update(swept=None)
    sync_all()
    assert (the_session().state, the_session().ending, the_session().sentence) == (
        "ended",
        "time_limit",
        "Its time was over.",
    )


def test_jupyterlab_is_notified_that_its_session_is_over_and_why(
    browser: Browser, bobs_browser: Browser, anonymous: Browser, ready: Session, broker: FakeBroker
) -> None:
    address = f"/sessions/{NAME}/state/"
    assert browser.get(address).json()["over"] is False
    broker.publish(make_session(NAME, "ended", 8, ending="time_limit", sentence="Its time was over."))
    sync_all()
    answer = browser.get(address)
    state = answer.json()
    token, fresh = state.pop("token"), state.pop("fresh")
    assert state == {"over": True, "state": "ended", "sentence": "Its time was over."}
    assert answer["Cache-Control"] == "no-store"
    assert bobs_browser.get(address).status_code == 404 and anonymous.get(address).status_code == 302
    # With these JupyterLab's page starts it again, by a form of its own.
    started = browser.send_with(token, f"{PAGE}again/", name=fresh)
    assert (started.status_code, started["Location"]) == (302, f"/sessions/{fresh}/")
    assert Session.objects.get(name=fresh).requested_options == ready.requested_options


def test_a_session_that_nobody_knows_any_more_has_ended(ready: Session, broker: FakeBroker) -> None:
    broker.published.clear()
    Mirror.objects.update(swept=None)
    sync_all()
    assert (the_session().state, the_session().label) == ("ended", "Lost")
