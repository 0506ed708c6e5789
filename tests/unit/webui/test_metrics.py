"""Metrics for people: nobody gets the series of others out of Prometheus, however they ask."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from bs4 import BeautifulSoup
from django.conf import settings as django_settings
from django.utils import timezone
from real_prometheus import Prometheus, prometheus_with

from carme.errors import InvalidRequest
from carme.reports import GpuUse, NodeUse, Usage
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job
from carme_webui.metrics.scope import Scope
from carme_webui.projects.models import Membership, Project

from .conftest import Browser
from .fake_broker import NOW, FakeBroker, make_job

SCOPE = Scope.of_user("alice")
JOBS = {"alice": (1, "research"), "bob": (2, "research"), "carol": (3, "physics"), "dan": (4, "carme-vision")}


def samples() -> str:
    """Series of a job of each user over the last hour, and of no user."""
    now = int(time.time())
    lines = ["# TYPE carme_job_cpus gauge"]
    for user, (job, account) in JOBS.items():
        for at in range(now - 3600, now, 60):
            lines.append(f'carme_job_cpus{{jobid="{job}",user="{user}",account="{account}"}} {job} {at}')
    lines += ["# TYPE carme_secret gauge"]
    lines += [f'carme_secret{{owner="bob"}} 7 {at}' for at in range(now - 3600, now, 60)]
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus_with(samples(), tmp_path_factory.mktemp("prometheus")) as running:
        yield running


@pytest.fixture
def site(settings, prometheus: Prometheus) -> None:
    """The site has this Prometheus."""
    site = django_settings.SITE
    place = site.monitoring.model_copy(
        update={"prometheus": prometheus.url, "portal_certificates": prometheus.certificates}
    )
    settings.SITE = site.model_copy(update={"monitoring": place})


def ask(browser: Browser, query: str, where: str = "mine", question: str = "query", **more: str):
    return browser.get(f"/metrics/{where}/api/v1/{question}", {"query": query, **more})


def users_in(answer) -> set[str]:
    assert answer.status_code == 200, answer.content
    return {entry["metric"].get("user", "") for entry in answer.json()["data"]["result"]}


@pytest.mark.parametrize(
    ("query", "held"),
    [
        ("up", '{__name__="up",user="alice"}'),
        (
            'sum by (jobid) (rate(x{mode!="user"}[5m] offset 1h))',
            'sum by (jobid) (rate({__name__="x",mode!="user",user="alice"}[300000ms] offset 3600000ms))',
        ),
        ("x[5m:1m]", '({__name__="x",user="alice"})[300000ms:60000ms]'),
        (
            "a / on (jobid) group_left (node) b",
            '({__name__="a",user="alice"}) / on (jobid) group_left (node) ({__name__="b",user="alice"})',
        ),
        ('{"odd name"}', '{__name__="odd name",user="alice"}'),
        ("x @ end()", '{__name__="x",user="alice"} @ end()'),
        ("1 + 2", "(1.0) + (2.0)"),
    ],
)
def test_each_selector_gets_the_matcher(query: str, held: str) -> None:
    assert SCOPE.query(query) == held
    # What was written is read again as it is.
    assert SCOPE.query(held).replace(',user="alice",user="alice"', ',user="alice"') != query


def test_names_are_quoted() -> None:
    assert Scope.of_user('a"} or x{b="').query("up") == '{__name__="up",user="a\\"} or x{b=\\""}'


@pytest.mark.parametrize(
    "query",
    [
        "", "up}", 'x{user="alice"} or', "(" * 41 + "x" + ")" * 41, "-" * 41 + "x", "x" * 9000,
        'x{user="bob" or user="carol"}', "info(x)", "x\0", "frobnicate(x)",
    ],
)  # fmt: skip
def test_what_cannot_be_held_to_a_scope_is_refused(query: str) -> None:
    with pytest.raises(InvalidRequest):
        SCOPE.query(query)


#: Queries for the series of other users; each must return none of them.
ATTACKS = [
    "carme_job_cpus",
    'carme_job_cpus{user="bob"}',
    'carme_job_cpus{user=~".+"}',
    'carme_job_cpus{user!="alice"}',
    '{__name__=~"carme_.*"}',
    '{user="bob"}',
    'carme_job_cpus or carme_job_cpus{user="bob"}',
    'carme_job_cpus{user="alice"} or on () carme_secret',
    'max_over_time(carme_job_cpus{user="bob"}[1h])',
    'max_over_time(carme_job_cpus{user="bob"}[1h:1m])',
    'last_over_time((carme_job_cpus{user="bob"})[30m:1m] offset 1m)',
    'topk(10, carme_job_cpus)',
    'count_values("user", carme_job_cpus{user="bob"})',
    'label_replace(carme_job_cpus{user="bob"}, "user", "alice", "", "")',
    'carme_job_cpus * on () group_left () scalar(carme_job_cpus{user="bob"})',
    'vector(scalar(carme_job_cpus{user="bob"})) > 0',
    'carme_secret @ end()',
    'carme_job_cpus{user="bob"} # {user="alice"}',
    'carme_job_cpus{user="alice\\"} or carme_job_cpus{user=\\"bob"}',
    "carme_job_cpus{user='bob'}",
    "carme_job_cpus{user=`bob`}",
    '{"carme_job_cpus", "user"="bob"}',
    'absent(carme_job_cpus{user="bob"}) * 0 + carme_secret',
]  # fmt: skip


@pytest.mark.parametrize("query", ATTACKS)
def test_nobody_sees_series_of_others(browser: Browser, site: None, query: str) -> None:
    answer = ask(browser, query)
    if answer.status_code == 200:
        result = answer.json()["data"]["result"]
        assert {entry["metric"].get("user", "alice") for entry in result} <= {"alice"}
        # Bob's job is 2, carol's 3, the secret 7: none of these figures is shown.
        assert not {float(entry["value"][1]) for entry in result} & {2.0, 3.0, 7.0}
    else:
        assert answer.status_code == 400


def test_users_see_their_own_series(browser: Browser, bobs_browser: Browser, site: None) -> None:
    assert users_in(ask(browser, "carme_job_cpus")) == {"alice"}
    assert users_in(ask(bobs_browser, "carme_job_cpus")) == {"bob"}
    now = time.time()
    span = {"start": str(now - 600), "end": str(now - 60), "step": "60"}
    assert users_in(ask(browser, "carme_job_cpus", question="query_range", **span)) == {"alice"}


@pytest.mark.parametrize(
    "match", [[], ["carme_job_cpus"], ['{user="bob"}'], ['{__name__=~".+"}', "carme_secret"]]
)
def test_names_and_values_of_others_are_not_reported(browser: Browser, site: None, match: list[str]) -> None:
    requested = {"match[]": match}
    for question in ("series", "labels", "label/user/values", "label/jobid/values", "label/owner/values"):
        answer = browser.get(f"/metrics/mine/api/v1/{question}", requested)
        assert answer.status_code == 200
        reported = json.dumps(answer.json()["data"])
        assert "bob" not in reported and "carol" not in reported and "owner" not in reported
    values = browser.get("/metrics/mine/api/v1/label/user/values").json()["data"]
    assert values == ["alice"]


def test_coordinators_of_an_account_see_its_jobs(browser: Browser, site: None, broker: FakeBroker) -> None:
    assert ask(browser, "carme_job_cpus", "account/research").status_code == 403
    broker.leads["alice"] = ["research"]
    from django.core.cache import cache

    cache.clear()  # what was known is kept for a minute
    assert users_in(ask(browser, "carme_job_cpus", "account/research")) == {"alice", "bob"}
    assert ask(browser, "carme_job_cpus", "account/physics").status_code == 403


def test_managers_see_their_project_and_members_do_not(
    browser: Browser, alice: User, site: None, broker: FakeBroker
) -> None:
    project = Project.objects.create(name="vision", title="Computer vision")
    assert ask(browser, "carme_job_cpus", "account/carme-vision").status_code == 403
    member = Membership.objects.create(project=project, user=alice)
    assert ask(browser, "carme_job_cpus", "account/carme-vision").status_code == 403
    member.manager = True
    member.save()
    assert users_in(ask(browser, "carme_job_cpus", "account/carme-vision")) == {"dan"}
    assert users_in(ask(browser, 'carme_job_cpus{account="physics"}', "account/carme-vision")) == set()
    for account in ("vision", "physics", "carme-speech"):
        assert ask(browser, "carme_job_cpus", f"account/{account}").status_code == 403
    project.closed = timezone.now()
    project.save()
    assert ask(browser, "carme_job_cpus", "account/carme-vision").status_code == 403


def test_administrators_see_everything(browser: Browser, alice: User, site: None, broker: FakeBroker) -> None:
    assert ask(browser, "carme_job_cpus", "all").status_code == 403
    alice.is_superuser = True
    alice.save()
    assert users_in(ask(browser, "carme_job_cpus", "all")) == set(JOBS)
    assert users_in(ask(browser, "carme_job_cpus", "account/physics")) == {"carol"}


@pytest.mark.parametrize(
    "question",
    ["alerts", "rules", "targets", "status/config", "status/tsdb", "query_exemplars", "metadata",
     "label/../values", "admin/tsdb/delete_series", "read"],
)  # fmt: skip
def test_other_questions_are_not_passed_on(browser: Browser, site: None, question: str) -> None:
    assert browser.get(f"/metrics/mine/api/v1/{question}").status_code in (400, 404)


def test_unauthenticated_peers_are_sent_to_the_login(anonymous: Browser, site: None) -> None:
    assert ask(anonymous, "up").status_code == 302


def test_mistakes_and_an_absent_prometheus_are_reported(browser: Browser, settings, site: None) -> None:
    wrong = ask(browser, "sum(")
    assert wrong.status_code == 400 and "not PromQL" in wrong.json()["error"]
    late = ask(browser, "carme_job_cpus", question="query_range", start="x", end="1", step="1")
    assert late.status_code == 400 and "start" in late.json()["error"]
    place = settings.SITE.monitoring.model_copy(update={"prometheus": "https://127.0.0.1:9"})
    settings.SITE = settings.SITE.model_copy(update={"monitoring": place})
    away = ask(browser, "up")
    assert away.status_code == 502 and "cannot be read" in away.json()["error"]


def test_a_site_without_prometheus_has_no_such_pages(browser: Browser) -> None:
    assert ask(browser, "up").status_code == 404


def test_what_a_job_used_is_shown_as_bars_in_the_readers_language(
    browser: Browser, alice: User, broker: FakeBroker
) -> None:
    broker.put(make_job(1, submitted=NOW - timedelta(hours=2), started=NOW))
    Job.store(broker.queue.values())
    gpu = GpuUse(node="n1", gpu="0", busy=0.5, active=1.0)
    broker.measured[1] = Usage(seconds=60, gpus=[gpu], nodes=[NodeUse(node="n1", cpus=4, cpus_used=1)]), []
    User.objects.filter(pk=alice.pk).update(language="de")
    part = BeautifulSoup(browser.get("/jobs/1/use/").content, "html.parser")
    rows = {
        row.th.get_text(strip=True): row.td for row in part.select(".facts-table tr") if row.th and row.td
    }
    shown = {title: " ".join(cell.get_text().split()) for title, cell in rows.items()}
    assert shown["Angefordert"].startswith("1 Knoten, 1 GPU (a100), 4 Prozessoren, 8 GiB, ")
    assert (shown["Gewartet"], shown["Prozessoren"]) == ("2 Stunden", "25 % genutzt")
    meters = {title: cell.meter["value"] for title, cell in rows.items() if cell.meter}
    assert meters == {"GPUs": "0.500", "Prozessoren": "0.250", "n1 GPU 0": "0.500"}
    assert "[##" not in part.get_text() and "Keine. Das sieht gut aus." in part.get_text()
