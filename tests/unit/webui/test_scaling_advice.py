"""Advice in the forms that ask for GPUs: a probe's result of the user's, read by the real program."""

import html as html_module
import json
import os
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from django.conf import settings as django_settings
from django.utils import timezone
from scaling_results import write_result

from carme.bookings import BookingState
from carme.config.settings import ScalingSettings
from carme.errors import SlurmError
from carme.jobs import JobRequest, Node, Partition
from carme.scaling import MOST_BYTES, Prediction
from carme_webui import start_times
from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.sessions.models import Preset, Session

from .conftest import Browser
from .fake_broker import FakeBroker, make_job

FORM: dict[str, Any] = {
    "image": "torch", "partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4, "nodes": 2, "minutes": 120,
    "scaling": "scale.json",
}  # fmt: skip
JOB: dict[str, Any] = {
    "script": "#!/bin/sh\ntrain\n", "image": "torch", "gpus_per_node": 4, "nodes": 2, "minutes": 60,
    "scaling": "scale.json",
}  # fmt: skip


@pytest.fixture
def home(broker: FakeBroker) -> Path:
    """Alice's home, with a result; nodes of 4 GPUs."""
    broker.home.mkdir()
    write_result(broker.home / "scale.json")
    nodes = [Node(name=f"n{n}", cpus=16, memory_mb=64_000, gpus={"a100": 4}) for n in range(1, 5)]
    partition = Partition(name="gpu", default=True, max_minutes=480, node_names=[node.name for node in nodes])
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes, "partitions": [partition]})
    return broker.home


@pytest.fixture
def floor(settings: Any) -> None:
    """The site asks for a reason below 99 %."""
    scaling = ScalingSettings(efficiency_percent=99)
    settings.SITE = django_settings.SITE.model_copy(update={"scaling": scaling})


def plain(answer: Any) -> str:
    return html_module.unescape(" ".join(re.sub(r"<[^>]+>", " ", answer.content.decode()).split()))


def estimate(browser: Browser, **values: Any) -> str:
    answer = browser.send("/", "/sessions/estimate/", **(FORM | values))
    assert answer.status_code == 200
    return plain(answer)


def predicted(browser: Browser, **values: Any) -> str:
    answer = browser.send("/jobs/submit/", "/jobs/submit/predict/", **(JOB | values))
    assert answer.status_code == 200
    return plain(answer)


def test_the_start_form_shows_what_each_choice_takes_and_costs(
    browser: Browser, broker: FakeBroker, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_times, "REMEMBERED", 3600)  # both questions fall into it on any machine

    def starts(request: JobRequest) -> datetime:
        assert request.prediction is None, "Slurm is asked for the same choice once"
        return datetime.now(UTC) + timedelta(hours=2 if request.nodes > 1 else 0)

    broker.starts = starts
    text = estimate(browser, steps=36_000)
    assert re.search(r"Cheapest: 1 GPU, 10(\.0)? GPU-hours\.", text)
    assert re.search(r"Fastest: 16 GPUs \(4 nodes\), 1\d\.\d times as fast, \d+(\.\d)? GPU-hours\.", text)
    assert re.search(r"1 GPU\S* cheapest 1\.0 10\sh 10\.0 100 % now", text)
    assert re.search(r"8 GPUs \(2 nodes\)\S* (done first )?chosen", text)
    assert re.search(r"4 GPUs\S* (done first )?3\.\d", text) and "done first" in text
    assert "Predicted for Net with a batch of 256 that all ranks share, measured on one GPU." in text
    # While numbers change, the rest is remembered: one question for each choice.
    tests = len(broker.requests_of("test"))
    assert 5 <= tests <= 8
    estimate(browser, steps=36_000)
    assert len(broker.requests_of("test")) == tests
    text = estimate(browser, nodes=1, gpus_per_node=2)
    assert re.search(r"2 GPUs\S* chosen 2\.0 ", text), "rounded, not cut"
    assert "ms a step" in text and "times" in text


def test_a_partition_without_such_gpus_is_refused_beside_its_field(
    browser: Browser, broker: FakeBroker, home: Path
) -> None:
    """Not with an error of the server; the prediction is shown all the same."""
    nodes = [*broker.cluster.nodes, Node(name="n9", cpus=16, memory_mb=64_000)]
    partitions = [*broker.cluster.partitions, Partition(name="cpu", node_names=["n9"])]
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes, "partitions": partitions})
    text = estimate(browser, partition="cpu", gpu_type="", nodes=1, gpus_per_node=1)
    assert "This site can start none of these choices." in text and "1.00 times" in text
    started = browser.send(
        "/", "/sessions/start/", **(FORM | {"partition": "cpu", "gpu_type": "", "gpus_per_node": 1})
    )
    assert started.status_code == 422
    assert "1.00 times" in predicted(browser, partition="cpu", nodes=1, gpus_per_node=1)


@pytest.mark.parametrize("ask", [estimate, predicted])
def test_nobody_is_sent_to_a_choice_that_cannot_start(
    browser: Browser, broker: FakeBroker, home: Path, ask: Any
) -> None:
    """Such as one beyond the limit of an account."""
    most = 2

    def starts(request: JobRequest) -> datetime:
        if request.nodes > most:
            raise SlurmError("Your account may have no more nodes.")
        return datetime.now(UTC)

    broker.starts = starts
    text = ask(browser, steps=36_000)
    assert re.search(r"Fastest: 8 GPUs \(2 nodes\), ", text)
    assert re.search(r"16 GPUs \(4 nodes\)\S* 1\d\.\d [^%]* % not possible", text), "listed, without marks"
    most = 0
    text = ask(browser, steps=18_000, minutes=90)
    assert "This site can start none of these choices." in text and "Cheapest" not in text
    assert "not possible" in text


@pytest.mark.parametrize("ask", [estimate, predicted])
def test_what_cannot_start_leaves_room_for_what_can(
    browser: Browser, broker: FakeBroker, home: Path, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site has more choices than a form shows, and an account may have no more than eight nodes."""
    monkeypatch.setattr(start_times, "REMEMBERED", 3600)  # all questions fall into it on any machine
    nodes = [Node(name=f"n{n}", cpus=16, memory_mb=64_000, gpus={"a100": 16}) for n in range(1, 257)]
    partition = Partition(name="gpu", default=True, max_minutes=480, node_names=[node.name for node in nodes])
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes, "partitions": [partition]})

    def starts(request: JobRequest) -> datetime:
        if request.nodes > 8:
            raise SlurmError("Your account may have no more nodes.")
        return datetime.now(UTC)

    broker.starts = starts
    text = ask(browser, steps=36_000, nodes=1, gpus_per_node=1)
    assert re.search(r"Fastest: 128 GPUs \(8 nodes\), ", text), text
    sizes = [(sent.request.nodes, sent.request.gpus_per_node) for sent in broker.requests_of("test")]
    assert len(sizes) == len(set(sizes)), "Slurm is asked for a choice once"


@pytest.mark.parametrize("ask", [estimate, predicted])
def test_a_training_of_ages_has_no_end_on_a_calendar(browser: Browser, home: Path, ask: Any) -> None:
    text = ask(browser, steps=10**12)
    assert "Cheapest: 1 GPU, 277777778 GPU-hours." in text
    assert re.search(
        r"16 GPUs \(4 nodes\)\S* \S* ?fastest done first ", text
    )  # others end after the year 9999


def test_the_choices_start_as_the_form_asks(
    browser: Browser, broker: FakeBroker, home: Path, alice: User
) -> None:
    """With its booking, processors and memory: those decide when a job starts, and whether it can."""
    booking = Booking.objects.create(
        owner=alice, partition="gpu", gpu_type="a100", gpus_per_node=4,
        node_names=["n1", "n2"], start=timezone.now(), end=timezone.now() + timedelta(hours=8),
        state=BookingState.APPROVED,
    )  # fmt: skip
    requested = {"cpus_per_node": 3, "memory_mb_per_node": 5000, "reservation": booking.name}
    assert "Cheapest" in estimate(browser, **requested)
    requests = [request.request for request in broker.requests_of("test")]
    assert len(requests) >= 5
    assert {
        (request.cpus_per_node, request.memory_mb_per_node, request.reservation) for request in requests
    } == {(3, 5000, booking.name)}


def test_without_a_result_nothing_is_shown(browser: Browser, home: Path) -> None:
    assert "Cheapest" not in estimate(browser, scaling="")


def test_the_curve_is_a_chart_with_its_interval_what_is_ideal_and_the_sites_floor(
    browser: Browser, home: Path, floor: None
) -> None:
    html = browser.send("/", "/sessions/estimate/", **FORM).content.decode()
    page = BeautifulSoup(html, "html.parser")
    (drawn,) = page("carme-chart")
    spec = json.loads(str(drawn["data-chart"]))
    lines = {line["name"]: line["values"] for line in spec["series"]}
    assert [*lines] == [
        *("predicted", "80 % interval, from", "80 % interval, to", "ideal"),
        "99 % efficiency, below which the site asks for a reason",
    ]
    predicted, low, high, ideal, accepted = lines.values()
    assert ideal == spec["at"] == [1, 2, 4, 8, 16]
    assert all(a <= b <= c for a, b, c in zip(low, predicted, high, strict=True)) and low[-1] < high[-1]
    assert accepted == pytest.approx([0.99 * ranks for ranks in ideal])
    # What the table beside it says of each choice, and which of them the form asks for.
    (table,) = page("table")
    assert len(table("tr")) == len(spec["at"]) + 1
    marks = {spec["labels"][mark["place"]]: mark["chosen"] for mark in spec["marks"]}
    assert marks["8 GPUs (2 nodes), chosen"] and not marks["16 GPUs (4 nodes), fastest"]
    assert spec["labels"][0] == "1 GPU, cheapest" and spec["current"] == 3
    assert spec["summary"].startswith("1 GPU, cheapest: 1; ")
    assert 'tabindex="0" role="region"' in html and "<script" not in html


def test_a_session_keeps_its_prediction(browser: Browser, home: Path) -> None:
    answer = browser.send("/", "/sessions/start/", name="s0123abcd", steps=500, **FORM)
    assert answer.status_code == 302
    options = Session.objects.get(name="s0123abcd").requested_options
    assert options.prediction is not None and options.prediction.file == str(home / "scale.json")
    assert (options.prediction.ranks, options.prediction.steps) == (8, 500)
    request = options.request(name="n", command=["x"], environment={})
    assert request.prediction == options.prediction
    # Again: the form begins with the same result, and predicts anew.
    page = browser.get("/?again=s0123abcd").content.decode()
    assert f'value="{home / "scale.json"}"' in page and 'value="500"' in page


def test_a_preset_remembers_the_result(browser: Browser, home: Path) -> None:
    browser.send("/", "/sessions/presets/", name="", title="mine", **FORM)
    query = Preset.objects.get().query
    assert "scaling=" in query and "prediction" not in query
    assert f'value="{home / "scale.json"}"' in browser.get(f"/?{query}").content.decode()


def test_below_the_floor_the_start_form_asks_for_a_reason(browser: Browser, home: Path, floor: None) -> None:
    text = estimate(browser)
    assert "Below 99 % this site asks for a reason." in text and "Cheapest" in text
    refused = browser.send("/", "/sessions/start/", name="s0123abcd", **FORM)
    assert refused.status_code == 422 and "asks for a reason" in plain(refused)
    assert (
        browser.send("/", "/sessions/start/", name="s0123abcd", reason="A deadline", **FORM).status_code
        == 302
    )
    prediction = Session.objects.get(name="s0123abcd").requested_options.prediction
    assert prediction is not None and prediction.reason == "A deadline"


@pytest.mark.parametrize("ask", [estimate, predicted])
def test_results_that_cannot_be_used_are_reported_beside_the_form(
    browser: Browser, home: Path, ask: Any
) -> None:
    (home / "text.json").write_text("no JSON")
    (home / "large.json").write_bytes(b" " * (MOST_BYTES + 1))
    write_result(home / "old.json", version=1)
    write_result(home / "empty.json", curve=None)
    write_result(home / "small.json", batch=16)
    for name, sentence in {
        "text.json": "text.json is not a result of a probe: it is not JSON.",
        "large.json": "large.json is not a result of a probe: it has more than 4 MiB.",
        "old.json": "old.json is a result of version 1, and this site reads versions 2 to 4. Measure again",
        "empty.json": "empty.json has no predictions.",
        "gone.json": "There is no 'gone.json'.",
        "../secret.json": "The portal does not show this folder.",
        "/etc/passwd": "The portal does not show this folder.",
        "a\0b": "Null characters are not allowed.",
    }.items():
        text = ask(browser, scaling=name)
        assert sentence in text and "Cheapest" not in text, name
    text = ask(browser, scaling="small.json", nodes=4, gpus_per_node=4)
    assert "16 GPUs" in text
    text = ask(browser, scaling="small.json", nodes=4, gpus_per_node=3)
    assert "Cheapest" in text
    assert "0 is" in ask(browser, steps=0) or "greater than or equal to 1" in ask(browser, steps=0)


def test_somebody_elses_result_is_not_read(browser: Browser, broker: FakeBroker, home: Path) -> None:
    """The program that reads runs as the user; here what it may not read is a folder of nobody."""
    private = home / "bobs"
    private.mkdir()
    write_result(private / "scale.json")
    private.chmod(0)
    if os.geteuid() == 0:
        # Without these even root is held to what the modes of files allow.
        broker.wrapper = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    try:
        text = estimate(browser, scaling="bobs/scale.json")
        assert "You may not do that with 'scale.json'." in text and "Cheapest" not in text
        assert "Cheapest" in estimate(browser)
        assert {request.user for request in broker.requests_of("files")} == {"alice"}
    finally:
        private.chmod(0o700)
        shutil.rmtree(private)


def test_the_form_proposes_results_of_the_home(browser: Browser, home: Path) -> None:
    (home / "other.json").write_text("{}")
    (home / "scaling.txt").write_text("")
    (home / "<scale>.json").write_text("{}")
    html = browser.get("/sessions/probes/").content.decode()
    assert 'value="scale.json"' in html
    assert "&lt;scale&gt;.json" in html and "other" not in html and "txt" not in html


def test_a_result_among_my_files_leads_to_the_start_form(browser: Browser, home: Path) -> None:
    (home / "more").mkdir()
    write_result(home / "more" / "scale of é.json")
    page = browser.get(f"/files/?path={home}/more").content.decode()
    (link,) = re.findall(r'href="(/\?scaling=[^"]+)"', page)
    html = html_module.unescape(browser.get(link.partition("#")[0]).content.decode())
    assert f'value="{home}/more/scale of é.json"' in html and 'scaling-fields" open' in html


def test_the_batch_form_shows_and_keeps_a_prediction(
    browser: Browser, broker: FakeBroker, home: Path
) -> None:
    text = predicted(browser, steps=36_000)
    assert "Cheapest: 1 GPU" in text and re.search(
        r"8 GPUs \(2 nodes\)\S* chosen", text.replace("done first ", "")
    )
    answer = browser.send("/jobs/submit/", "/jobs/submit/", steps=36_000, **JOB)
    assert answer.status_code == 302
    (request,) = broker.wanted.values()
    assert request.prediction is not None and request.prediction.ranks == 8


def test_the_lines_of_a_script_count_for_its_prediction(
    browser: Browser, broker: FakeBroker, home: Path
) -> None:
    script = "#!/bin/sh\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=2\ntrain\n"
    form = {"script": script, "nodes": 1, "gpus_per_node": 0}
    assert re.search(r"4 GPUs \(2 nodes\)\S* (done first )?chosen", predicted(browser, **form))
    assert browser.send("/jobs/submit/", "/jobs/submit/", **(JOB | form)).status_code == 302
    (request,) = broker.wanted.values()
    assert request.prediction is not None and request.prediction.ranks == 4


def test_below_the_floor_the_batch_form_asks_for_a_reason(
    browser: Browser, broker: FakeBroker, home: Path, floor: None
) -> None:
    refused = browser.send("/jobs/submit/", "/jobs/submit/", **JOB)
    assert refused.status_code == 422 and "asks for a reason" in plain(refused)
    assert browser.send("/jobs/submit/", "/jobs/submit/", reason="A deadline", **JOB).status_code == 302
    (request,) = broker.wanted.values()
    assert request.prediction is not None and request.prediction.reason == "A deadline"


def test_administrators_see_the_reason(root: Browser, broker: FakeBroker) -> None:
    prediction = Prediction(
        file="/home/alice/scale.json", ranks=8, step_ms=5, low_ms=4, high_ms=6, speedup=3.2, efficiency=0.4,
        reason="<b>A deadline</b>", extrapolated=True,
    )  # fmt: skip
    broker.put(make_job(7, prediction=prediction))
    html = root.get("/admin/jobs/7/").content.decode()
    assert (
        "40 %, 3.2 times as fast as one rank, extrapolated beyond what was measured" in html
        and "&lt;b&gt;A deadline&lt;/b&gt;" in html
    )
