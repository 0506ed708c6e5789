"""The dashboard: my jobs that wait or run, and how busy my GPUs are, as a real Prometheus has measured it."""

import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.utils import timezone
from real_prometheus import Prometheus, prometheus_with

from carme.jobs import SessionOptions
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job
from carme_webui.sessions.models import Session

from .conftest import Browser, words
from .fake_broker import make_job

#: Of each GPU: its job, whose that is, and the share of time in which it worked.
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
    with prometheus_with("\n".join([*lines, "# EOF", ""]), tmp_path_factory.mktemp("busy")) as running:
        yield running


@pytest.fixture
def site(settings: Any, prometheus: Prometheus) -> None:
    place = django_settings.SITE.monitoring.model_copy(
        update={"prometheus": prometheus.url, "portal_certificates": prometheus.certificates}
    )
    settings.SITE = django_settings.SITE.model_copy(update={"monitoring": place})


@pytest.mark.usefixtures("still")
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
    for other in ("session-s1", "bobs", "ended"):
        assert other not in reported


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


def test_how_busy_my_gpus_are(browser: Browser, alice: User, site: None) -> None:
    Job.store([make_job(7, kind="session"), make_job(8, user="bob")])
    row, _ = Session.request(alice, SessionOptions(image="torch", minutes=60, title="Mine"), "s12345678")
    Session.objects.filter(pk=row.pk).update(job_id=7)
    assert 'hx-get="/metrics/busy/"' in browser.get("/").content.decode()
    answer = browser.get("/metrics/busy/")
    assert "Mine 2 GPUs, 45 % busy: 1 did nothing In the last ten minutes." in words(answer)
    assert f'href="{row.get_absolute_url()}"' in answer.content.decode()
    assert "job 8" not in words(answer)  # another user's


def test_nothing_is_reported_while_no_job_of_mine_has_gpus(browser: Browser, alice: User, site: None) -> None:
    Job.store([make_job(8, user="bob")])
    assert words(browser.get("/metrics/busy/")) == ""


def test_a_prometheus_that_is_away_is_named(
    browser: Browser, alice: User, settings: Any, tmp_path: Any
) -> None:
    assert "/metrics/busy/" not in browser.get("/").content.decode()  # this site measures nothing
    place = django_settings.SITE.monitoring.model_copy(
        update={"prometheus": "https://127.0.0.1:1", "portal_certificates": tmp_path}
    )
    settings.SITE = django_settings.SITE.model_copy(update={"monitoring": place})
    assert "metrics cannot be read" in words(browser.get("/metrics/busy/"))
