"""The charts of a job's page: what they are drawn from."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from django.conf import settings as django_settings
from django.utils import timezone, translation
from real_exporter import NODE, Exporter

from carme.broker.policy import Alert
from carme.reports import Curve, GpuUse, TrainingUse, Usage
from carme_webui.metrics.charts import Chart, Line, Part, Stack

from .conftest import Browser, text
from .fake_broker import NOW, FakeBroker, make_job
from .job_steps import read_changes


def charts_in(part: str) -> list[dict[str, Any]]:
    """What the charts of a part of a page are drawn from."""
    return [
        json.loads(str(element["data-chart"]))
        for element in BeautifulSoup(part, "html.parser")("carme-chart")
    ]


def test_curves_have_the_units_of_the_request_and_its_amount_as_a_line(
    browser: Browser, broker: FakeBroker
) -> None:
    def curve(what: str, name: str = "n1", **fields: Any) -> Curve:
        return Curve(what=what, name=name, start=0, step=60, values=[0.25, None, 0.5], **fields)

    broker.put(make_job(1, started=NOW))
    usage = Usage(seconds=60)
    broker.measured[1] = (
        usage,
        [
            curve("cpu", whole=8.0),
            curve("memory", whole=32 * 2.0**30),
            curve("gpu_memory", "n1 GPU 0", whole=80 * 2.0**30),
            curve("io", "n1 read", top=4 * 2.0**20),
            curve("io", "n1 written", top=4 * 2.0**20),
            curve("network", "n1 received", top=2 * 2.0**30),
            curve("steps", "mean of the ranks", top=8.0),
            curve("loss", "mean of the ranks", top=2.0),
        ],
    )
    read_changes()
    found = {chart["title"]: chart for chart in charts_in(text(browser.get("/jobs/1/use/")))}
    shown = {
        title: (value["series"][0]["values"], value["unit"], value.get("line"))
        for title, value in found.items()
    }
    assert shown == {
        "Processors": ([2.0, None, 4.0], "", {"name": "Requested", "value": 8.0}),
        "Memory": ([8.0, None, 16.0], "GiB", {"name": "Requested", "value": 32.0}),
        "GPU memory": ([20.0, None, 40.0], "GiB", {"name": "Total", "value": 80.0}),
        "Disks: read and written": ([1.0, None, 2.0], "MiB/s", None),
        "Network: received and sent": ([0.5, None, 1.0], "GiB/s", None),
        "Training: steps per second": ([2.0, None, 4.0], "", None),
        "Training: loss": ([0.5, None, 1.0], "", None),
    }
    assert len(found["Disks: read and written"]["series"]) == 2
    # Nodes that got different amounts share no line: then shares are shown.
    broker.measured[1] = usage, [curve("cpu", whole=8.0), curve("cpu", whole=4.0)]
    (chart,) = charts_in(text(browser.get("/jobs/1/use/")))
    assert (chart["unit"], chart["line"]) == ("%", {"name": "Requested", "value": 100})
    assert chart["series"][0]["values"] == [25.0, None, 50.0]


def test_each_rank_and_each_of_many_gpus_has_a_small_chart_and_advice_stands_at_its_chart(
    browser: Browser, broker: FakeBroker
) -> None:
    def curve(what: str, name: str, values: list[float | None], **fields: Any) -> Curve:
        return Curve(what=what, name=name, start=0, step=60, values=values, **fields)

    times: dict[str, Any] = {"submitted": NOW, "started": NOW, "ended": NOW + timedelta(hours=1)}
    broker.put(make_job(1, state="TIMEOUT", gpus=5, **times))
    usage = Usage(
        seconds=3600,
        gpus=[GpuUse(node="n1", gpu=str(gpu), busy=0.6, active=0.9 if gpu else 0.0) for gpu in range(5)],
        training=TrainingUse(ranks=2, data_wait=0.4),
    )
    broker.measured[1] = (
        usage,
        [
            *(curve("gpu", f"n1 GPU {gpu}", [0.5, 0.7]) for gpu in range(5)),
            curve("wait", "for data", [0.2, 0.4]),
            curve("rank_wait", "n1 rank 0", [0.1, 0.3], part="data"),
            curve("rank_wait", "n1 rank 0", [0.5, 0.5], part="ranks"),
            curve("rank_wait", "n2 rank 1", [None, 0.4], part="data"),
        ],
    )
    read_changes()
    part = BeautifulSoup(text(browser.get("/jobs/1/use/")), "html.parser")
    places = [
        (entry("h3")[0].get_text(), [str(line.contents[0]).partition(".")[0] for line in entry("li")])
        for entry in part(class_="chart")
    ]
    assert places == [
        ("GPU utilization", ["1 of the job's 5 GPUs did nothing"]),
        (
            "Training: share of time that ranks waited",
            ["The GPUs waited for data 40 % of the time, and processors were free"],
        ),
    ]
    (rest,) = (entry for entry in part(class_="advice") if not entry.find_parent(class_="chart"))
    assert rest.get_text().startswith("The job reached its time limit.") and len(rest("li")) == 1
    ranks, gpus = part(class_="multiples")
    assert ranks["aria-label"] == "Waiting, rank by rank" and len(gpus("li")) == 5
    first, second = (json.loads(str(rank["data-chart"])) for rank in ranks("carme-chart"))
    assert (first["title"], first["most"], first["unit"]) == ("n1 rank 0", 100, "%")
    assert [series["values"] for series in first["series"]] == [[10.0, 30.0], [50.0, 50.0]]
    assert [series["values"] for series in second["series"]] == [[None, 40.0], []]
    rows = [[cell.get_text() for cell in row(["th", "td"])] for row in part(class_="means")[0]("tr")]
    assert rows == [
        ["On average", "for data", "for other ranks"],
        ["n1 rank 0", "20\xa0%", "50\xa0%"],
        ["n2 rank 1", "40\xa0%", "-"],
    ]
    # Why a large run has none.
    hint = "Ranks have charts of their own in runs with up to 64 ranks."
    for number in (64, 65):
        broker.measured[1] = Usage(seconds=60, training=TrainingUse(ranks=number)), []
        assert (hint in text(browser.get("/jobs/1/use/"))) == (number == 65)


def test_a_job_shows_what_it_used_and_what_to_change(browser: Browser, broker: FakeBroker) -> None:
    curve = Curve(what="gpu", name="n1 <GPU> 0", start=0, step=15, values=[0.0, 0.5, 1.0])
    broker.put(make_job(1, started=NOW))
    gpu = GpuUse(node="n1", gpu="0", busy=0.3, active=1.0)
    broker.measured[1] = Usage(seconds=1800, gpus=[gpu]), [curve]
    alert = Alert(
        name="CarmeGpuIdle", job_id=1, user="alice", summary="Use <it>.", advice="carme job cancel 1"
    )
    broker.fire([alert], NOW)
    read_changes()
    assert 'hx-get="/jobs/1/use/"' in browser.get("/jobs/1/").content.decode()
    part = browser.get("/jobs/1/use/").content.decode()
    advice = ("Use &lt;it&gt;.", "carme job cancel 1", "The GPUs worked 30 % of the time", "num_workers=")
    for message in ("30 % used", *advice):
        assert message in part, message
    (chart,) = charts_in(part)
    assert chart["series"] == [{"name": "n1 <GPU> 0", "values": [0.0, 50.0, 100.0]}]
    assert (chart["title"], chart["unit"], chart["most"], chart["step"]) == ("GPU utilization", "%", 100, 15)
    assert chart["summary"] == "n1 <GPU> 0 50\xa0% on average, at most 100\xa0%"
    assert "every 30s" in part
    assert {request.user for request in broker.requests_of("report")} == {"alice"}


def test_without_prometheus_the_curves_come_from_the_exporter(
    browser: Browser, broker: FakeBroker, settings: Any, tmp_path: Path
) -> None:
    """The job's page and the panel in JupyterLab show the same part."""
    exporter = Exporter(tmp_path / "tls")
    try:
        place = django_settings.SITE.monitoring.model_copy(
            update={"certificates": exporter.certificates, "exporter_port": exporter.port}
        )
        assert not place.prometheus
        settings.SITE = django_settings.SITE.model_copy(update={"monitoring": place})
        broker.has_prometheus = False
        broker.restart()
        begun = timezone.now() - timedelta(seconds=50)
        broker.put(make_job(7, kind="session", node_list=NODE, started=begun, submitted=begun))
        read_changes()
        exporter.node.seconds = 40
        part = text(browser.get("/jobs/7/use/"))
    finally:
        exporter.close()
    found = {chart["title"]: chart for chart in charts_in(part)}
    values = {title: value["series"][0]["values"] for title, value in found.items()}
    assert values["GPU utilization"] == [80] and values["GPU memory"] == [10]
    assert values["Memory"] == pytest.approx([2], rel=0.01)
    assert found["Memory"]["line"] == {"name": "Requested", "value": 32}
    assert values["Training: loss"] == [2.1]
    # Speeds need a second reading.
    assert values["Processors"] == [None]
    assert "while somebody watches" in part and 'hx-get="/jobs/7/use/"' in part
    # Without readings of most of the run there is no advice.
    assert "Not yet: too little of the run was seen." in part and "This looks good" not in part


def test_amounts_beside_charts_are_written_in_the_readers_language() -> None:
    for language, amounts in (
        ("en", ["37.5\xa0%", "0.00123", "1,235\xa0GiB", "1,000"]),
        ("de", ["37,5\xa0%", "0,00123", "1.235\xa0GiB", "1.000"]),
    ):
        with translation.override(language):
            shown = [
                Chart("", unit, 0, 30, [Line("", [value, None])]).now
                for value, unit in ((37.52, "%"), (0.0012344, ""), (1234.6, "GiB"), (999.9, ""))
            ]
            assert shown == amounts
            (mark,) = {amounts[0][2]}
            assert f"37{mark}5\xa0%" in Chart("", "%", 0, 30, [Line("", [37.5])]).summary
            assert Stack("", "h", "", ["May"], [Part("a", [0.5])]).summary == f"May: a 0{mark}5\xa0h"
