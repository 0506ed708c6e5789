"""Bars over time, and the curve of how far a training scales, in a browser."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.conf import settings as django_settings
from django.utils import timezone
from playwright.sync_api import Locator, Page, expect
from scaling_results import write_result

from carme.config.settings import ScalingSettings
from carme.jobs import Node, Partition
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job

from ..fake_broker import FakeBroker, make_job
from .conftest import DESKTOP, log_in
from .test_charts import DRAWN, SMALL, check_appearance, measurements

pytestmark = pytest.mark.django_db(transaction=True)

#: Bars over time: how wide each is, in percent of its row.
WIDTHS = """chart => [...chart.shadowRoot.querySelectorAll(".span")].map(
  bar => Math.round(100 * bar.getBoundingClientRect().width / bar.parentElement.clientWidth))"""


def test_bars_over_time_are_read_by_pointer_keyboard_and_table(
    page: Page, sample_data: None, broker: FakeBroker, alice: User, complaints: list[str]
) -> None:
    name = "Asia/Kathmandu"  # whose hours begin at no other zone's
    User.objects.filter(pk=alice.pk).update(time_zone=name)
    now = timezone.now().replace(microsecond=0)
    submitted, started = now - timedelta(minutes=40), now - timedelta(minutes=30)
    times: dict[str, Any] = {"submitted": submitted, "started": started}
    Job.store([broker.put(make_job(7, kind="batch", nodes=2, node_list="n[1-2]", **times))])
    broker.measured[7] = measurements()
    log_in(page)
    page.goto("/jobs/7/")
    chart = page.locator("carme-spans")
    # It goes on running while a busy machine shows it.
    plot = chart.get_by_role(
        "img", name=re.compile(r"^Timeline: Queue: Queued 10 min.*; n1, n2: Running \d+ min")
    )
    expect(plot).to_be_visible()
    queued, *running = chart.evaluate(WIDTHS)
    assert len(running) == 2 and all(98 <= queued + width <= 102 and width > 2 * queued for width in running)
    first, then = (f"{at.astimezone(ZoneInfo(name)):%H:%M:%S}" for at in (submitted, started))
    pointed = chart.locator(".pointed")
    expect(pointed).to_have_text(re.compile(rf"n2: Running, from {then} \(\d+ minutes\)"))
    plot.focus()
    page.keyboard.press("Home")
    expect(pointed).to_have_text(f"Queue: Queued, {first} \N{EN DASH} {then} (10 minutes)")
    page.keyboard.press("ArrowRight")
    expect(chart.get_by_role("status")).to_have_text(re.compile(rf"n1: Running, from {then} \(\d+ minutes\)"))
    # What is new leaves what one reads.
    before = chart.get_attribute("data-spans") or ""
    page.evaluate("document.body.dispatchEvent(new Event('update'))")
    expect(chart).not_to_have_attribute("data-spans", before)
    expect(pointed).to_contain_text("n1: Running")
    chart.locator(".track").first.hover(position={"x": 3, "y": 8})
    expect(pointed).to_contain_text("Queue: Queued")
    page.mouse.move(0, 0)
    expect(pointed).to_contain_text("n2: Running")
    # The axis has full minutes of that zone, as many as there is room for.
    for size, step in ((DESKTOP, 5), (SMALL, 15)):
        page.set_viewport_size(size)
        page.wait_for_function(
            "([chart, most]) => chart.shadowRoot.querySelectorAll('.tick').length <= most",
            arg=[chart.element_handle(), 40 // step + 1],
        )
        minutes = [int(words[-2:]) for words in chart.locator(".tick").all_inner_texts()]
        assert len(minutes) >= 40 // step and {minute % step for minute in minutes} == {0}
    table = page.get_by_role("region", name="Timeline").get_by_role("table").last
    expect(table.get_by_role("row")).to_have_count(4)
    expect(table.get_by_role("row").nth(1)).to_contain_text(first)
    page.set_viewport_size(DESKTOP)
    check_appearance(page, "job-timeline", complaints)


#: Draws one bar from and to these seconds; the words of the axis.
AXIS = """(chart, [start, end]) => {
  const spec = JSON.parse(chart.dataset.spans);
  const span = { ...spec.rows[0].spans[0], start, end, open: false };
  chart.dataset.spans = JSON.stringify({ ...spec, start, rows: [{ ...spec.rows[0], spans: [span] }] });
  return [...chart.shadowRoot.querySelectorAll(".tick")].map(tick => tick.textContent);
}"""


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("Europe/Berlin", datetime(2026, 3, 28, 3, 0, tzinfo=UTC)),
        ("Europe/Berlin", datetime(2026, 10, 24, 3, 0, tzinfo=UTC)),
        ("America/New_York", datetime(2026, 10, 31, 9, 0, tzinfo=UTC)),
        ("America/New_York", datetime(2026, 3, 8, 6, 30, tzinfo=UTC)),  # half an hour before
    ],
)
def test_an_axis_has_full_hours_before_and_after_clocks_change(
    page: Page, sample_data: None, broker: FakeBroker, alice: User, name: str, start: datetime
) -> None:
    User.objects.filter(pk=alice.pk).update(time_zone=name)
    begun = timezone.now() - timedelta(minutes=30)
    Job.store([broker.put(make_job(7, kind="batch", submitted=begun, started=begun))])
    log_in(page)
    page.goto("/jobs/7/")
    chart = page.locator("carme-spans")
    expect(chart.locator(".tick").first).to_be_attached()
    end = start + timedelta(hours=60)
    shown = chart.evaluate(AXIS, [start.timestamp(), end.timestamp()])
    clocks = [words for words in shown if ":" in words]
    days = [words for words in shown if ":" not in words]
    assert set(clocks) <= {"06:00", "12:00", "18:00"} and "12:00" in clocks, shown
    zone = ZoneInfo(name)
    midnights = {(start.astimezone(zone) + timedelta(days=day)).day for day in (1, 2)}
    assert {int(re.sub(r"\D", "", words)) for words in days} >= midnights, shown


def open_curve(page: Page, broker: FakeBroker, settings: Any, query: str) -> Locator:
    """The curve of a start form, on a site with four nodes with four GPUs each."""
    write_result(broker.home / "scale.json")
    nodes = [Node(name=f"n{n}", cpus=16, memory_mb=64_000, gpus={"a100": 4}) for n in range(1, 5)]
    partition = Partition(name="gpu", default=True, node_names=[node.name for node in nodes])
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes, "partitions": [partition]})
    broker.starts = lambda request: datetime.now(UTC)
    scaling = ScalingSettings(efficiency_percent=90)
    settings.SITE = django_settings.SITE.model_copy(update={"scaling": scaling})
    log_in(page)
    page.goto(f"/?scaling=scale.json&gpu_type=a100&{query}")
    chart = page.locator("#estimate carme-chart")
    expect(chart.locator("canvas")).to_be_visible()
    return chart


def test_choices_with_as_many_gpus_are_read_together(
    page: Page, sample_data: None, broker: FakeBroker, settings: Any
) -> None:
    chart = open_curve(page, broker, settings, "gpus_per_node=2&nodes=4")
    named = chart.locator(".legend .moment")
    expect(named).to_have_text([re.compile(r"^8 GPUs \(4 nodes\).*chosen$")])
    place = chart.evaluate("chart => chart.plot.valToPos(8, 'x')")
    chart.locator(".u-over").hover(position={"x": place, "y": 20})
    expect(named).to_have_text([re.compile(r"^8 GPUs \(2 nodes\)"), re.compile(r"^8 GPUs \(4 nodes\)")])
    page.mouse.move(0, 0)
    expect(named).to_have_text([re.compile(r"^8 GPUs \(4 nodes\).*chosen$")])


def test_how_far_a_training_scales_is_read_by_keyboard_and_table(
    page: Page, sample_data: None, broker: FakeBroker, complaints: list[str], settings: Any
) -> None:
    chart = open_curve(page, broker, settings, "gpus_per_node=4&nodes=2")
    assert chart.evaluate(DRAWN) > 1000
    legend = chart.locator(".legend")
    expect(legend.locator(".moment")).to_have_text("8 GPUs (2 nodes), chosen")  # until one points at another
    expect(legend).to_contain_text("ideal: 8")
    plot = chart.get_by_role("img", name="Times as fast: 1 GPU, cheapest: 1; ")
    plot.focus()
    page.keyboard.press("End")
    expect(chart.get_by_role("status")).to_contain_text("16 GPUs (4 nodes), fastest")
    page.keyboard.press("Home")
    expect(chart.get_by_role("status")).to_contain_text("predicted: 1")
    chart.get_by_text("As a table").click()
    expect(chart.get_by_role("columnheader")).to_have_text(
        ["GPUs", "predicted", "80 % interval, from", "80 % interval, to", "ideal",
         "90 % efficiency, below which the site asks for a reason"]
    )  # fmt: skip
    expect(chart.get_by_role("row")).to_have_count(6)
    # Another choice comes into the same drawing, and the table stays open.
    canvas = chart.locator("canvas").element_handle()
    page.get_by_role("group", name="Hardware").get_by_label("1 GPU").check()
    expect(legend.locator(".moment")).to_have_text("1 GPU, cheapest, chosen")
    expect(chart.get_by_role("row")).to_have_count(6)
    assert canvas is not None and canvas.evaluate("canvas => canvas.isConnected")
    chart.get_by_text("As a table").click()
    page.get_by_role("group", name="Hardware").get_by_label("2 nodes, 4 GPUs each").check()
    expect(legend.locator(".moment")).to_have_text("8 GPUs (2 nodes), chosen")
    check_appearance(page, "scaling-curve", complaints)
