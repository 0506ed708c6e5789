"""What administrators see and do, that it is on record, and that nobody else can."""

import csv
import json
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from auditlog.models import LogEntry
from bs4 import BeautifulSoup
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from scaling_results import write_result

from carme.broker import BrokerClient
from carme.errors import NotFound, SlurmError
from carme.jobs import SessionOptions
from carme.translation import message
from carme_webui.accounts.models import User
from carme_webui.administration.models import AuditEntry
from carme_webui.administration.services import KIND_NAMES, changed_kinds
from carme_webui.cluster import broker as site_broker
from carme_webui.jobs.models import Job
from carme_webui.profile.models import Notice
from carme_webui.projects import services
from carme_webui.projects.models import Membership, Project
from carme_webui.sessions.models import Session

from .conftest import PASSWORD, Browser, text, words
from .fake_broker import NOW, FakeBroker, make_job

PAGES = ["", "record/", "nodes/", "jobs/", "users/", "users/new/", "users/at/alice/", "jobs/7/stop/"]
PAGES += ["policies/", "record/export/"]


@pytest.mark.parametrize("page", PAGES)
def test_only_administrators_reach_the_administration(
    browser: Browser, anonymous: Browser, broker: FakeBroker, page: str
) -> None:
    assert browser.get(f"/admin/{page}").status_code == 404
    assert browser.send("/profile/", f"/admin/{page}", do="drain", name="x").status_code in (404, 405)
    assert anonymous.get(f"/admin/{page}").status_code == 302
    assert browser.send("/profile/", "/admin/nodes/n1/", do="drain", reason="x").status_code == 404
    assert not broker.requests_of("node") and not broker.requests_of("cancel")
    assert "/admin/" not in text(browser.get("/profile/"))


@pytest.mark.parametrize("page", PAGES)
def test_administrators_see_each_page(root: Browser, alice: User, broker: FakeBroker, page: str) -> None:
    broker.put(make_job(7))
    assert root.get(f"/admin/{page}").status_code == 200


# --- the record ------------------------------------------------------------------------------------------


def test_a_change_is_on_record_with_who_when_before_and_after(
    root: Browser, admin: User, alice: User, broker: FakeBroker
) -> None:
    services.create(admin, "vision", "Computer vision", alice, site_broker())
    page = "/projects/at/vision/limits/"
    root.send(page, page, title="Computer vision", gpus=3)
    root.send(page, page, title="Computer vision", gpus=5)
    [entry] = LogEntry.objects.filter(actor=admin, changes__gpus=["3", "5"])
    assert entry.content_type.model == "project" and entry.object_repr == "vision"
    shown = text(root.get("/admin/record/?q=vision&who=root1"))
    assert "3 → 5" in shown
    assert "No entries match" in text(root.get("/admin/record/?q=vision&who=alice"))
    assert "No entries match" in text(root.get("/admin/record/?until=2001-01-01"))
    for odd in ("?since=x&until=2026-99-99", "?page=x", "?q=%00", "?q=%25_'\"", "?who=" + "x" * 500):
        assert root.get(f"/admin/record/{odd}").status_code == 200


def test_the_record_is_filtered_by_kind(root: Browser, admin: User, alice: User) -> None:
    services.create(admin, "vision", "Computer vision", alice, site_broker())
    page = BeautifulSoup(text(root.get("/admin/record/?kind=project")), "html.parser")
    assert {name.text for name in page.select("tbody strong")} == {"vision"}
    chosen = page.select_one("select[name=kind] option[selected]")
    assert chosen and (chosen["value"], chosen.text) == ("project", "project")
    assert [link["href"] for link in page.select("form a.button")] == [
        "/admin/record/",
        "/admin/record/export/?q=&who=&kind=project&since=&until=",
    ]
    lines = b"".join(iter(root.get("/admin/record/export/?kind=project"))).decode().splitlines()
    assert {line["kind"] for line in csv.DictReader(lines)} == {"project"}
    every = root.get("/admin/record/?kind=nothing")
    assert every.context["requested"]["kind"] == "" and len(every.context["lines"]) > 1
    found = set(LogEntry.objects.values_list("content_type__model", flat=True))
    assert found <= changed_kinds().keys()
    assert changed_kinds().keys() == KIND_NAMES.keys()
    assert [name.replace(" ", "") for name in KIND_NAMES.values()] == list(KIND_NAMES)


def test_days_of_the_record_are_those_of_who_reads(root: Browser, admin: User, alice: User) -> None:
    """At half past eleven in the evening in UTC it is the next day in New Zealand."""
    alice.email = "new@carme.example"
    alice.save()
    entry = LogEntry.objects.filter(object_repr="alice", changes__has_key="email").latest("id")
    LogEntry.objects.exclude(pk=entry.pk).delete()
    LogEntry.objects.update(timestamp=datetime(2026, 11, 20, 23, 30, tzinfo=UTC))
    User.objects.filter(pk=admin.pk).update(time_zone="Pacific/Auckland")

    def seen(query: str) -> bool:
        return "No entries match" not in text(root.get(f"/admin/record/?{query}"))

    assert seen("since=2026-11-21&until=2026-11-21")
    assert not seen("until=2026-11-20") and not seen("since=2026-11-22")
    User.objects.filter(pk=admin.pk).update(time_zone="UTC")
    assert seen("since=2026-11-20&until=2026-11-20") and not seen("since=2026-11-21")


def test_no_secret_is_on_record(alice: User) -> None:
    alice.set_password("another secret")
    alice.save()
    entry = LogEntry.objects.filter(object_repr="alice").latest("id")
    assert list(entry.changes) == ["password"]
    assert "$" not in str(entry.changes) and "md5" not in str(entry.changes)


# --- nodes and jobs --------------------------------------------------------------------------------------


def test_a_node_is_drained_with_the_reason_and_that_is_on_record(root: Browser, broker: FakeBroker) -> None:
    root.send("/admin/nodes/", "/admin/nodes/n1/", do="drain", reason="fan broken")
    [sent] = broker.requests_of("node")
    assert (sent.name, sent.drain, sent.reason, sent.user) == ("n1", True, "fan broken (root1)", "root1")
    assert "drained the node n1: fan broken" in text(root.get("/admin/record/?q=drained"))
    root.send("/admin/nodes/", "/admin/nodes/n2/", do="resume")
    assert broker.requests_of("node")[-1].drain is False


def test_nodes_say_their_state_in_words_and_follow_a_change(root: Browser, broker: FakeBroker) -> None:
    first, *other_nodes = broker.cluster.nodes
    mixed = first.model_copy(update={"state": "MIXED+PLANNED"})
    broker.cluster = broker.cluster.model_copy(update={"nodes": [mixed, *other_nodes]})
    shown = words(root.get("/admin/nodes/"))
    assert "Partly in use, planned for a job that waits" in shown and "MIXED+" not in shown
    answer = root.send("/admin/nodes/", "/admin/nodes/n1/", do="drain", reason="fan")
    page = text(root.get(answer["Location"]))
    assert "sent to Slurm" in page and "every 3s" in page
    # Each reload requests the same address.
    again = text(root.get(f"{answer['Location']}&live=1"))
    assert again.count("live=1") == 1
    drained = first.model_copy(update={"state": "IDLE+DRAIN", "available": False, "reason": "fan"})
    broker.cluster = broker.cluster.model_copy(update={"nodes": [drained, *other_nodes]})
    live = text(root.get(f"{answer['Location']}&live=1"))
    assert "Drained" in live and "every 3s" not in live and "<h1" not in live


def test_all_jobs_have_pages_titles_and_times(root: Browser, alice: User, broker: FakeBroker) -> None:
    broker.put(make_job(7, name="carme-s12345678", kind="session", started=timezone.now(), minutes_limit=60))
    Session.request(alice, SessionOptions(image="torch", minutes=60, title="My thesis"), "s12345678")
    Session.objects.update(job_id=7)
    shown = text(root.get("/admin/jobs/"))
    assert (
        "My thesis" in shown
        and "/admin/jobs/7/" in shown
        and "2026-11-20T12:00:00Z" in shown
        and "RUNNING" not in shown
    )
    page = words(root.get("/admin/jobs/7/"))
    assert "My thesis" in page and "alice" in page and "8 GiB" in page and "Stop" in page
    assert root.get("/admin/jobs/99/").status_code == 302


def test_the_record_has_one_line_for_each_change(root: Browser, admin: User, alice: User) -> None:
    alice.email = "new@carme.example"
    alice.save()
    shown = words(root.get("/admin/record/?q=alice"))
    assert "email: new@carme.example" in shown and "None →" not in shown
    row = text(root.get("/admin/record/?q=alice")).split("<tbody>")[1].split("</tr>")[0]
    assert "<br>" not in row and "<div>" not in row


def test_what_the_broker_refuses_is_reported_and_not_on_record(root: Browser, broker: FakeBroker) -> None:
    broker.refusal = NotFound("There is no node 'n9'.", "Look again.")
    root.send("/admin/nodes/", "/admin/nodes/n9/", do="drain", reason="x")
    assert "no node &#x27;n9&#x27;" in text(root.get("/admin/nodes/"))
    assert not AuditEntry.objects.exists()


def test_the_overview_shows_use_queue_failures_and_services(
    root: Browser, alice: User, broker: FakeBroker
) -> None:
    now = timezone.now()
    broker.put(make_job(7, user="alice"))
    for number, hours in ((8, 2), (9, 1), (10, 1)):
        broker.put(make_job(number, state="PENDING", gpus=1, submitted=now - timedelta(hours=hours)))
    broker.put(make_job(11, state="PENDING", gpus=0, submitted=now - timedelta(minutes=9), partition="cpu"))
    options = SessionOptions(image="torch", minutes=60)
    Session.request(alice, options, "s12345678")
    Session.objects.update(state="ended", ending="image_missing", sentence="The image is missing.", job_id=9)
    page = text(root.get("/admin/"))
    tiles = re.findall(r'<li class="(level-\d(?: away)?)".*?>(n\d)</a> <span>([^<]*)</span>', page)
    assert tiles == [
        ("level-1", "n1", "1 of 4 GPUs"), ("level-0 away", "n2", "down"), ("level-0", "n3", "0 of 16 CPUs"),
    ]  # fmt: skip
    sums = re.findall(r"<div><dt>([^<]*)</dt><dd>([^<]*)</dd></div>", page)
    assert sums == [
        ("Nodes available", "2 / 3"), ("GPUs in use", "1 / 4"), ("Processors in use", "0 / 32"),
        ("Memory in use", "0\xa0B / 125\xa0GiB"), ("Jobs running", "1"), ("Jobs waiting", "4"),
    ]  # fmt: skip
    row = re.search(r'<th scope="row">gpu</th>(.*?)</tr>', page)
    assert row and re.findall("<td>(.*?)</td>", row[1]) == ["1", "3", "3", "1\xa0h", "2\xa0h"]
    # Each partition in which jobs wait has its bars, in the unit of the longest wait.
    (chart,) = BeautifulSoup(page, "html.parser")("carme-chart")
    spec = json.loads(str(chart["data-chart"]))
    assert (spec["labels"], spec["unit"]) == (["cpu", "gpu"], "min")
    assert [(series["name"], [round(value) for value in series["values"]]) for series in spec["series"]] == [
        ("median", [9, 60]), ("longest", [9, 120]),
    ]  # fmt: skip
    assert "The image is missing." in page and '/admin/jobs/9/">9</a>' in page
    assert page.count('class="state running"') + page.count('class="state failed"') == 4
    assert "default_minutes" in text(root.get("/admin/policies/"))


def test_the_heat_map_shows_memory_or_temperature(
    root: Browser, broker: FakeBroker, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *other_nodes = broker.cluster.nodes
    full = first.model_copy(update={"memory_mb": 64_000, "memory_used_mb": 63_000})
    broker.cluster = broker.cluster.model_copy(update={"nodes": [full, *other_nodes]})
    tile = re.compile(r'<li class="(level-\d)".*?>(n1)</a> <span>([^<]*)</span>')
    page = text(root.get("/admin/?by=memory"))
    assert tile.findall(page) == [("level-4", "n1", "61.5\xa0GiB of 62.5\xa0GiB")]
    # Only a site that measures knows temperatures.
    assert "by=temperature" not in page
    assert "of 4 GPUs" in text(root.get("/admin/?by=temperature"))
    monitoring = settings.SITE.monitoring.model_copy(update={"prometheus": "http://127.0.0.1:1"})
    settings.SITE = settings.SITE.model_copy(update={"monitoring": monitoring})
    broken = text(root.get("/admin/?by=temperature"))
    assert tile.findall(broken) == [("level-0", "n1", "not measured")] and "metrics cannot be read" in broken
    answer = {"data": {"result": [{"metric": {"node": "n1"}, "value": [0, "71.4"]}]}}
    monkeypatch.setattr("carme.reports.prometheus.Prometheus.ask", lambda *_: answer)
    page = text(root.get("/admin/?by=temperature"))
    assert tile.findall(page) == [("level-3", "n1", "71 °C")]
    assert '<a href="?by=temperature" aria-current="true">' in page
    answer["data"]["result"][0]["value"] = [0, "NaN"]
    assert tile.findall(text(root.get("/admin/?by=temperature"))) == [("level-0", "n1", "not measured")]


def test_nodes_have_bars_and_their_jobs(root: Browser, broker: FakeBroker) -> None:
    for number in range(7, 17):
        broker.put(make_job(number, node_list="n[1-2]", nodes=2))
    broker.put(make_job(30, state="PENDING", node_list=""))
    page = BeautifulSoup(root.get("/admin/nodes/").content, "html.parser")
    (row,) = page.select("#node-n1")
    bars = {bar["aria-label"]: (bar["value"], bar["max"]) for bar in row.select("progress")}
    assert bars["Processors"][1] == str(broker.cluster.nodes[0].cpus) and "GPUs" in bars and "Memory" in bars
    assert [link.text for link in row.select("td.node-jobs a")] == [*map(str, range(16, 8, -1)), "2 more"]
    shown = text(root.get(str(row.select("td.node-jobs a")[-1]["href"])))
    assert (
        all(f"/admin/jobs/{number}/" in shown for number in range(7, 17)) and "/admin/jobs/30/" not in shown
    )


def test_the_overview_says_what_is_away(root: Browser) -> None:
    page = text(root.get("/admin/"))
    assert page.count("Not known now.") == 2 and page.count('class="state failed"') >= 2
    for path in ("/admin/", "/admin/jobs/"):
        assert "No jobs are waiting or running." not in text(root.get(path)), "nobody knows that"


def test_a_search_without_a_match_says_so(root: Browser, broker: FakeBroker) -> None:
    broker.put(make_job(7, started=NOW))
    assert "No jobs match." in text(root.get("/admin/jobs/?q=nothing"))
    assert "No users match." in text(root.get("/admin/users/?q=nothing"))


@pytest.mark.parametrize("path", ["/maintenance/", "/announcements/"])
def test_administrators_find_their_other_pages_from_each_of_them(
    root: Browser, browser: Browser, broker: FakeBroker, path: str
) -> None:
    (here,) = BeautifulSoup(text(root.get(path)), "html.parser").select("nav.filters [aria-current=page]")
    assert here["href"] == path
    assert 'href="/admin/users/"' not in text(browser.get(path))


def test_failures_on_the_overview_and_of_a_log_link_to_the_help(
    root: Browser, browser: Browser, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job.store([broker.put(make_job(1))])
    error = SlurmError(message("This site has no scratch for staging."))

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise error

    for question in ("cluster", "log"):
        monkeypatch.setattr(BrokerClient, question, fail)
    for page, where in ((root.get("/admin/"), ".notice.bad a"), (browser.get("/jobs/1/"), "#log-trouble a")):
        links = BeautifulSoup(text(page), "html.parser").select(where)
        assert [link["href"] for link in links] == ["/help/data/#data-for-jobs-and-sessions"]


def test_the_audit_log_is_exported_as_it_is_searched(root: Browser, alice: User, browser: Browser) -> None:
    page = "/admin/users/at/alice/"
    root.send(page, page, do="close")
    alice.refresh_from_db()
    alice.first_name = "=1+1"
    alice.save()
    assert "record/export/?q=alice" in text(root.get("/admin/record/?q=alice"))
    answer = root.get("/admin/record/export/?q=alice&who=root1")
    assert answer["Content-Type"].startswith("text/csv") and "attachment" in answer["Content-Disposition"]
    lines = list(csv.DictReader(b"".join(iter(answer)).decode().splitlines()))
    assert lines and all(line["user"] == "root1" for line in lines)
    assert any("is_active" in line["changes"] or "alice" in line["object"] for line in lines)
    everything = b"".join(iter(root.get("/admin/record/export/"))).decode()
    assert all(not field.startswith("=") for line in csv.reader(everything.splitlines()) for field in line)
    assert browser.get("/admin/record/export/").status_code in (302, 404)


def test_a_job_is_stopped_and_its_owner_notified(root: Browser, browser: Browser, broker: FakeBroker) -> None:
    broker.put(make_job(7))
    assert "job 7" in text(root.get("/admin/jobs/?q=alice"))
    assert "No jobs match." in text(root.get("/admin/jobs/?q=bob"))
    root.send("/admin/jobs/7/stop/", "/admin/jobs/7/stop/", message="The room gets <b>hot</b>.")
    [requested] = broker.requests_of("cancel")
    assert (requested.job_id, requested.user) == (7, None), "not as its owner"
    page = text(browser.get("/profile/"))
    assert "ended your job 7 (job 7). The room gets &lt;b&gt;hot&lt;/b&gt;." in page and "badge" in page
    assert "ended job 7" in text(root.get("/admin/record/?q=ended"))
    browser.send("/profile/", "/profile/read/")
    assert "badge" not in text(browser.get("/profile/"))
    assert Notice.objects.get().read


# --- onboarding ------------------------------------------------------------------------------------------


def test_a_user_is_sent_a_message(root: Browser, browser: Browser, alice: User, broker: FakeBroker) -> None:
    page = "/admin/users/at/alice/"
    root.send(page, page, do="message", message="  Please use <b>\n/scratch. ")
    notice = Notice.objects.get(user=alice)
    assert notice.text == "Message from an administrator: Please use <b> /scratch."
    assert "Please use &lt;b&gt; /scratch." in text(browser.get("/profile/"))
    assert AuditEntry.objects.get().text == "sent alice a message: Please use <b> /scratch."
    root.send(page, page, do="message", message=" ")
    assert Notice.objects.count() == 1


def test_a_message_about_a_job_begins_with_its_number(root: Browser, alice: User, broker: FakeBroker) -> None:
    broker.put(make_job(7))
    link = re.findall(r'href="([^"]+)#message"', root.get("/admin/jobs/").content.decode())
    assert link == ["/admin/users/at/alice/?job=7"]
    assert 'value="Your job 7: "' in root.get(link[0]).content.decode()
    assert 'value=""' in root.get("/admin/users/at/alice/?job=<b>").content.decode()


def test_an_added_user_can_work_at_once(root: Browser, admin: User, alice: User, broker: FakeBroker) -> None:
    project = services.create(admin, "vision", "Computer vision", alice, site_broker())
    page = "/admin/users/new/"
    answer = root.send(page, page, name="carol", email="carol@carme.example", project=project.pk)
    shown = text(answer)
    assert "carol can work now" in shown and "no-store" in answer["Cache-Control"]
    password = shown.split("<code>")[1].split("</code>")[0]
    assert User.objects.get(username="carol").check_password(password)
    assert [requested.name for requested in broker.requests_of("enrol")] == ["carol"]
    assert set(broker.granted["carme-vision"].members) == {"alice", "carol"}
    # Requested again, nothing is done twice, and the password stays.
    shown = text(root.send(page, page, name="carol", project=project.pk))
    assert "<code>" not in shown and Membership.objects.filter(user__username="carol").count() == 1


def test_without_a_unix_account_nothing_is_left_over(root: Browser, broker: FakeBroker) -> None:
    broker.refusal = NotFound("There is no account 'carol' on this host.", "Ask an administrator.")
    answer = root.send("/admin/users/new/", "/admin/users/new/", name="carol")
    assert answer.status_code == 422 and "no account &#x27;carol&#x27;" in text(answer)
    assert not User.objects.filter(username="carol").exists()


@pytest.mark.parametrize("name", ["anna.maria", "x@lab.org", "Carol"])
def test_names_that_unix_takes_are_taken(root: Browser, broker: FakeBroker, name: str) -> None:
    assert root.send("/admin/users/new/", "/admin/users/new/", name=name).status_code == 200
    assert User.objects.filter(username=name).exists() and broker.requests_of("enrol")[0].name == name
    assert root.get(f"/admin/users/at/{name}/").status_code == 200
    new_browser = Browser()
    new_browser.force_login(User.objects.get(username=name))
    for page in ("/", "/jobs/", "/bookings/", "/profile/", "/tokens/"):
        assert new_browser.get(page).status_code == 200, page


@pytest.mark.parametrize("name", ["1000", "-rf", "a b", "../x", "", "x;rm"])
def test_an_invalid_name_gets_a_sentence(root: Browser, broker: FakeBroker, name: str) -> None:
    answer = root.send("/admin/users/new/", "/admin/users/new/", name=name)
    assert answer.status_code == 422 and not broker.requests_of("enrol")


def test_an_account_is_closed_and_opened(root: Browser, alice: User, browser: Browser) -> None:
    page = "/admin/users/at/alice/"
    root.send(page, page, do="close")
    assert browser.get("/").status_code == 302
    root.send(page, page, do="open")
    alice.refresh_from_db()
    assert alice.is_active
    own = "/admin/users/at/root1/"
    root.send(own, own, do="close")
    assert root.get("/admin/").status_code == 200, "nobody shuts themselves out"


# --- impersonating a user --------------------------------------------------------------------------------


def impersonate(root: Browser) -> None:
    page = "/admin/users/at/alice/"
    assert root.send(page, page, do="impersonate").status_code == 302


def test_an_admin_sees_what_the_user_sees_and_each_page_is_on_record(
    root: Browser, browser: Browser, admin: User, alice: User, broker: FakeBroker
) -> None:
    services.create(admin, "vision", "Computer vision", alice, site_broker())
    impersonate(root)
    page = text(root.get("/projects/"))
    assert "My projects" in page and "You are viewing as alice (read-only)." in page
    assert [str(entry) for entry in AuditEntry.objects.filter(by=admin)] == [
        "began to view the portal as alice", "viewed /projects/ as alice",
    ]  # fmt: skip
    assert root.get("/admin/").status_code == 403
    # The parts that pages of the user load by themselves.
    loaded = ("/files/quota/", "/metrics/sparks/", "/jobs/month/", "/jobs/1/use/", "/jobs/1/facts/")
    for part in (*loaded, "/bookings/share/"):
        assert root.get(part).status_code != 403, part
    token = root.token("/projects/")
    assert root.send_with(token, "/sessions/estimate/", user="root1", minutes="5").status_code == 200
    assert AuditEntry.objects.filter(by=admin).count() == 3  # with the second visit of the projects
    root.send("/projects/", "/admin/impersonation/end/")
    assert "All projects" in text(root.get("/projects/"))


@pytest.mark.parametrize(
    "page",
    ["/profile/security/", "/profile/security/recovery-codes/", "/identity/o/authorize", "/accounts/logout/",
     "/profile/security/totp/activate/", "/api/", "/files/", "/admin/users/"],
)  # fmt: skip
def test_secrets_and_sign_ins_are_not_shown(
    root: Browser, alice: User, broker: FakeBroker, page: str
) -> None:
    impersonate(root)
    assert root.get(page).status_code == 403


def test_the_secret_address_of_the_calendar_is_not_shown(
    root: Browser, browser: Browser, alice: User, broker: FakeBroker
) -> None:
    assert "feed-heading" in text(browser.get("/bookings/"))
    impersonate(root)
    assert "feed-heading" not in text(root.get("/bookings/"))


def test_files_of_the_home_are_neither_listed_nor_read(
    root: Browser, browser: Browser, alice: User, broker: FakeBroker
) -> None:
    broker.home.mkdir()
    write_result(broker.home / "scale.json")
    form = {"image": "torch", "partition": "gpu", "gpus_per_node": 1, "nodes": 1, "minutes": 60}
    form["scaling"] = "scale.json"
    assert "Cheapest" in text(browser.send("/", "/sessions/estimate/", **form))
    assert "scale.json" in browser.get("/sessions/probes/").content.decode()
    broker.requests.clear()
    impersonate(root)
    token = root.token("/projects/")
    answer = root.send_with(token, "/sessions/estimate/", user="root1", **form)
    assert answer.status_code == 200 and "Cheapest" not in text(answer) and "Starts now" in text(answer)
    assert "scale.json" not in root.get("/sessions/probes/").content.decode()
    assert not broker.requests_of("files")


def test_guides_can_be_read_meanwhile(root: Browser, alice: User, broker: FakeBroker) -> None:
    impersonate(root)
    assert root.get("/help/").status_code == root.get("/help/sessions/").status_code == 200


def test_nothing_can_be_changed_meanwhile(
    root: Browser, admin: User, alice: User, broker: FakeBroker
) -> None:
    services.create(admin, "vision", "Computer vision", alice, site_broker())
    token = root.token("/projects/at/vision/")
    impersonate(root)
    for page in ("/projects/at/vision/", "/sessions/start/", "/profile/read/", "/projects/at/vision/state/"):
        assert root.send_with(token, page, user="root1", do="close").status_code == 403
    assert Project.objects.get().closed is None


def test_a_view_that_is_open_while_the_portal_is_upgraded_stays_read_only(
    root: Browser, alice: User, broker: FakeBroker
) -> None:
    token = root.token("/projects/")
    session = root.session
    session["carme-looks-as"] = [alice.pk, time.time()]  # as earlier versions have stored it
    session.save()
    assert "You are viewing as alice (read-only)." in text(root.get("/"))
    assert root.send_with(token, "/profile/read/", user="root1").status_code == 403


def test_only_admins_impersonate_and_nobody_impersonates_admins(
    root: Browser, browser: Browser, admin: User, alice: User
) -> None:
    second_admin = User.objects.create_user("root2", password=PASSWORD, is_staff=True)
    page = f"/admin/users/at/{second_admin.username}/"
    root.send(page, page, do="impersonate")
    assert "You are viewing as" not in text(root.get("/profile/"))
    impersonate(root)
    admin.is_staff = False
    admin.save()
    assert "alice" not in text(root.get("/profile/")), "without the rights the read-only view ends"


def test_no_page_asks_more_with_more_rows(
    root: Browser, admin: User, alice: User, broker: FakeBroker
) -> None:
    def queries(page: str) -> int:
        with CaptureQueriesContext(connection) as found:
            root.get(f"/admin/{page}")
        return len(found)

    pages = ["record/", "users/", "users/at/alice/", "jobs/"]
    broker.put(make_job(99))
    for page in pages:
        queries(page)
    before = [queries(page) for page in pages]
    for number in range(30):
        User.objects.create(username=f"u{number}")
        Membership.objects.create(project=Project.objects.create(name=f"p{number}", title="t"), user=alice)
        broker.put(make_job(100 + number))
    assert [queries(page) for page in pages] == before


def test_the_onboard_command_adds_a_user_and_reports_what_it_did(
    admin: User, alice: User, broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    services.create(admin, "vision", "Computer vision", alice, site_broker())
    call_command("onboard", "carol", "--project", "vision", "--json")
    reported = json.loads(capsys.readouterr().out)
    assert User.objects.get(username="carol").check_password(reported["password"])
    assert "added to the project vision" in reported["done"]
    call_command("take_in", "carol", "--json")  # the earlier name
    again = capsys.readouterr()
    assert json.loads(again.out)["password"] == "" and "carme-portal onboard" in again.err
    with pytest.raises(CommandError, match="no open project 'x'"):
        call_command("onboard", "carol", "--project", "x")
    broker.refusal = NotFound("There is no account 'dave' on this host.", "Ask an administrator.")
    with pytest.raises(CommandError, match="no account 'dave'"):
        call_command("onboard", "dave")
