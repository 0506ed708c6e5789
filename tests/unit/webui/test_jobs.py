"""The mirror of Slurm's jobs, and the pages that show them."""

from datetime import timedelta

import pytest
from django.utils import timezone

from carme.reports import Advice, Curve, GpuUse, Report, Usage
from carme_webui.cluster import broker as site_broker
from carme_webui.jobs.mirror import follow
from carme_webui.jobs.models import Job, Mirror

from .conftest import Browser
from .fake_broker import NOW, FakeBroker, make_job


def states() -> dict[int, str]:
    return dict(Job.objects.values_list("id", "state"))


def news() -> bool:
    """Read what the broker has to say."""
    return follow(site_broker())


def sweep_is_due() -> None:
    Mirror.objects.update(swept=timezone.now() - timedelta(hours=1))


# --- the mirror ------------------------------------------------------------------------------------------


def test_jobs_of_all_users_and_their_changes_are_stored(db, broker: FakeBroker) -> None:
    broker.put(make_job(1, state="PENDING", reason="Resources", started=None))
    broker.put(make_job(2, user="bob"))
    news()
    assert states() == {1: "PENDING", 2: "RUNNING"}
    assert "next in line" in Job.objects.get(id=1).explanation

    broker.put(make_job(1, started=NOW))
    news()
    assert Job.objects.get(id=1).state == "RUNNING"
    assert Job.objects.get(id=1).started == NOW
    assert broker.asked_for("events")[-1].cursor == "a-2", "only the news were asked for"


def test_the_past_is_fetched_once_at_the_start(db, broker: FakeBroker) -> None:
    broker.leave(make_job(7, state="COMPLETED", ended=NOW, exit_code=0))
    news()
    news()
    assert states() == {7: "COMPLETED"}
    assert len(broker.asked_for("history")) == 1


def test_after_a_gap_the_missed_past_is_fetched_and_vanished_jobs_get_their_end(
    db, broker: FakeBroker
) -> None:
    broker.put(make_job(1))
    news()
    broker.leave(make_job(1, state="TIMEOUT", ended=NOW))
    broker.leave(make_job(2, state="FAILED", exit_code=3, ended=NOW))  # came and went unseen
    broker.restart()
    news()
    assert states() == {1: "TIMEOUT", 2: "FAILED"}
    assert broker.asked_for("history")[-1].since is not None
    assert not Job.objects.filter(active=True).exists()


def test_a_job_that_leaves_the_queue_without_an_event_is_found_out(db, broker: FakeBroker) -> None:
    broker.put(make_job(1))
    news()
    broker.leave(make_job(1, state="NODE_FAIL", ended=NOW))
    sweep_is_due()
    news()
    assert states() == {1: "NODE_FAIL"}


def test_rows_stay_when_slurm_forgets(db, broker: FakeBroker) -> None:
    broker.put(make_job(1, state="COMPLETED", ended=NOW))
    broker.put(make_job(2))
    news()
    broker.queue.clear()
    broker.restart()
    news()
    assert states() == {1: "COMPLETED", 2: "UNKNOWN"}
    assert Job.objects.get(id=2).explanation == "Slurm no longer knows how this job ended."
    assert not Job.objects.filter(active=True).exists()


def test_a_broker_that_is_down_loses_nothing(db, broker: FakeBroker, folder) -> None:
    broker.put(make_job(1))
    news()
    (folder / "broker.sock").rename(folder / "away.sock")
    news()
    assert "does not answer" in Mirror.load().failure
    assert states() == {1: "RUNNING"}
    (folder / "away.sock").rename(folder / "broker.sock")
    broker.put(make_job(1, state="COMPLETED", ended=NOW))
    news()
    assert Mirror.load().failure == ""
    assert states() == {1: "COMPLETED"}


# --- the pages -------------------------------------------------------------------------------------------


def test_only_my_jobs_are_listed(browser: Browser, broker: FakeBroker) -> None:
    Job.store([make_job(1, name="mine"), make_job(2, user="bob", name="not mine")])
    page = browser.get("/jobs/").content.decode()
    assert "mine" in page and "not mine" not in page


@pytest.mark.parametrize("path", ["/jobs/2/", "/jobs/2/live/", "/jobs/2/use/"])
def test_another_persons_job_does_not_exist_for_me(browser: Browser, broker: FakeBroker, path: str) -> None:
    broker.logs[2] = b"secret"
    Job.store([broker.put(make_job(2, user="bob"))])
    answer = browser.get(path)
    assert answer.status_code == 404
    assert "secret" not in answer.content.decode()
    assert not broker.asked_for("log") and not broker.asked_for("report")


def test_a_job_shows_the_end_of_its_log_read_as_its_owner(browser: Browser, broker: FakeBroker) -> None:
    broker.logs[1] = b"first line\n" + b"x" * 20_000 + b"\n<b>last</b> line\n"
    Job.store([broker.put(make_job(1, state="FAILED", exit_code=3, ended=NOW))])
    page = browser.get("/jobs/1/").content.decode()
    assert "&lt;b&gt;last&lt;/b&gt; line" in page
    assert "first line" not in page
    assert "exit code 3" in page
    assert {request.user for request in broker.asked_for("log")} == {"alice"}


def test_a_log_that_cannot_be_read_is_a_sentence(browser: Browser, broker: FakeBroker) -> None:
    Job.store([broker.put(make_job(1))])
    assert "Job 1 has no log. Wait until it has started." in browser.get("/jobs/1/").content.decode()


def test_a_job_shows_what_it_used_and_what_to_change(browser: Browser, broker: FakeBroker) -> None:
    curve = Curve(what="gpu", name="n1 <GPU> 0", start=0, step=15, values=[0.0, 0.5, 1.0])
    broker.put(make_job(1))
    broker.reports[1] = Report(
        job=make_job(1),
        source="live",
        usage=Usage(seconds=60, gpus=[GpuUse(node="n1", gpu="0", busy=0.5, active=1.0)]),
        efficiency={"gpu": 0.5},
        curves=[curve],
        advice=[Advice(topic="gpus", text="Ask <for> less.", change="--gpus 1")],
    )
    news()
    assert 'hx-get="/jobs/1/use/"' in browser.get("/jobs/1/").content.decode()
    part = browser.get("/jobs/1/use/").content.decode()
    for said in ("50% used", "<polyline", "n1 &lt;GPU&gt; 0", "Ask &lt;for&gt; less.", "--gpus 1"):
        assert said in part, said
    assert "every 30s" in part
    assert {request.user for request in broker.asked_for("report")} == {"alice"}


def test_without_a_report_the_page_says_why(browser: Browser, broker: FakeBroker) -> None:
    broker.put(make_job(1, state="COMPLETED", ended=NOW))
    news()
    part = browser.get("/jobs/1/use/").content.decode()
    assert "Nothing is known of job 1. Ask again when it has run." in part
    assert "every 30s" not in part


def test_pages_work_while_the_broker_is_down(browser: Browser) -> None:
    Job.store([make_job(1, name="kept")])
    news()
    page = browser.get("/jobs/").content.decode()
    assert "kept" in page and 'role="alert"' in page and "does not answer" in page
    assert "does not answer" in browser.get("/jobs/1/").content.decode()


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("", {1, 2, 3, 4, 5}),
        ("pending", {1}),
        ("running", {2}),
        ("completed", {3}),
        ("cancelled", {4}),
        ("failed", {5}),
        ("<script>", {1, 2, 3, 4, 5}),
    ],
)
def test_the_filter(browser: Browser, broker: FakeBroker, state: str, shown: set[int]) -> None:
    kinds = ["PENDING", "RUNNING", "COMPLETED", "CANCELLED", "OUT_OF_MEMORY"]
    Job.store(make_job(number, state=kind) for number, kind in enumerate(kinds, 1))
    page = browser.get("/jobs/", {"state": state}).content.decode()
    assert {number for number in range(1, 6) if f'href="/jobs/{number}/"' in page} == shown
    assert "<script>" not in page.replace("<script src", "")


@pytest.mark.parametrize("page", ["2", "0", "-1", "9999999", "x", "1e9", "' OR 1=1", "9" * 5000])
def test_any_page_number_gives_a_page(browser: Browser, page: str) -> None:
    Job.store(make_job(number, state="COMPLETED") for number in range(1, 31))
    assert browser.get("/jobs/", {"page": page}).status_code == 200


def test_long_lists_have_pages(browser: Browser) -> None:
    Job.store(make_job(number, state="COMPLETED") for number in range(1, 31))
    assert "/jobs/30/" in browser.get("/jobs/").content.decode()
    second = browser.get("/jobs/?page=2").content.decode()
    assert "/jobs/5/" in second and "/jobs/30/" not in second and "Page 2 of 2" in second


@pytest.mark.parametrize("job_id", ["0", "99", "9" * 18, "9" * 19, "9" * 400, "x", "1%00"])
def test_any_job_number_gives_a_clean_not_found(browser: Browser, broker: FakeBroker, job_id: str) -> None:
    assert browser.get(f"/jobs/{job_id}/").status_code == 404


def test_names_from_slurm_are_escaped(browser: Browser, broker: FakeBroker) -> None:
    evil = "<img src=x onerror=alert(1)>"
    Job.store(
        [broker.put(make_job(1, name=evil, node_list=evil, partition=evil, reason=evil, state="PENDING"))]
    )
    for path in ("/jobs/", "/jobs/1/"):
        assert "<img src=x" not in browser.get(path).content.decode()
