"""Charts, moments, hints and terms in a browser: drawn under the strict policy, read in several ways."""

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from axe_rules import EVERY
from django.conf import settings as django_settings
from django.utils import timezone
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Locator, Page, Route, ViewportSize, expect
from real_prometheus import Prometheus, prometheus_with

from carme.reports import Curve, GpuUse, NodeUse, Usage
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job
from carme_webui.metrics.charts import Part, Stack
from carme_webui.projects.models import Project
from carme_webui.sessions.models import Session

from ..fake_broker import FakeBroker, make_job, make_session
from .conftest import DESKTOP, fits, keep, log_in, sign_in
from .test_accessibility import COLOURS, violations

pytestmark = pytest.mark.django_db(transaction=True)

SMALL: ViewportSize = {"width": 390, "height": 844}
GIB = 2.0**30
#: Pixels of all drawings in a chart that are not see-through.
DRAWN = """chart => [...chart.shadowRoot.querySelectorAll("canvas")].reduce((sum, canvas) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let place = 3; place < data.length; place += 4) sum += data[place] > 0;
  return sum;
}, 0)"""

#: The colour of a chart's line on the page as it is now, as style sheets compute it.
LINE_COLOUR = """(chart, place) => {
  chart.draw(true);
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = chart.palette.lines[place];
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}"""

#: Whether a chart's text has the colour of the page around it.
PALETTE_FITS = "chart => chart.palette.text === getComputedStyle(chart).color"


#: Where the lower axis of a chart of six hours has its lines.
SPLITS = """chart => {
  const from = chart.times[0], plot = chart.plot;
  plot.setScale("x", { min: from, max: from + 6 * 3600 });
  return new Promise((done) => requestAnimationFrame(() => done(plot.axes[0]._splits)));
}"""


def check_appearance(page: Page, name: str, complaints: list[str]) -> None:
    """Pictures on a wide screen and a phone, light and dark, with nothing for axe to find."""
    assert not complaints  # axe itself tries what the policy forbids
    wrong = []
    for size, viewport in (("desktop", DESKTOP), ("phone", SMALL)):
        page.set_viewport_size(viewport)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            keep(page, f"{name}-{size}-{scheme}")
            rules = EVERY if (size, scheme) == ("desktop", "light") else COLOURS
            wrong += [f"{scheme}: {violation}" for violation in violations(page, rules)]
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(DESKTOP)
    complaints.clear()
    assert not wrong and fits(page)


def measurements() -> tuple[Usage, list[Curve]]:
    """What a job did on two GPUs for half an hour; it used less than half of its memory."""
    start = time.time() // 60 * 60 - 1800

    def curve(what: str, name: str, values: list[float | None], **fields: Any) -> Curve:
        return Curve(what=what, name=name, start=start, step=30, values=values, **fields)

    ramp: list[float | None] = [min(0.95, place / 20) for place in range(61)]
    wave: list[float | None] = [0.6 + 0.3 * (place % 7) / 7 for place in range(61)]
    pause: list[float | None] = [None if 20 < place < 26 else 0.4 for place in range(61)]
    usage = Usage(
        seconds=1800,
        gpus=[GpuUse(node="n1", gpu=str(gpu), busy=0.7, active=0.9) for gpu in range(2)],
        nodes=[NodeUse(node="n1", cpus=8, cpus_used=3.1, memory_bytes=12 * GIB, memory_limit_bytes=32 * GIB)],
    )
    return usage, [
        curve("gpu", "n1 GPU 0", ramp),
        curve("gpu", "n1 GPU 1", wave),
        curve("gpu_memory", "n1 GPU 0", ramp, whole=80 * GIB),
        curve("gpu_memory", "n1 GPU 1", pause, whole=80 * GIB),
        curve("cpu", "n1", wave, whole=8.0),
        curve("memory", "n1", pause, whole=32 * GIB),
        curve("io", "n1 read", wave, top=180 * 2.0**20),
        curve("io", "n1 written", ramp, top=180 * 2.0**20),
    ]


@pytest.fixture
def charts(page: Page, sample_data: None, broker: FakeBroker, complaints: list[str]) -> Locator:
    """Those of job 7, which has run for half an hour, on its page."""
    begun = timezone.now() - timedelta(minutes=30)
    size: dict[str, Any] = {"gpus": 2, "cpus": 8, "memory_mb": 32_768}
    Job.store([broker.put(make_job(7, kind="batch", started=begun, submitted=begun, **size))])
    broker.measured[7] = measurements()
    sign_in(page)
    page.goto("/jobs/7/")
    found = page.locator("#use carme-chart")
    expect(found).to_have_count(5)
    return found


def test_charts_are_seen_once_their_style_is_there(page: Page, sample_data: None, broker: FakeBroker) -> None:
    """Before that their parts would lie on each other, for a while in each notebook that shows a report."""
    broker.measured[7] = measurements()
    held: list[Route] = []
    holds = True
    page.route(
        re.compile(r"/charts\.[^/]*css"), lambda route: held.append(route) if holds else route.continue_()
    )
    sign_in(page)
    with page.expect_request(re.compile(r"/charts\.[^/]*css")):
        page.goto("/jobs/7/", wait_until="commit")  # it has loaded once the style is there
    chart = page.locator("carme-chart").first
    expect(chart).to_be_attached()
    expect(chart).to_be_hidden()
    holds = False
    for route in held:
        route.continue_()
    expect(chart).to_be_visible()


def test_curves_are_read_by_pointer_keyboard_and_table(
    page: Page, charts: Locator, broker: FakeBroker, complaints: list[str]
) -> None:
    chart = charts.nth(2)
    expect(chart.locator("canvas")).to_be_visible()
    assert chart.evaluate(DRAWN) > 1000
    expect(chart.locator(".legend")).to_contain_text("Requested: 8")
    # The last values, until one points at others.
    plot = chart.get_by_role("img", name="Processors: n1 ")
    plot.focus()
    page.keyboard.press("Home")
    expect(chart.locator(".legend")).to_contain_text("n1: 4.8")
    page.keyboard.press("ArrowRight")
    expect(chart.locator(".legend")).to_contain_text("n1: 5.14")
    expect(chart.get_by_role("status")).to_contain_text("Requested: 8")
    plot.hover()
    expect(chart.locator(".legend .moment")).not_to_be_empty()
    # All of them, in a table that is made when it is opened.
    expect(chart.get_by_role("table")).to_have_count(0)
    chart.get_by_text("As a table").click()
    expect(chart.get_by_role("row")).to_have_count(62)
    expect(chart.get_by_role("columnheader")).to_have_text(["Time", "n1", "Requested"])
    # What is new comes into the same drawing, and the table stays open.
    canvas = chart.locator("canvas").element_handle()
    usage, curves = measurements()
    fresh = [
        curve if curve.what != "cpu" else curve.model_copy(update={"values": [0.5] * 61}) for curve in curves
    ]
    broker.measured[7] = usage, fresh
    page.evaluate("document.body.dispatchEvent(new Event('state'))")
    expect(chart.locator(".legend")).to_contain_text("n1: 4")
    expect(chart.get_by_role("cell").first).to_have_text("4")
    assert canvas is not None and canvas.evaluate("canvas => canvas.isConnected")
    chart.get_by_text("As a table").click()
    page.locator("#use").scroll_into_view_if_needed()
    check_appearance(page, "job-curves", complaints)
    # In print as on white paper, whatever the screen is like.
    page.emulate_media(color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert chart.evaluate("chart => chart.palette.text") == "rgb(20, 20, 20)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert chart.evaluate(PALETTE_FITS)
    # In JupyterLab its theme decides, which a user changes while the page is open.
    chart.evaluate("chart => (chart.style.color = 'rgb(200, 100, 1)')")
    assert not chart.evaluate(PALETTE_FITS)
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    page.wait_for_function(PALETTE_FITS, arg=chart.element_handle())


def test_charts_are_in_the_language_of_the_portal(page: Page, charts: Locator, alice: User) -> None:
    """Its pages say which that is; in JupyterLab, whose page is English, the element of the script does."""

    def in_english(route: Route) -> None:
        text = route.fetch().text()
        route.fulfill(
            body=text.replace('<html lang="de"', '<html lang="en"').replace("<script ", '<script lang="de" ')
        )

    User.objects.filter(pk=alice.pk).update(language="de")
    for answer in (lambda route: route.continue_(), in_english):
        page.route("**/jobs/7/", answer)
        page.goto("/jobs/7/")
        plot = charts.nth(2).get_by_role("img")
        plot.focus()
        page.keyboard.press("Home")
        expect(charts.nth(2).locator(".legend")).to_contain_text("n1: 4,8")
        assert page.locator("#use").get_attribute("lang") == "de"
        page.unroute("**/jobs/7/")
    bounds = charts.nth(2).evaluate("chart => [[0, 0], [-2, -1], [0, 100]].map((of) => chart.bounds(...of))")
    assert bounds == [[0, 1], [-2, 0], [0, 105]]


def test_charts_are_by_the_clocks_that_the_user_has_chosen(page: Page, charts: Locator, alice: User) -> None:
    name = "Asia/Kathmandu"  # whose hours begin at no other zone's
    User.objects.filter(pk=alice.pk).update(time_zone=name)
    page.goto("/jobs/7/")
    chart = charts.nth(2)
    chart.get_by_role("img").focus()
    page.keyboard.press("Home")
    first = datetime.fromtimestamp(chart.evaluate("chart => chart.times[0]"), ZoneInfo(name))
    expect(chart.locator(".legend .moment")).to_have_text(f"{first:%H:%M:%S}")
    # The axis has its lines at full hours of that zone, and names its days.
    tick = "([chart, hour]) => { chart.spec.step = 3600; return chart.tick(hour, 3600); }"
    midnight = first.replace(hour=0, minute=0, second=0)
    handle = chart.element_handle()
    for moment, words in (
        (midnight, f"{midnight:%a} {midnight.day}"),
        (first.replace(hour=7, minute=0), "07:00"),
    ):
        shown = page.evaluate(tick, [handle, int(moment.timestamp())])
        assert sorted(re.split(r"\W+", shown)) == sorted(re.split(r"\W+", words)), shown
    lines = chart.evaluate(SPLITS)
    assert lines
    assert {datetime.fromtimestamp(at, ZoneInfo(name)).minute for at in lines} == {0}


def test_ranks_have_small_charts_of_one_scale(
    page: Page, charts: Locator, broker: FakeBroker, complaints: list[str]
) -> None:
    usage, curves = measurements()
    start = curves[0].start
    waits = [
        Curve(
            what="rank_wait", name=f"n{1 + rank // 2} rank {rank}", part=part, start=start, step=30,
            values=[share * (1 + place % 5 / 10) for place in range(61)],
        )
        for rank in range(4)
        for part, share in (("data", 0.05 + 0.1 * (rank == 2)), ("ranks", 0.3 - 0.25 * (rank == 2)))
    ]  # fmt: skip
    broker.measured[7] = usage, [*curves, *waits]
    page.evaluate("document.body.dispatchEvent(new Event('state'))")
    ranks = page.get_by_role("list", name="Waiting, rank by rank").get_by_role("listitem")
    expect(ranks).to_have_count(4)
    expect(ranks.nth(2).get_by_role("img", name="n2 rank 2: for data ")).to_be_visible()
    assert ranks.nth(2).locator("carme-chart").evaluate(DRAWN) > 100
    tops = "list => [...list.querySelectorAll('carme-chart')].map(chart => chart.plot.scales.y.max)"
    assert page.locator(".multiples").evaluate(tops) == [100] * 4
    page.locator(".means summary").click()
    expect(page.locator(".means").get_by_role("row")).to_have_count(5)
    # The table stays open when the part is renewed, and closed once the reader has closed it.
    for is_open, mean in ((True, "62.4 %"), (False, "12.5 %")):
        if not is_open:
            page.locator(".means summary").click()
        share = float(mean.split()[0]) / 100
        fresh = [waits[0].model_copy(update={"values": [share] * 61}), *waits[1:]]
        broker.measured[7] = usage, [*curves, *fresh]
        page.evaluate("document.body.dispatchEvent(new Event('state'))")
        expect(page.locator(".means td").first).to_have_text(mean)
        expect(page.locator(".means tbody")).to_be_visible(visible=is_open)
    page.locator(".means summary").click()
    expect(page.locator(".means tbody")).to_be_visible()
    # The key's strokes have the colours of the lines, on dark pages too.
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for place in range(2):
            stroke = page.locator(".legend .stroke").nth(place)
            drawn = ranks.first.locator("carme-chart").evaluate(LINE_COLOUR, place)
            expect(stroke).to_have_css("border-top-color", drawn)
    check_appearance(page, "job-ranks", complaints)


def test_stacks_are_read_by_keyboard_and_table(
    page: Page, sample_data: None, complaints: list[str], bob: User
) -> None:
    now = timezone.now()
    middle = (now.replace(day=1, hour=12) - timedelta(days=1)).replace(day=15)
    ran = {"account": "carme-vision", "submitted": middle, "started": middle}
    Job.store(
        make_job(number, user, "COMPLETED", gpus=gpus, ended=middle + timedelta(hours=10), **ran)
        for number, user, gpus in ((101, "alice", 4), (102, "bob", 1))
    )
    sign_in(page)
    page.goto("/projects/at/vision/")
    chart = page.locator("#months carme-chart")
    expect(chart.locator("canvas")).to_be_visible()
    assert chart.evaluate(DRAWN) > 1000
    # Each part stands on those before it.
    assert chart.evaluate("chart => chart.drawn.map(one => [one.name, one.values[4]])") == [
        ["bob", 50],
        ["alice", 40],
    ]
    chart.get_by_role("img", name="Use by member and month: ").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(chart.locator(".legend")).to_contain_text("alice: 40")
    expect(chart.locator(".legend")).to_contain_text("bob: 10")
    chart.get_by_text("As a table").click()
    expect(chart.get_by_role("columnheader")).to_have_text(["Month", "alice", "bob"])
    expect(chart.get_by_role("row")).to_have_count(7)
    check_appearance(page, "project-use", complaints)
    # The calendar has a chart of the same kind; the first values that it shows are today's.
    page.goto("/bookings/")
    chart = page.locator("#share carme-chart")
    expect(chart.locator("canvas")).to_be_visible()
    assert chart.evaluate(DRAWN) > 1000
    chart.get_by_text("As a table").click()
    expect(chart.get_by_role("row")).to_have_count(8)
    place = chart.evaluate("chart => chart.spec.current")
    assert place < 6, "today, not the last day"
    today = chart.get_by_role("row").nth(1 + place).get_by_role("rowheader").text_content()
    expect(chart.locator(".legend .moment")).to_have_text(today or "none")
    assert chart.get_by_role("img", name=f"Booked GPUs: {today}: ").count() == 1
    check_appearance(page, "booking-share", complaints)


#: Whether a chart is as wide as its place and has the shape in which it was drawn.
FITS = """chart => {
  const place = chart.place.getBoundingClientRect();
  const canvas = chart.shadowRoot.querySelector("canvas");
  const shown = canvas.getBoundingClientRect();
  return Math.abs(place.width - shown.width) < 1 && Math.abs(place.right - shown.right) < 1
    && Math.abs(shown.height / shown.width - canvas.height / canvas.width) < .01;
}"""
ON_PAPER = 650  # pixels, as in charts.js


@pytest.mark.parametrize("size", [SMALL, DESKTOP])
def test_charts_are_as_wide_as_the_paper(
    page: Page, charts: Locator, size: ViewportSize, complaints: list[str]
) -> None:
    page.set_viewport_size(size)
    chart = charts.nth(2)
    on_screen = "chart => chart.plot.width === chart.place.clientWidth && chart.plot.width !== 650"
    handle = chart.element_handle()
    page.wait_for_function(on_screen, arg=handle)
    page.evaluate(
        """chart => addEventListener("beforeprint",
             () => (window.printed = [chart.plot.width, chart.palette.text]))""",
        handle,
    )
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.evaluate("window.printed") == [ON_PAPER, "rgb(20, 20, 20)"]
    page.wait_for_function(on_screen, arg=handle)
    # Whatever the paper is: A5, A4, and A4 on its side.
    for width in (480, 718, 1040):
        page.set_viewport_size({"width": width, "height": 1000})
        page.emulate_media(media="print")
        page.wait_for_function(f"chart => chart.plot.width === {ON_PAPER}", arg=handle)
        assert [charts.nth(place).evaluate(FITS) for place in range(charts.count())] == [True] * 5
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        keep(page, f"printed-{size['width']}-{width}")
        page.emulate_media(media="screen")
        page.wait_for_function(on_screen, arg=handle)


def test_axes_have_the_unit_of_their_numbers_and_each_day_its_number(charts: Locator) -> None:
    chart = charts.first
    expect(chart.locator("canvas")).to_be_visible()
    # The same names with other numbers are drawn into the same picture, and the unit may be another one.
    labels = """(chart, unit) => {
      chart.dataset.chart = JSON.stringify({ ...JSON.parse(chart.dataset.chart), unit });
      return chart.plot.axes[1].values(chart.plot, [1, 2]);
    }"""
    assert chart.evaluate(labels, "MiB/s") == ["1\xa0MiB/s", "2\xa0MiB/s"]
    assert chart.evaluate(labels, "GiB/s") == ["1\xa0GiB/s", "2\xa0GiB/s"]
    days = "chart => [23, 24].map((day) => chart.tick(new Date(2026, 10, day).getTime() / 1000, 86400))"
    assert [re.sub(r"\D", "", words) for words in chart.evaluate(days)] == ["23", "24"]


def test_as_many_stacks_are_named_as_their_names_leave_room_for(charts: Locator) -> None:
    chart = charts.first
    expect(chart.locator("canvas")).to_be_visible()
    draw = """(chart, data) => {
      chart.dataset.chart = data;
      return chart.plot.axes[0].values(chart.plot, chart.times).filter(Boolean).length;
    }"""

    def named(words: str) -> int:
        labels = [f"{words}{number}" for number in range(1, 13)]
        stack = Stack("Waits", "h", "Partition", labels, [Part("median", [1.0] * len(labels))])
        return chart.evaluate(draw, stack.data)

    # They come into the same drawing.
    few = named("a partition with a long name ")
    assert 0 < few < named("p")
    assert named("a partition with a long name ") == few


@pytest.fixture
def measured(
    sample_data: None, tmp_path_factory: pytest.TempPathFactory, settings: Any
) -> Iterator[Prometheus]:
    """A Prometheus that has measured job 7, of Alice's session, for half an hour."""
    now = int(time.time())
    lines = []
    for kind, name, labels, value in (
        ("gauge", "gpu_utilization_ratio", ',gpu="0"', lambda at: 0.5 + 0.4 * (at // 60 % 5) / 5),
        ("gauge", "cpus", "", lambda at: 8),
        ("counter", "cpu_seconds_total", "", lambda at: 3 * (at - now + 3600)),
        ("gauge", "memory_used_bytes", "", lambda at: (1 + (at - now + 2400) / 600) * GIB),
        ("gauge", "memory_limit_bytes", "", lambda at: 16 * GIB),
    ):
        lines.append(f"# TYPE carme_job_{name.removesuffix('_total')} {kind}")
        lines += [
            f'carme_job_{name}{{jobid="7",user="alice",node="n1"{labels}}} {value(at)} {at}'
            for at in range(now - 2400, now + 900, 15)
        ]
    folder = tmp_path_factory.mktemp("measured")
    with prometheus_with("\n".join([*lines, "# EOF", ""]), folder) as running:
        place = django_settings.SITE.monitoring.model_copy(
            update={"prometheus": running.url, "portal_certificates": running.certificates}
        )
        settings.SITE = settings.SITE.model_copy(update={"monitoring": place})
        yield running


def test_the_dashboard_shows_what_my_sessions_do(
    page: Page, measured: Prometheus, broker: FakeBroker, alice: User, complaints: list[str]
) -> None:
    now = timezone.now()
    begun = now - timedelta(minutes=35)
    Job.store(
        [broker.put(make_job(7, kind="session", started=begun, submitted=begun, cpus=8, minutes_limit=120))]
    )
    reported = make_session("s12345678", "ready", 5, ends=now + timedelta(hours=1)).model_dump(mode="json")
    Session.objects.filter(name="s12345678").update(state="ready", job_id=7, reported=reported)
    Project.objects.filter(name="vision").update(gpu_hours=500, used={"gpu_hours": 320.0})
    broker.put(make_job(9, user="bob", gpus=2, node_list="n1", started=now, minutes_limit=900))
    sign_in(page)
    page.goto("/")
    sparks = page.locator("#card-s12345678 carme-sparks")
    expect(sparks.locator("figcaption")).to_have_count(3)
    for title in ("GPUs", "Processors", "Memory"):
        expect(sparks.get_by_role("img", name=f"{title}: {title} ")).to_be_visible()
    assert sparks.locator("carme-chart").first.evaluate(DRAWN) > 100
    # The numbers are in a table, which the keyboard opens.
    sparks.locator("> details > summary").focus()
    page.keyboard.press("Enter")
    expect(sparks.get_by_role("columnheader")).to_have_text(["Time", "GPUs", "Processors", "Memory"])
    expect(sparks.get_by_role("row").last.get_by_role("cell").first).to_have_text(re.compile(r"\d\s%"))
    # The part of the page that is renewed every few seconds leaves them as they are.
    canvas = sparks.locator("canvas").first.element_handle()
    with page.expect_response("**/live/"):
        page.evaluate("document.body.dispatchEvent(new Event('update'))")
    expect(sparks.locator("figcaption")).to_have_count(3)
    expect(sparks.get_by_role("table")).to_be_visible()
    page.keyboard.press("Enter")
    expect(sparks.get_by_role("table")).to_have_count(0)
    assert canvas is not None and canvas.evaluate("canvas => canvas.isConnected")
    expect(page.locator("#month")).to_contain_text("320 of 500 GPU-hours")
    expect(page.get_by_role("table", name="a100: free GPUs in the next days")).to_be_visible()
    expect(page.locator(".images .package").first).to_be_visible()
    check_appearance(page, "dashboard-running", complaints)
    expect(page.get_by_text("First time here?")).to_have_count(0)  # who has a session needs no hint


def test_moments_are_by_the_browsers_clock_with_the_sites_on_hover(
    chromium: Chromium, address: str, sample_data: None, broker: FakeBroker
) -> None:
    begun = datetime(2026, 9, 20, 22, 30, tzinfo=UTC)
    Job.store(
        [
            broker.put(make_job(number, kind="batch", state="COMPLETED", submitted=at, started=at, ended=at))
            for number, at in ((7, begun), (8, timezone.now() - timedelta(hours=2.5)))
        ]
    )
    context = chromium.new_context(
        base_url=address, viewport=DESKTOP, timezone_id="Asia/Tokyo", locale="en-GB"
    )
    page = context.new_page()
    log_in(page)
    expect(page.get_by_role("heading", name="Profile")).to_be_visible()
    page.goto("/jobs/7/")
    moment = page.locator("#live dl time").first
    expect(moment).to_have_text("21 Sep 2026, 07:30:00")
    expect(moment).to_have_attribute("title", "20 Sep 2026, 22:30:00 UTC")
    page.goto("/jobs/?q=job")
    row = page.get_by_role("row").filter(has_text="job 8")
    expect(row.locator("td time").first).to_have_text("2 hours ago")
    context.close()


def test_terms_are_explained_by_keyboard(page: Page, sample_data: None, complaints: list[str]) -> None:
    sign_in(page)
    page.goto("/")
    page.get_by_text("More options").click()
    button = page.get_by_role("button", name="What does “Partition” mean?")
    button.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("A group of nodes with common limits.")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_text("A group of nodes with common limits.")).to_be_hidden()


def test_a_guide_is_read_without_the_internet(page: Page, sample_data: None, complaints: list[str]) -> None:
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    log_in(page)
    page.goto("/images/")
    page.get_by_role("link", name="Help").click()
    page.locator("#images").get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Images: the site's, and your own")
    page.goto("/help/sessions/")
    assert page.evaluate(
        "[...document.images].every(image => image.naturalWidth > 0 || image.loading === 'lazy')"
    )
    check_appearance(page, "guide", complaints)
    page.goto("/help/")
    check_appearance(page, "help", complaints)
    assert json.dumps([url for url in requested if not url.startswith("http://localhost:")]) == "[]"
