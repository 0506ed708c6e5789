"""The pages of jobs, and submitting them."""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from django.conf import settings
from django.utils import timezone

from carme.broker import AsyncBrokerClient
from carme.broker.protocol import JobFacts
from carme.errors import SlurmError
from carme.jobs import JobRequest, SessionOptions, contents
from carme.jobs.scripts import sent
from carme.jobs.templates import TEMPLATES
from carme.translation import message
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job
from carme_webui.jobs.views import _follow
from carme_webui.sessions.models import Session

from .conftest import Browser, text, words
from .fake_broker import NOW, FakeBroker, make_job, make_session
from .job_steps import read_changes

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
    assert not broker.requests_of("log") and not broker.requests_of("report")


def test_a_job_shows_the_end_of_its_log_read_as_its_owner(browser: Browser, broker: FakeBroker) -> None:
    broker.logs[1] = b"first line\n" + b"x" * 20_000 + b"\n<b>last</b> line\n"
    Job.store([broker.put(make_job(1, state="FAILED", exit_code=3, ended=NOW))])
    page = browser.get("/jobs/1/").content.decode()
    assert "&lt;b&gt;last&lt;/b&gt; line" in page
    assert "first line" not in page
    assert "exit code 3" in page
    assert {request.user for request in broker.requests_of("log")} == {"alice"}


def test_a_log_that_cannot_be_read_is_reported(browser: Browser, broker: FakeBroker) -> None:
    Job.store([broker.put(make_job(1, key=None))])
    page = browser.get("/jobs/1/").content.decode()
    assert "Carme did not start job 1, so it does not know where its log is." in page


@pytest.mark.usefixtures("frozen_clock")
@pytest.mark.parametrize(
    ("minutes", "left", "level"),
    [(5, 4.9, ""), (5, 1, "near"), (5, 0.4, "urgent"), (60, 16, ""), (60, 10, "near"), (60, 4, "urgent")],
)
def test_a_job_is_near_its_end_by_minutes_and_by_the_share_of_its_time(
    browser: Browser, broker: FakeBroker, minutes: int, left: float, level: str
) -> None:
    started = timezone.now() - timedelta(minutes=minutes - left)
    Job.store([broker.put(make_job(1, kind="batch", started=started, minutes_limit=minutes))])
    assert f'class="remaining {level}"' in text(browser.get("/jobs/1/"))


@pytest.mark.parametrize(("language", "limit"), [("en", "1 hour 30 minutes"), ("de", "1 Stunde 30 Minuten")])
def test_memory_and_time_of_a_job_are_in_the_units_that_people_read(
    browser: Browser, broker: FakeBroker, language: str, limit: str
) -> None:
    started = timezone.now() - timedelta(minutes=10)
    Job.store([broker.put(make_job(1, kind="batch", started=started, memory_mb=65_536, minutes_limit=90))])
    page = BeautifulSoup(
        browser.get("/jobs/1/", headers={"accept-language": language}).content, "html.parser"
    )
    facts = [fact.get_text() for fact in page.select("dl.pairs dd")]
    assert "64\xa0GiB" in facts and limit in facts
    # So is the time that is left, and what can be added to it.
    shown = " ".join(found.get_text() for found in page.select("#limit-end, #extend"))
    assert ("hour" in shown, "Stunde" in shown) == (language == "en", language == "de"), shown


def test_a_job_says_why_nothing_is_known_of_its_use(browser: Browser, broker: FakeBroker) -> None:
    for job, monitored, sentence in (
        (make_job(1, state="PENDING"), True, "nothing yet: it has not started"),
        (make_job(1, started=NOW), True, "not known yet: the first measurements come"),
        (make_job(1, started=NOW), False, "this site has no monitoring"),
        (make_job(1, state="COMPLETED", ended=NOW), True, "nothing was measured"),
    ):
        Job.store([broker.put(job)])
        broker.has_prometheus = monitored
        assert sentence in words(browser.get("/jobs/1/use/"))
    broker.put(make_job(1, started=NOW))
    read_changes()
    assert "state from:body" in text(browser.get("/jobs/1/use/")), "asked for anew when the job starts"


def test_without_a_report_the_page_says_why(browser: Browser, broker: FakeBroker) -> None:
    Job.store([make_job(1, state="COMPLETED", ended=NOW)])  # Slurm has forgotten it
    part = browser.get("/jobs/1/use/").content.decode()
    assert "There is no job 1 of alice." in part
    assert "every 30s" not in part


def test_pages_work_while_the_broker_is_down(browser: Browser) -> None:
    Job.store([make_job(1, name="kept")])
    read_changes()
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
def test_the_list_is_filtered_by_state(
    browser: Browser, broker: FakeBroker, state: str, shown: set[int]
) -> None:
    kinds = ["PENDING", "RUNNING", "COMPLETED", "CANCELLED", "OUT_OF_MEMORY"]
    Job.store(make_job(number, state=kind) for number, kind in enumerate(kinds, 1))
    page = browser.get("/jobs/", {"state": state}).content.decode()
    assert {number for number in range(1, 6) if f'href="/jobs/{number}/"' in page} == shown
    assert "<script>" not in page.replace("<script src", "")


def test_years_of_history_are_searched(browser: Browser, broker: FakeBroker) -> None:
    Job.store(
        [
            make_job(
                1, name="train <resnet>", state="COMPLETED", submitted=NOW - timedelta(days=900), kind="batch"
            ),
            make_job(2, name="Train bert", state="FAILED", submitted=NOW),
            make_job(33, name="notebook", state="COMPLETED", submitted=NOW),
        ]
    )

    def found(**query: str) -> set[int]:
        page = browser.get("/jobs/", query)
        assert page.status_code == 200
        return {number for number in (1, 2, 33) if f'href="/jobs/{number}/"' in page.content.decode()}

    assert found(q="TRAIN") == {1, 2} and found(q="33") == {33} and found(q="train", state="failed") == {2}
    assert found(until=str((NOW - timedelta(days=1)).date())) == {1} and found(kind="batch") == {1}
    assert found(since=str(NOW.date()), until=str(NOW.date())) == {2, 33}
    assert found(q="'; DROP TABLE") == set() and found(q="9" * 100) == set()
    for odd in (
        {"since": "x"},
        {"since": "0001-01-01"},
        {"until": "9999-12-31"},
        {"kind": "x"},
        {"q": "a\0b"},
    ):
        found(**odd)


# --- submitting ------------------------------------------------------------------------------------------

FIELDS = {"nodes": "1", "gpus_per_node": "0", "minutes": "5"}


def test_sbatch_lines_count_where_the_form_says_nothing(browser: Browser, broker: FakeBroker) -> None:
    script = "#!/bin/sh\r\n#SBATCH --gpus=2 --time=30 -o log\r\ntrue\r\n"
    answer = browser.send("/jobs/submit/", "/jobs/submit/", script=script, **FIELDS)
    (requested,) = broker.requests_of("submit")
    assert (requested.request.gpus_per_node, requested.request.minutes) == (2, 5)
    shown = browser.get(answer["Location"], follow=True).content.decode()
    assert "options that are ignored: -o." in shown


def test_what_the_user_set_counts_even_as_the_form_begins(browser: Browser, broker: FakeBroker) -> None:
    script = "#!/bin/sh\r\n#SBATCH --gpus-per-node=2 --nodes=2\r\ntrue\r\n"
    fields = FIELDS | {"own_fields": "nodes none"}
    browser.send("/jobs/submit/", "/jobs/submit/", script=script, **fields)
    (requested,) = broker.requests_of("submit")
    assert (requested.request.gpus_per_node, requested.request.nodes) == (2, 1)


def bars_of(page: str) -> list[tuple[str, float, float]]:
    """The bars of a job's page: their kind, and their start and end in minutes from NOW."""
    (drawn,) = BeautifulSoup(page, "html.parser")("carme-spans")
    spans = [span for row in json.loads(str(drawn["data-spans"]))["rows"] for span in row["spans"]]
    begin = NOW.timestamp()
    return [(span["kind"], (span["start"] - begin) / 60, (span["end"] - begin) / 60) for span in spans]


def test_a_jobs_page_shows_its_life_as_bars_with_a_table(
    browser: Browser, alice: User, broker: FakeBroker
) -> None:
    times: dict[str, Any] = {"submitted": NOW, "started": NOW + timedelta(minutes=5)}
    times["ended"] = NOW + timedelta(minutes=20)
    reported = make_job(7, state="COMPLETED", kind="batch", nodes=2, node_list="n[1-2]", **times)
    Job.store([reported])
    page = browser.get("/jobs/7/").content.decode()
    assert bars_of(page) == [("queued", 0, 5), ("running", 5, 20), ("running", 5, 20)]
    row = r'<th scope="row">([^<]+)</th><td>([^<]+)</td><td><time.*?</td><td><time.*?</td><td>([^<]+)</td>'
    rows = re.findall(row, page)
    assert rows == [("Queue", "Queued", "5 minutes"), *[(n, "Running", "15 minutes") for n in ("n1", "n2")]]
    # Of a session it is known when its server was there.
    Session.request(alice, SessionOptions(image="torch", minutes=60), "s12345678")
    marks = make_session("s12345678", steps=7).model_copy(update={"job_id": 7})
    moved = [mark.model_copy(update={"at": NOW + timedelta(minutes=10)}) for mark in marks.marks]
    marks = marks.model_copy(update={"marks": tuple(moved)})
    Session.objects.update(job_id=7, reported=marks.model_dump(mode="json"))
    Job.objects.update(kind="session")
    assert bars_of(browser.get("/jobs/7/").content.decode())[1] == ("staging", 5, 10)


def test_an_arrays_tasks_are_a_grid(browser: Browser, broker: FakeBroker) -> None:
    for number, task, state in ((31, 0, "COMPLETED"), (32, 1, "FAILED"), (33, 2, "RUNNING")):
        Job.store([make_job(number, state=state, array_id=30, task=task, kind="batch", started=NOW)])
    Job.store([make_job(30, state="PENDING", array_id=30, tasks="3-5%2", kind="batch", started=None)])
    page = browser.get("/jobs/30/").content.decode()
    found = re.findall(r'class="cell (\w+)"[^>]*title="(\w+)">(\d+)<', page)
    assert found == [
        ("completed", "Completed", "0"), ("failed", "Failed", "1"), ("running", "Running", "2"),
        *[("waiting", "Waiting", str(task)) for task in (3, 4, 5)],
    ]  # fmt: skip
    assert '<a class="cell failed" href="/jobs/32/"' in page


def test_what_few_jobs_need_is_behind_a_switch(browser: Browser, broker: FakeBroker) -> None:
    page = browser.get("/jobs/submit/").content.decode()
    common, _, more = page.partition('<details class="more">')
    for name in ("script", "name", "image", "gpus_per_node", "nodes", "time", "hours", "minutes"):
        assert f'name="{name}"' in common and f'name="{name}"' not in more
    for name in ("array", "stage", "results", "workdir", "partition", "account", "cpus_per_node"):
        assert f'name="{name}"' in more
    refused = browser.send("/jobs/submit/", "/jobs/submit/", script="x", cpus_per_node="0", **FIELDS)
    assert refused.status_code == 422 and '<details class="more" open>' in refused.content.decode()


@pytest.mark.parametrize(
    ("sent", "minutes"),
    [
        ({"time": "240", "hours": "9", "minutes": "9"}, 240),
        ({"time": "1440"}, 1440),
        ({"time": "custom", "hours": "2", "minutes": "30"}, 150),
        ({"time": "", "minutes": "90"}, 90),
        ({"time": "60", "own_fields": "minutes"}, 60),
        ({"time": "60"}, 30),
    ],
)
def test_a_time_is_a_choice_or_hours_and_minutes(
    browser: Browser, broker: FakeBroker, sent: dict[str, str], minutes: int
) -> None:
    fields = {"nodes": "1", "gpus_per_node": "0", "script": "#!/bin/sh\n#SBATCH --time=30\ntrue\n", **sent}
    # Beyond eight hours only this partition takes jobs.
    answer = browser.send("/jobs/submit/", "/jobs/submit/", partition="cpu", **fields)
    assert answer.status_code == 302, answer.content.decode()
    (submitted,) = broker.requests_of("submit")
    assert submitted.request.minutes == minutes


def test_a_time_that_the_broker_refuses_is_seen(browser: Browser, broker: FakeBroker) -> None:
    fields = {"time": "1440", "script": "x", "gpus_per_node": "0", "nodes": "1"}
    refused = browser.send("/jobs/submit/", "/jobs/submit/", **fields)
    assert refused.status_code == 422 and not broker.wanted
    page = BeautifulSoup(refused.content, "html.parser")
    (chosen,) = page.select("input[name=time][checked]")
    assert chosen["value"] == "custom"
    shown = page.select_one(".custom:has([name=minutes])")
    assert shown is not None and "at most 8 h" in shown.get_text(" ")


def test_a_job_that_may_wait_is_offered_no_time_until_the_evening(
    browser: Browser, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carme_webui.sessions.choices.evening_minutes", lambda now: 300)
    assert dict(browser.get("/").context["form"].fields["time"].choices)["evening"] == "until 18:00"
    assert "evening" not in dict(browser.get("/jobs/submit/").context["form"].fields["time"].choices)


def test_a_job_that_is_submitted_again_has_its_time(browser: Browser, broker: FakeBroker) -> None:
    for number, minutes in ((50, 240), (51, 95)):
        broker.wanted[number] = JobRequest(kind="batch", name="old", command=["true"], minutes=minutes)
        Job.store([broker.put(make_job(number, kind="batch", name="old"))])
    forms = [browser.get(f"/jobs/submit/?job={number}").context["form"] for number in (50, 51)]
    values = [tuple(form[name].value() for name in ("time", "hours", "minutes")) for form in forms]
    assert values == [("240", 4, 0), ("custom", 1, 35)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_begins_with_the_template_of_a_framework(browser: Browser, name: str) -> None:
    template = TEMPLATES[name]
    page = browser.get("/jobs/submit/").content.decode()
    assert f'<a href="?pattern={name}">{template.title}</a>' in page
    page = browser.get(f"/jobs/submit/?pattern={name}").content.decode()
    assert f"\ncarme-run --backend {name} {template.program}\n" in page
    assert re.search(rf'name="nodes" value="{template.nodes}"', page)
    assert re.search(rf'name="gpus_per_node" value="{template.gpus_per_node}"', page)


def test_the_template_of_a_framework_has_the_image_of_its_name(browser: Browser) -> None:
    """If the site has such an image; otherwise the default one."""
    folder = Path(settings.SITE.images.directory)
    added = [folder / "dask.sif", folder / "dask.json"]
    try:
        for file in added:
            file.write_text('{"name": "dask", "title": "Dask"}')
        forms = [browser.get(f"/jobs/submit/?pattern={name}").context["form"] for name in ("dask", "ray")]
        assert [form["image"].value() for form in forms] == ["dask", settings.SITE.images.default]
    finally:
        for file in added:
            file.unlink()


def test_the_form_begins_with_a_comparison_of_frameworks(browser: Browser) -> None:
    page = browser.get("/jobs/submit/").content.decode()
    assert '<a href="?pattern=compare">A comparison of frameworks</a>' in page
    page = browser.get("/jobs/submit/?pattern=compare").content.decode()
    assert "\ncarme-run compare --output ~/comparison\n" in page
    assert re.search(r'name="nodes" value="2"', page)
    assert re.search(r'name="cpus_per_node" value="8"', page)
    assert re.search(r'name="memory_mb_per_node" value="12000"', page)
    assert re.search(r'name="gpus_per_node" value="0"', page)


def test_a_job_from_the_browser_to_its_cancelling(browser: Browser, broker: FakeBroker) -> None:
    page = browser.get("/jobs/submit/?pattern=distributed").content.decode()
    assert "carme-run train.py" in page
    script = "#!/bin/bash\r\necho $HOME\r\n"
    checked = browser.send("/jobs/submit/", "/jobs/submit/", script=script, check="1", **FIELDS)
    assert "You can submit this" in checked.content.decode() and not broker.requests_of("submit")
    answer = browser.send(
        "/jobs/submit/", "/jobs/submit/", script=script, arguments="'a b' c", name="mine", **FIELDS
    )
    (query,) = broker.requests_of("submit")
    assert query.user == "alice" and query.request.name == "mine"
    assert query.request.files == {"script": "#!/bin/bash\necho $HOME\n"} and query.request.command[-2:] == [
        "a b",
        "c",
    ]
    assert answer.status_code == 302
    shown = browser.get(answer["Location"], follow=True)
    number = shown.resolver_match.kwargs["job_id"]
    assert f"Job {number}" in shown.content.decode()
    assert "echo $HOME" in browser.get(f"/jobs/{number}/recipe/").content.decode()
    assert "echo $HOME" in browser.get(f"/jobs/submit/?job={number}").content.decode()
    again = browser.send(f"/jobs/{number}/", f"/jobs/{number}/resubmit/")
    assert len(broker.wanted) == 2 and again.status_code == 302
    browser.send(f"/jobs/{number}/cancel/", f"/jobs/{number}/cancel/")
    assert [request.job_id for request in broker.requests_of("cancel")] == [number]


LATIN_1 = b"#!/usr/bin/env python3\n# -*- coding: latin-1 -*-\nprint('caf\xe9 \x80')\n"


def test_a_script_that_is_no_utf_8_keeps_its_bytes_when_it_is_submitted_once_more(
    browser: Browser, broker: FakeBroker
) -> None:
    command, files = sent(contents.from_bytes(LATIN_1))
    broker.wanted[50] = JobRequest(
        kind="batch", name="old", command=command, files=files, minutes=5, partition="gpu"
    )
    Job.store([broker.put(make_job(50, kind="batch", name="old"))])
    assert "café" in text(browser.get("/jobs/50/recipe/"))
    browser.send("/jobs/50/", "/jobs/50/resubmit/")
    assert contents.to_bytes(broker.wanted[max(broker.wanted)].files["script"]) == LATIN_1
    form = BeautifulSoup(browser.get("/jobs/submit/?job=50").content, "html.parser")
    area, hidden = form.select_one("textarea[name=script]"), form.select_one("[name=script_encoding]")
    assert area and hidden and "stay as they are" in form.get_text(" ", strip=True)
    # As a browser sends it: it drops the first line end behind the tag, and the others are those of Windows.
    script = area.get_text().removeprefix("\n").replace("\n", "\r\n")
    fields = FIELDS | {"script_encoding": str(hidden["value"])}
    browser.send("/jobs/submit/?job=50", "/jobs/submit/", script=script + "print('ü')\r\n", **fields)
    saved = contents.to_bytes(broker.wanted[max(broker.wanted)].files["script"])
    assert saved == LATIN_1 + b"print('\xfc')\n"
    refused = browser.send("/jobs/submit/?job=50", "/jobs/submit/", script=script + "€", **fields)
    assert refused.status_code == 422 and "letters that its encoding, Latin-1, does not have" in text(refused)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "Write a script here, or name one in your home"),
        ({"script": "x", "script_path": "y"}, "exactly one of"),
        ({"script_path": "nothing.sh"}, "There is no script"),
        ({"script": "x", "nodes": "99"}, "99 were requested"),
        ({"script": "x", "arguments": "'"}, "not closed"),
        ({"script": "x", "image": "none"}, "There is no image"),
        ({"script": "x", "name": "<b>"}, "must be 1 to 64 letters"),
        ({"script": "x", "minutes": "0"}, "Enter a time of at least one minute."),
        ({"script": "x", "hours": "-1"}, "greater than or equal"),
        ({"script": "x", "reservation": "carme-0123456789ab"}, None),
    ],
)
def test_what_cannot_be_submitted_comes_back_with_the_reason(
    browser: Browser, broker: FakeBroker, fields: dict[str, str], sentence: str | None
) -> None:
    page = browser.send("/jobs/submit/", "/jobs/submit/", **(FIELDS | fields))
    if sentence is not None:
        assert page.status_code == 422 and sentence in page.content.decode()
        assert not broker.queue


@pytest.mark.usefixtures("frozen_clock")
def test_a_job_that_runs_gets_more_time(browser: Browser, broker: FakeBroker) -> None:
    began = timezone.now() - timedelta(minutes=10)
    Job.store([
        broker.put(make_job(1, kind="batch", started=began, minutes_limit=60)),
        broker.put(make_job(2, kind="batch", state="PENDING", minutes_limit=60)),
    ])  # fmt: skip
    page = browser.get("/jobs/1/").content.decode()
    assert "50 minutes left" in page and 'action="/jobs/1/extend/"' in page
    assert 'id="extend"' not in browser.get("/jobs/2/").content.decode()
    browser.send("/jobs/1/", "/jobs/1/extend/", minutes="30")
    requested = broker.requests_of("extend")
    assert [(request.job_id, request.minutes, request.user) for request in requested] == [(1, 30, "alice")]
    assert "The job now ends at" in browser.get("/jobs/1/").content.decode()
    for minutes in ("", "0", "-5", "x", "9" * 5000):
        browser.send("/jobs/1/", "/jobs/1/extend/", minutes=minutes)
        assert "must be a number of minutes from 1 to" in browser.get("/jobs/1/").content.decode()
    assert len(broker.requests_of("extend")) == 1
    broker.refusal = SlurmError("Another job waits for <its> node.", "Ask for at most 20 minutes.")
    browser.send("/jobs/1/", "/jobs/1/extend/", minutes="30")
    assert (
        "Another job waits for &lt;its&gt; node. Ask for at most 20"
        in browser.get("/jobs/1/").content.decode()
    )


@pytest.mark.usefixtures("frozen_clock")
def test_the_time_that_is_left_is_slurms(browser: Browser, broker: FakeBroker) -> None:
    began, later = timezone.now() - timedelta(minutes=10), timezone.now() + timedelta(minutes=57)
    Job.store([
        broker.put(make_job(1, kind="batch", started=began, minutes_limit=60, planned_end=later)),
        broker.put(make_job(2, kind="batch", state="SUSPENDED", started=began, minutes_limit=60)),
    ])  # fmt: skip
    assert "57 minutes left" in browser.get("/jobs/1/").content.decode()
    page = browser.get("/jobs/2/").content.decode()
    assert "An administrator suspended the job" in page and "minutes left" not in page
    assert Job.objects.get(id=2).remaining is None


def test_data_folder_and_results_are_requested_shown_and_stored(
    browser: Browser, broker: FakeBroker, settings: Any, tmp_path: Path
) -> None:
    staging = settings.SITE.staging.model_copy(update={"scratch": tmp_path})
    settings.SITE = settings.SITE.model_copy(update={"staging": staging})
    preferred = {
        "workdir": "/home/alice/run",
        "stage": "/data/a, scratch:/data/b",
        "results": "/home/alice/<out>",
    }
    answer = browser.send("/jobs/submit/", "/jobs/submit/", script="true", **preferred, **FIELDS)
    assert answer.status_code == 302, answer.content.decode()
    (requested,) = broker.requests_of("submit")
    assert [(data.source, data.target) for data in requested.request.stage] == [
        ("/data/a", "local"),
        ("/data/b", "scratch"),
    ]
    number = browser.get(answer["Location"], follow=True).resolver_match.kwargs["job_id"]
    message = browser.get(f"/jobs/{number}/recipe/").content.decode()
    assert 'href="/files/?path=/home/alice/run"' in message and "scratch:/data/b" in message
    assert 'href="/files/?path=/home/alice/%3Cout%3E"' in message and "&lt;out&gt;" in message
    form = browser.get(f"/jobs/submit/?job={number}").context["form"]
    assert {name: form[name].value() for name in preferred} == preferred | {
        "stage": "local:/data/a scratch:/data/b"
    }


def test_the_job_of_a_session_leads_to_it(browser: Browser, alice: User, broker: FakeBroker) -> None:
    row, _created = Session.request(alice, SessionOptions(image="torch", minutes=60), "s12345678")
    Session.objects.update(job_id=1)
    Job.store([broker.put(make_job(1, kind="session")), broker.put(make_job(2, kind="session"))])
    assert f'href="{row.get_absolute_url()}"' in browser.get("/jobs/1/").content.decode()
    assert "To the session" not in browser.get("/jobs/2/").content.decode()


@pytest.mark.parametrize("path", ["cancel", "extend", "resubmit", "recipe", "log", "new"])
def test_nobody_touches_anothers_job(bobs_browser: Browser, broker: FakeBroker, path: str) -> None:
    Job.store([broker.put(make_job(1, kind="batch"))])
    broker.logs[1] = b"secret"
    token = bobs_browser.token("/jobs/submit/")
    sends = path in ("cancel", "extend", "resubmit")
    address = f"/jobs/1/{path}/"
    answer = bobs_browser.send_with(token, address) if sends else bobs_browser.get(address)
    assert answer.status_code == 404
    assert not any(broker.requests_of(kind) for kind in ("cancel", "log", "recipe"))
    assert bobs_browser.get("/jobs/submit/?job=1").status_code == 404


async def test_a_log_is_followed_to_its_end(transactional_db, broker: FakeBroker) -> None:
    broker.put(make_job(1))
    broker.logs[1] = "first ü\n".encode()
    events = _follow(1, "alice", 0, "en")
    assert await anext(events) == "retry: 2000\n\n"
    assert await anext(events) == 'id: 9\nevent: text\ndata: "first \\u00fc\\n"\n\n'
    broker.logs[1] += b"</script>\n"
    assert (await anext(events)).startswith("id: 19\n")
    broker.put(make_job(1, state="COMPLETED", ended=NOW))
    assert (await anext(events)).startswith("id: 19\nevent: over")
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    bobs_events = _follow(1, "bob", 0, "en")
    await anext(bobs_events)
    assert "event: trouble" in await anext(bobs_events)


async def test_trouble_with_a_log_is_in_the_readers_language_and_leads_to_the_help(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_arguments: Any, **_options: Any) -> None:
        raise SlurmError(message("This site has no scratch for staging."))

    monkeypatch.setattr(AsyncBrokerClient, "job", fail)
    found = []
    for language in ("en", "de"):
        events = [event async for event in _follow(1, "alice", 0, language)]
        _, data = events[1].split("event: trouble\ndata: ")
        found.append(json.loads(data))
    english, german = found
    assert english["text"] == "This site has no scratch for staging." != german["text"]
    assert english["help"] == german["help"] == "/help/data/#data-for-jobs-and-sessions"
    assert (english["more"], german["more"]) == ("More in the help", "Mehr in der Hilfe")


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


def test_a_job_says_where_it_began(browser: Browser, bobs_browser: Browser, broker: FakeBroker) -> None:
    Job.store([broker.put(make_job(7, kind="batch", started=NOW))])
    assert "/jobs/7/facts/" in browser.get("/jobs/7/").content.decode()
    assert "no Git repository" in browser.get("/jobs/7/facts/").content.decode()
    broker.facts[7] = JobFacts(
        image="<b>", digest="sha256:12", revision="a" * 40, branch="<i>", repository="/x"
    )
    page = browser.get("/jobs/7/facts/").content.decode()
    assert "sha256:12" in page and "a" * 40 in page and "<b>" not in page and "<i>" not in page
    broker.facts[7] = JobFacts(login="Your login files <had> not ended.")
    assert "Your login files &lt;had&gt; not ended." in browser.get("/jobs/7/facts/").content.decode()
    assert bobs_browser.get("/jobs/7/facts/").status_code == 404


def test_optional_fields_are_marked(browser: Browser) -> None:
    page = BeautifulSoup(browser.get("/jobs/submit/").content, "html.parser")
    marked = {field["class"][1] for field in page.select(".field:has(> .optional)")}
    assert {"name", "image", "partition", "stage"} <= marked and not {"nodes", "minutes", "script"} & marked
