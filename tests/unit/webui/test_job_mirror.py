"""The mirror of Slurm's jobs: arrays, what is missed and caught up with, and the past."""

import math
import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from carme.jobs import JobRequest
from carme.translation import translated
from carme_webui.accounts.models import User
from carme_webui.cluster import broker as site_broker
from carme_webui.jobs import backfill
from carme_webui.jobs.backfill import backfill_jobs
from carme_webui.jobs.models import Job, Mirror
from carme_webui.profile.models import Notice

from .conftest import Browser, text, words
from .fake_broker import NOW, FakeBroker, make_job
from .job_steps import array, read_changes, states, sweep_is_due

# --- arrays ----------------------------------------------------------------------------------------------


def test_the_list_shows_an_array_once_and_its_page_all_tasks(
    db, browser: Browser, broker: FakeBroker
) -> None:
    array(broker, a="COMPLETED", b="FAILED", c="RUNNING")
    broker.put(make_job(7))
    read_changes()
    page = browser.get("/jobs/").content.decode()
    assert page.count("sweep") == 1 and "10 tasks: 1 running, 7 waiting, 1 completed, 1 failed" in page
    assert "50_2" in browser.get("/jobs/?state=running").content.decode()
    page = browser.get("/jobs/50/").content.decode()
    assert "3-9%2" in page and "/jobs/53/" in page and "/jobs/50/cancel/?task=2" in page
    assert "Job 50_1" in browser.get("/jobs/52/").content.decode()
    assert "Only task 2" in browser.get("/jobs/50/cancel/?task=2").content.decode()
    browser.send("/jobs/50/cancel/?task=2", "/jobs/50/cancel/", task="2")
    browser.send("/jobs/50/cancel/", "/jobs/50/cancel/")
    assert [(wanted.job_id, wanted.task) for wanted in broker.requests_of("cancel")] == [(50, 2), (50, None)]


def ended_array(broker: FakeBroker) -> None:
    """An array of six tasks, the second one failed; Slurm gives the last one the array's number."""
    for task in range(5):
        state, code = ("FAILED", 3) if task == 1 else ("COMPLETED", 0)
        reported: dict[str, Any] = {"state": state, "exit_code": code, "started": NOW, "ended": NOW}
        broker.put(make_job(51 + task, array_id=50, task=task, kind="batch", name="sweep", **reported))
    reported = {"state": "COMPLETED", "exit_code": 0, "started": NOW, "ended": NOW + timedelta(minutes=5)}
    broker.put(make_job(50, array_id=50, task=5, kind="batch", name="sweep", **reported))
    broker.logs |= {50: b"log of the last task", 52: b"log of the failed task"}


def test_an_array_says_how_many_of_its_tasks_failed(db, browser: Browser, broker: FakeBroker) -> None:
    array(broker, a="RUNNING")
    read_changes()
    title = re.compile(r"<title>.*</title>|<h1>.*?</h1>", re.S)
    before = title.findall(text(browser.get("/jobs/50/")))
    ended_array(broker)
    read_changes()
    answer = browser.get("/jobs/50/")
    page, message = text(answer), words(answer)
    assert title.findall(page) == before, "an array keeps its title"
    assert "Failed 1 of 6 tasks failed." in message and "6 tasks: 5 completed, 1 failed" in message
    assert "/jobs/52/#log-heading" in page and "/jobs/50/?task=5" in page, "links to the tasks and their logs"
    for gone in (
        "Cancel all tasks",
        "/cancel/",
        "Exit code",
        "log of the last",
        'hx-trigger="update',
        "/use/",
    ):
        assert gone not in page, gone
    assert "20 Nov 2026, 12:05:00" in message, "the end of the last task"
    assert "1 of 6 tasks failed." in words(browser.get("/jobs/"))
    assert browser.get("/jobs/50/cancel/").status_code == 302, "there is nothing to cancel"
    task = text(browser.get("/jobs/50/?task=5"))
    assert "log of the last task" in task and "Job 50_5" in task and "Completed" in task
    assert 'href="/jobs/50/?task=5"' in text(browser.get("/jobs/?state=completed"))


def test_the_failed_tasks_of_an_array_are_submitted_again(db, browser: Browser, broker: FakeBroker) -> None:
    ended_array(broker)
    broker.put(make_job(54, state="TIMEOUT", array_id=50, task=3, kind="batch", name="sweep", ended=NOW))
    broker.wanted[50] = JobRequest(
        kind="batch", name="sweep", command=["true"], minutes=5, partition="gpu", array="0-5%2"
    )
    read_changes()
    assert "Resubmit failed tasks" in text(browser.get("/jobs/50/"))
    browser.send("/jobs/50/", "/jobs/50/resubmit/", failed="1")
    assert broker.wanted[max(broker.wanted)].array == "1,3%2"
    browser.send("/jobs/50/", "/jobs/50/resubmit/", task="5")
    assert broker.wanted[max(broker.wanted)].array == "5"
    for number in (52, 54):
        Job.objects.filter(id=number).update(state="COMPLETED")
    page = text(browser.get("/jobs/50/"))
    assert "Resubmit failed tasks" not in page and "6 tasks ended without an error." in page


def test_pages_of_arrays_ask_as_much_for_many_tasks_as_for_few(
    db, browser: Browser, broker: FakeBroker
) -> None:
    browser.get("/jobs/")
    counts = []
    for number in (100, 200, 300):
        array(broker, number, a="COMPLETED", b="RUNNING")
        read_changes()
        with CaptureQueriesContext(connection) as found:
            browser.get("/jobs/")
        with CaptureQueriesContext(connection) as more:
            browser.get(f"/jobs/{number}/")
        counts.append((len(found), len(more)))
    assert counts[0] == counts[1] == counts[2]


def test_owners_hear_of_an_array_once_when_all_of_it_is_over(
    db, browser: Browser, broker: FakeBroker
) -> None:
    User.objects.filter(username="alice").update(wanted={"job-over": [True, False]})
    array(broker, a="RUNNING", b="RUNNING")
    read_changes()
    broker.put(make_job(51, state="FAILED", array_id=50, task=0, kind="batch", name="sweep", ended=NOW))
    read_changes()
    assert not Notice.objects.exists()
    broker.put(make_job(52, state="COMPLETED", array_id=50, task=1, kind="batch", name="sweep", ended=NOW))
    broker.put(make_job(50, state="COMPLETED", array_id=50, task=9, kind="batch", name="sweep", ended=NOW))
    read_changes()
    (reported,) = Notice.objects.all()
    assert "array 50 (sweep) have ended; 1 of them failed" in reported.text


# --- the mirror ------------------------------------------------------------------------------------------


def test_jobs_of_all_users_and_their_changes_are_stored(db, broker: FakeBroker) -> None:
    broker.put(make_job(1, state="PENDING", reason="Resources", started=None))
    broker.put(make_job(2, user="bob"))
    read_changes()
    assert states() == {1: "PENDING", 2: "RUNNING"}
    assert "next in line" in Job.objects.get(id=1).explanation

    broker.put(make_job(1, started=NOW))
    read_changes()
    assert Job.objects.get(id=1).state == "RUNNING"
    assert Job.objects.get(id=1).started == NOW
    assert broker.requests_of("events")[-1].cursor.endswith("-2"), "only the changes were requested"


def test_the_past_is_fetched_once_at_the_start(db, broker: FakeBroker) -> None:
    broker.leave(make_job(7, state="COMPLETED", ended=NOW, exit_code=0))
    read_changes()
    read_changes()
    assert states() == {7: "COMPLETED"}
    assert len(broker.requests_of("history")) == 1


def test_after_a_gap_the_missed_past_is_fetched_and_vanished_jobs_get_their_end(
    db, broker: FakeBroker
) -> None:
    broker.put(make_job(1))
    read_changes()
    broker.leave(make_job(1, state="TIMEOUT", ended=NOW))
    broker.leave(make_job(2, state="FAILED", exit_code=3, ended=NOW))  # came and went unseen
    broker.restart()
    read_changes()
    assert states() == {1: "TIMEOUT", 2: "FAILED"}
    assert broker.requests_of("history")[-1].since is not None
    assert not Job.objects.filter(active=True).exists()


def test_a_job_that_leaves_the_queue_without_an_event_is_found_out(db, broker: FakeBroker) -> None:
    broker.put(make_job(1))
    read_changes()
    broker.leave(make_job(1, state="NODE_FAIL", ended=NOW))
    sweep_is_due()
    read_changes()
    assert states() == {1: "NODE_FAIL"}


def test_rows_stay_when_slurm_forgets(db, broker: FakeBroker) -> None:
    broker.put(make_job(1, state="COMPLETED", ended=NOW))
    broker.put(make_job(2))
    read_changes()
    broker.queue.clear()
    broker.restart()
    read_changes()
    assert states() == {1: "COMPLETED", 2: "UNKNOWN"}
    explanation = Job.objects.get(id=2).explanation
    assert explanation == "Slurm no longer knows how this job ended."
    assert translated(explanation, "de") == "Slurm weiß nicht mehr, wie dieser Job geendet hat."
    assert not Job.objects.filter(active=True).exists()


def test_a_broker_that_is_down_loses_nothing(db, broker: FakeBroker, folder) -> None:
    broker.put(make_job(1))
    read_changes()
    (folder / "broker.sock").rename(folder / "away.sock")
    read_changes()
    assert "does not answer" in Mirror.load().failure
    assert states() == {1: "RUNNING"}
    (folder / "away.sock").rename(folder / "broker.sock")
    broker.put(make_job(1, state="COMPLETED", ended=NOW))
    read_changes()
    assert Mirror.load().failure == ""
    assert states() == {1: "COMPLETED"}


# --- the past --------------------------------------------------------------------------------------------


@pytest.fixture
def in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of reading the past ends by no limit of time."""
    monkeypatch.setattr(backfill, "SECONDS", math.inf)


@pytest.mark.usefixtures("in_one_round")
def test_the_accounting_of_years_is_read_backwards_once(db, broker: FakeBroker, settings) -> None:
    portal = settings.SITE.portal.model_copy(update={"history_days": 400})
    settings.SITE = settings.SITE.model_copy(update={"portal": portal})
    now = timezone.now()
    days = {1: 500, 2: 390, 3: 200, 4: 3}
    for number, age in days.items():
        broker.leave(make_job(number, state="COMPLETED", submitted=now - timedelta(days=age)))
    broker.leave(make_job(5, state="RUNNING", submitted=now - timedelta(days=2)))  # the sync's
    backfill_jobs(site_broker(), now)
    assert states() == dict.fromkeys((2, 3, 4), "COMPLETED"), "no older one, and none that runs"
    requested = len(broker.requests_of("history"))
    Job.objects.filter(id=2).update(name="as it was")
    backfill_jobs(site_broker(), now)
    assert len(broker.requests_of("history")) == requested + 1, "only the last day is read again"
    assert Job.objects.get(id=2).name == "as it was"


@pytest.mark.usefixtures("in_one_round")
def test_more_jobs_than_are_reported_at_once_are_all_read(db, broker: FakeBroker, monkeypatch) -> None:
    monkeypatch.setattr(backfill, "LIMIT", 5)
    now = timezone.now()
    for number in range(1, 41):
        broker.leave(make_job(number, state="COMPLETED", submitted=now - timedelta(hours=3 * number)))
    backfill_jobs(site_broker(), now)
    assert len(states()) == 40


def test_a_broker_that_dies_meanwhile_loses_nothing(db, broker: FakeBroker, folder) -> None:
    now = timezone.now()
    broker.leave(make_job(1, state="COMPLETED", submitted=now - timedelta(days=100)))
    (folder / "broker.sock").rename(folder / "away.sock")
    assert backfill_jobs(site_broker(), now) == 0 and Mirror.load().past is None
    (folder / "away.sock").rename(folder / "broker.sock")
    backfill_jobs(site_broker(), now)
    assert states() == {1: "COMPLETED"}
