"""The dashboard: my jobs that wait or run, what a real Prometheus measured of them, and my use this month."""

import json
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from bs4 import BeautifulSoup
from django.conf import settings as django_settings
from django.core.cache import cache
from django.utils import timezone
from real_prometheus import Prometheus, prometheus_with

from carme.jobs import SessionOptions
from carme.jobs.times import moment_text
from carme.reports.prometheus import Prometheus as Reader
from carme.sessions import QueueEstimate
from carme.translation import joined, message
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job
from carme_webui.jobs.waiting import waiting
from carme_webui.projects.models import Membership, Project
from carme_webui.sessions.models import Session

from .conftest import Browser, words
from .fake_broker import FakeBroker, make_job, make_session
from .fake_hub import FakeHub
from .session_steps import NAME, PAGE, start, sync_all

#: The job of each GPU, its owner, and the share of time in which the GPU worked.
GPUS = {("n1", 0): (7, "alice", 0.9), ("n1", 1): (7, "alice", 0.0), ("n1", 2): (8, "bob", 0.5)}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    now = int(time.time())
    lines = ["# TYPE carme_job_gpu_utilization_ratio gauge"]
    for (node, gpu), (job, user, busy) in GPUS.items():
        labels = f'jobid="{job}",user="{user}",node="{node}",gpu="{gpu}"'
        # The minutes to come, too: the test may take some.
        for at in range(now - 900, now + 900, 15):
            lines.append(f"carme_job_gpu_utilization_ratio{{{labels}}} {busy} {at}")
    # A job of alice's that ended a while ago, which the averages reach back to.
    labels = 'jobid="6",user="alice",node="n1",gpu="3"'
    for at in range(now - 900, now - 400, 15):
        lines.append(f"carme_job_gpu_utilization_ratio{{{labels}}} 0 {at}")
    job_labels = 'jobid="7",user="alice",node="n1"'
    for kind, name, value in (
        ("counter", "cpu_seconds_total", lambda at: 3 * (at - now + 900)),
        ("gauge", "cpus", lambda at: 4),
        ("gauge", "memory_used_bytes", lambda at: 2 << 30),
        ("gauge", "memory_limit_bytes", lambda at: 8 << 30),
    ):
        lines.append(f"# TYPE carme_job_{name.removesuffix('_total')} {kind}")
        lines += [
            f"carme_job_{name}{{{job_labels}}} {value(at)} {at}" for at in range(now - 900, now + 900, 15)
        ]
    with prometheus_with("\n".join([*lines, "# EOF", ""]), tmp_path_factory.mktemp("busy")) as running:
        yield running


@pytest.fixture
def site(settings: Any, prometheus: Prometheus) -> None:
    place = django_settings.SITE.monitoring.model_copy(
        update={"prometheus": prometheus.url, "portal_certificates": prometheus.certificates}
    )
    settings.SITE = django_settings.SITE.model_copy(update={"monitoring": place})


@pytest.mark.usefixtures("frozen_clock")
def test_my_jobs_are_shown_with_the_time_that_they_have_left(browser: Browser, alice: User) -> None:
    begun = timezone.now() - timedelta(minutes=45, seconds=-30)
    Job.store(
        [
            make_job(7, kind="batch", name="train <b>", started=begun, nodes=2, gpus=8),
            make_job(8, kind="batch", state="PENDING", name="next", reason="Priority"),
            make_job(9, kind="session", name="session-s1"),
            make_job(10, kind="batch", user="bob", name="bobs"),
            make_job(11, kind="batch", state="COMPLETED", name="ended"),
        ]
    )
    page = browser.get("/").content.decode()
    reported = words(browser.get("/live/"))
    assert "Running train &lt;b&gt; 7 2 nodes · 8 GPUs 16 minutes left" in reported
    assert '<progress class="row-bar " max="100" value="2' in page
    assert re.search("Pending next 8 1 node · 1 GPU .*higher priority", reported)
    for hidden in ("session-s1", "bobs", "ended"):
        assert hidden not in reported


@pytest.mark.usefixtures("at_once", "frozen_clock")
def test_what_holds_up_a_session_is_drawn_with_the_range_of_its_start(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    now = timezone.now().replace(second=0, microsecond=0)
    first, free = now + timedelta(minutes=20), now + timedelta(minutes=40)
    why = message("{amounts} until {until} at the latest", amounts="8 GPUs", until=moment_text(free, now))
    plan = QueueEstimate(place=1, waiting=1, reason=why, earliest=first, latest=free)
    start(browser)
    broker.publish(make_session(NAME, "queued", 2, estimate=plan, sentence=why))
    sync_all()
    for page in ("/", PAGE):
        found = BeautifulSoup(browser.get(page).content, "html.parser")
        (drawn,) = found("carme-spans")
        spec = json.loads(str(drawn["data-spans"]))
        spans = {span["kind"]: span for row in spec["rows"] for span in row["spans"]}
        begins = [spans[kind]["start"] for kind in ("queued", "staging", "running")]
        assert begins[0] < begins[1] == first.timestamp() < begins[2] == free.timestamp(), page
        assert spec["start"] == begins[0] and spans["running"]["open"], page
        assert spec["summary"].startswith("Its nodes: In use 3"), page
        (table,) = found.select(".span-table table")
        cells = [[str(cell.get_text()) for cell in row("td")] for row in table("tr")[1:]]
        assert [row[0] for row in cells] == ["In use", "May start", "Running at the latest"]
        assert [row[2:] for row in cells][2] == ["\N{EN DASH}"] * 2, "its end is not known"
        (legend,) = (element for element in found(class_="legend") if "In use until" in element.get_text())
        shown = [time["datetime"] for time in legend("time")]
        assert shown == [f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (free, first, free)]


@pytest.mark.parametrize("known", [False, True])
def test_nodes_are_in_use_until_a_time_at_which_something_ends(known: bool) -> None:
    now = timezone.now().replace(second=0, microsecond=0)
    begin, end = now + timedelta(minutes=20), now + timedelta(minutes=10)
    held = message(
        "kept for the reservation {name} from {begins} on", name="a", begins=moment_text(begin, now)
    )
    why = message("{amounts} must become free on {nodes}, {why}", amounts="1 GPU", nodes="n1", why=held)
    until = message("{why} until {until} at the latest", why=held, until=moment_text(end, now))
    drawn = waiting(joined(["It waits:", until if known else why]), None, None)
    assert (drawn and drawn.freed) == (end if known else None)
    # Where a start is planned, too, the job alone is drawn.
    planned = waiting(why, None, begin)
    assert planned and planned.freed is None and len(planned.spans.rows) == 1


@pytest.mark.usefixtures("at_once", "frozen_clock")
def test_nothing_is_drawn_of_a_wait_without_an_end(
    browser: Browser, broker: FakeBroker, hub: FakeHub
) -> None:
    start(browser)
    broker.publish(
        make_session(NAME, "queued", 2, estimate=QueueEstimate(place=1, waiting=1, reason="It waits."))
    )
    sync_all()
    for page in ("/", PAGE):
        assert "<carme-spans" not in browser.get(page).content.decode()


def test_an_array_is_one_of_my_jobs(browser: Browser, alice: User) -> None:
    # The task with the array's own number has ended.
    states = ("COMPLETED", "RUNNING", "RUNNING")
    Job.store(
        make_job(20 + task, kind="batch", name="map", array_id=20, task=task, state=state)
        for task, state in enumerate(states)
    )
    page = browser.get("/live/").content.decode()
    assert page.count('id="job-') == 1
    assert "3 tasks: 2 running, 1 completed" in page


def test_only_the_newest_of_many_are_shown(browser: Browser, alice: User) -> None:
    Job.store([make_job(number, kind="batch") for number in range(100, 120)])
    page = browser.get("/live/").content.decode()
    assert re.findall('id="job-([0-9]+)"', page) == [str(number) for number in range(119, 111, -1)]
    assert ">All jobs</a>" in page


def test_own_jobs_have_small_charts(browser: Browser, alice: User, site: None) -> None:
    Job.store([make_job(7, kind="session"), make_job(8, user="bob")])
    row, _ = Session.request(alice, SessionOptions(image="torch", minutes=60, title="Mine"), "s12345678")
    Session.objects.filter(pk=row.pk).update(job_id=7)
    page = browser.get("/").content.decode()
    assert 'data-url="/metrics/sparks/"' in page and '<carme-sparks data-job="7">' in page
    answer = json.loads(browser.get("/metrics/sparks/").content)
    assert answer["failure"] == "" and list(answer["jobs"]) == ["7"]  # not another user's
    sparks = answer["jobs"]["7"]
    assert sparks["words"] == "2 GPUs, 45 % busy: 1 did nothing"
    shown = {chart["title"]: (chart["now"], chart["series"][0]["values"][-1]) for chart in sparks["charts"]}
    assert shown == {"GPUs": ("45\xa0%", 45.0), "Processors": ("75\xa0%", 75.0), "Memory": ("25\xa0%", 25.0)}
    chart = sparks["charts"][0]
    assert chart["spark"] and chart["step"] * (len(chart["series"][0]["values"]) - 1) == 1800
    assert chart["summary"] == "GPUs 45\xa0% on average, at most 45\xa0%"


def test_all_jobs_of_a_user_are_one_question_to_prometheus(
    browser: Browser, alice: User, site: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []
    ask = Reader.ask
    monkeypatch.setattr(
        Reader, "ask", lambda self, path, given: requested.append(path) or ask(self, path, given)
    )
    first = browser.get("/metrics/sparks/").content
    assert browser.get("/metrics/sparks/").content == first and requested == ["/api/v1/query_range"]


def test_nothing_is_shown_of_jobs_that_are_not_mine(bobs_browser: Browser, bob: User, site: None) -> None:
    assert list(json.loads(bobs_browser.get("/metrics/sparks/").content)["jobs"]) == ["8"]


def test_the_use_of_this_month_is_shown_with_its_limit(
    browser: Browser, alice: User, frozen_clock: None
) -> None:
    assert words(browser.get("/jobs/month/")) == ""  # nothing yet
    now = timezone.now()
    start = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    hour = timedelta(hours=1)
    known: dict[str, Any] = {"kind": "batch", "cpus": 8}
    Job.store(
        [
            # Of the last month's job only the hour in this one counts.
            make_job(1, state="COMPLETED", gpus=4, submitted=start - hour, started=start - hour,
                     ended=min(now, start + hour), **known),
            make_job(2, state="COMPLETED", gpus=1, submitted=start - 9 * hour, started=start - 9 * hour,
                     ended=start - hour, **known),
            make_job(3, state="PENDING", gpus=8, submitted=now, **known),
            make_job(4, user="bob", gpus=8, submitted=now - hour, started=now - hour, **known),
        ]
    )  # fmt: skip
    cache.clear()  # the sums are remembered for a minute
    used = 4 * min(1.0, (now - start) / hour)
    message = words(browser.get("/jobs/month/"))
    assert message.startswith(f"My use this month GPU-hours {used:.1f}".removesuffix(".0"))
    assert message.endswith("Jobs 1")
    project = Project.objects.create(
        name="vision", title="Vision <b>", gpu_hours=1000, used={"gpu_hours": 123.44}, granted=now
    )
    Membership.objects.create(project=project, user=alice)
    part = browser.get("/jobs/month/").content.decode()
    assert "123.4 of 1,000 GPU-hours" in part and "Vision &lt;b&gt;" in part and 'value="12"' in part


def test_a_prometheus_that_is_away_is_named(
    browser: Browser, alice: User, settings: Any, tmp_path: Any
) -> None:
    page = browser.get("/").content.decode()
    assert "/metrics/sparks/" not in page  # this site measures nothing
    place = django_settings.SITE.monitoring.model_copy(
        update={"prometheus": "https://127.0.0.1:1", "portal_certificates": tmp_path}
    )
    settings.SITE = django_settings.SITE.model_copy(update={"monitoring": place})
    answer = json.loads(browser.get("/metrics/sparks/").content)
    assert answer["jobs"] == {} and "metrics cannot be read" in answer["failure"]
