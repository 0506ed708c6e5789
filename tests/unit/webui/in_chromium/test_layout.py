"""Where things stand on a page, as a reader sees it."""

import re
from datetime import datetime, time, timedelta
from itertools import pairwise

import pytest
from playwright.sync_api import Page, expect

from carme_webui.accounts.models import User
from carme_webui.announcements.models import News
from carme_webui.bookings.models import Booking
from carme_webui.clocks import site_zone
from carme_webui.projects.models import Project

from ..fake_broker import FakeBroker
from .conftest import sign_in

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("sample_data")]

#: For each sign of a legend the pixels to its own word, and those from there to the next sign of that row.
DISTANCES = """() => {
    const entries = [...document.querySelectorAll(".legend > span")].map((entry) => {
        const word = document.createRange();
        word.selectNodeContents(entry.lastChild);
        return { sign: entry.firstElementChild.getBoundingClientRect(), word: word.getBoundingClientRect() };
    });
    return entries.slice(1).flatMap((entry, place) => {
        const { sign, word } = entries[place];
        const sameRow = Math.abs(entry.sign.top - sign.top) < 1;
        return sameRow ? [[word.left - sign.right, entry.sign.left - word.right]] : [];
    });
}"""
#: How far the middle of a summary's words is from that of its chevron, in pixels.
OFF_MIDDLE = """(summary) => {
    const { height } = getComputedStyle(summary, "::after");
    const words = document.createRange();
    words.selectNodeContents(summary);
    const text = words.getBoundingClientRect(), box = summary.getBoundingClientRect();
    const centred = getComputedStyle(summary).alignItems === "center" && parseFloat(height) <= box.height;
    return centred ? Math.abs((text.top + text.bottom) / 2 - (box.top + box.bottom) / 2) : Infinity;
}"""


def test_signs_of_a_legend_stand_beside_their_own_words(page: Page) -> None:
    sign_in(page)
    page.goto("/bookings/")
    expect(page.locator("p.legend")).to_contain_text("waits for approval")
    distances = page.evaluate(DISTANCES)
    assert len(distances) > 3
    assert all(2 * own < next_sign for own, next_sign in distances), distances


def test_chevrons_stand_on_the_line_of_their_words(page: Page) -> None:
    sign_in(page)
    page.goto("/")
    summaries = page.locator(".start-form summary")
    expect(summaries).to_have_count(2)
    for summary in summaries.all():
        assert summary.evaluate(OFF_MIDDLE) < 2


def test_a_long_scope_of_a_token_does_not_run_below_its_box(page: Page) -> None:
    sign_in(page)
    page.goto("/tokens/")
    label = page.locator(".scopes label").filter(has_text="answer invitations")
    box = label.locator("input").bounding_box()
    words = label.evaluate(
        """(label) => {
            const words = document.createRange();
            words.selectNodeContents(label);
            words.setStartAfter(label.querySelector("input"));
            return words.getBoundingClientRect().left;
        }"""
    )
    assert box is not None
    assert words >= box["x"] + box["width"]


def test_facts_of_a_job_take_two_columns_of_a_wide_page(page: Page) -> None:
    sign_in(page)
    page.goto("/jobs/7/")
    facts = page.locator("dl.pairs dt")
    tops = [fact.bounding_box() for fact in facts.all()[:2]]
    assert tops[0] and tops[1]
    assert tops[0]["y"] == pytest.approx(tops[1]["y"], abs=4)
    page.set_viewport_size({"width": 390, "height": 844})
    narrow = [fact.bounding_box() for fact in facts.all()[:2]]
    assert narrow[0] and narrow[1]
    assert narrow[0]["y"] + narrow[0]["height"] <= narrow[1]["y"]


def test_links_of_a_guides_menu_stand_below_each_other(page: Page) -> None:
    sign_in(page)
    page.goto("/help/sessions/")
    menu = page.locator(".guide-menu ul").first
    places = menu.evaluate(
        """(list) => [...list.children]
            .map((item) => item.getBoundingClientRect())
            .map(({ left, top }) => [left, top])"""
    )
    assert len(places) > 3
    assert len({left for left, _top in places}) == 1
    tops = [top for _left, top in places]
    assert tops == sorted(set(tops))


def test_guides_of_the_help_begin_at_the_edge_of_the_page_in_close_rows(page: Page) -> None:
    sign_in(page)
    page.goto("/help/")
    edge = page.get_by_role("heading", name="Guides").bounding_box()
    boxes = [link.bounding_box() for link in page.locator(".guides a").all()]
    assert edge and len(boxes) > 8 and all(boxes)
    assert min(box["x"] for box in boxes if box) == edge["x"]
    tops = sorted({box["y"]: box["height"] for box in boxes if box}.items())
    gaps = [below - top - height for (top, height), (below, _height) in pairwise(tops)]
    assert gaps and all(0 < gap < 12 for gap in gaps), gaps


def test_amounts_of_a_list_begin_and_end_below_each_other(page: Page) -> None:
    Project.objects.filter(name="vision").update(gpus=4, gpu_hours=100)
    sign_in(page)
    page.goto("/projects/at/vision/")
    bars = [bar.bounding_box() for bar in page.locator(".supplies meter").all()]
    assert len(bars) > 1 and all(bars)
    assert len({(bar["x"], bar["width"]) for bar in bars if bar}) == 1


@pytest.mark.parametrize("path", ["/", "/announcements/", "/jobs/7/"])
def test_a_page_is_as_wide_as_a_small_phone(page: Page, alice: User, path: str) -> None:
    News.objects.create(title="x" * 100, text="y" * 100)
    alice.language = "de"  # its words are the longer ones
    alice.save()
    page.set_viewport_size({"width": 360, "height": 740})
    sign_in(page)
    page.goto(path)
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_an_administrators_fields_have_the_corners_of_all_others(page: Page) -> None:
    sign_in(page, "root1")
    page.goto("/admin/record/")
    corners = page.locator(".record-search :is(input, select)").evaluate_all(
        "(fields) => fields.map((field) => getComputedStyle(field).borderRadius)"
    )
    assert len(corners) == 5
    assert len(set(corners)) == 1, corners


@pytest.mark.parametrize("path", ["/bookings/", "/admin/nodes/", "/admin/jobs/", "/admin/record/"])
def test_paper_has_tables_in_full_and_no_menus(page: Page, path: str) -> None:
    sign_in(page, "root1")
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 without its margins
    page.emulate_media(media="print")
    page.goto(path)
    expect(page.locator("main table").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    shown = [row for row in page.locator("main :is(nav a, button, input, select)").all() if row.is_visible()]
    assert len(shown) <= 1, "the menu's present entry alone"
    page.emulate_media(media="screen")
    assert page.locator("main :is(nav a, button)").first.is_visible()


@pytest.mark.parametrize("path", ["/admin/jobs/", "/admin/nodes/", "/admin/users/", "/admin/record/"])
def test_cells_of_a_row_begin_and_end_at_its_lines(page: Page, path: str) -> None:
    sign_in(page, "root1")
    page.goto(path)
    rows = page.locator("tbody tr").evaluate_all(
        """(rows) => rows.map((row) => [...row.cells].map((cell) => cell.getBoundingClientRect()))
            .map((cells) => cells.map(({ top, bottom }) => [Math.round(top), Math.round(bottom)].join()))"""
    )
    assert rows
    for row in rows:
        assert len(set(row)) == 1, row


def test_bars_of_a_node_begin_and_end_below_each_other(page: Page, broker: FakeBroker) -> None:
    nodes = [node.model_copy(update={"memory_used_mb": 11_700}) for node in broker.cluster.nodes]
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes})
    sign_in(page, "root1")
    page.goto("/admin/nodes/")
    bars = [bar.bounding_box() for bar in page.locator("#node-n1 progress").all()]
    assert len(bars) == 3 and all(bars)
    assert len({(bar["x"], bar["width"]) for bar in bars if bar}) == 1, bars


def test_buttons_of_a_form_stand_in_one_row_in_each_language(page: Page, alice: User) -> None:
    sign_in(page)
    forms = {"/": ".start-buttons button", "/jobs/submit/": ".submit-form > .actions button"}
    for language in ("en", "de"):
        User.objects.filter(pk=alice.pk).update(language=language)
        for address, buttons in forms.items():
            page.goto(address)
            assert page.locator("html").get_attribute("lang") == language
            tops = page.locator(buttons).evaluate_all(
                "(buttons) => buttons.map((button) => button.getBoundingClientRect().top)"
            )
            assert len(tops) > 1 and len(set(tops)) == 1, (language, address, tops)


def test_an_entry_of_the_calendar_is_read_or_a_dot(page: Page, alice: User) -> None:
    day = datetime.combine(datetime.now(site_zone()).date() + timedelta(days=2), time(), site_zone())
    for name, start, hours in (("Exam", 10, 1), ("Thesis", 12, 9)):
        Booking.objects.create(
            name=f"carme-{start:012x}", owner=alice, title=name, partition="gpu", gpu_type="a100",
            gpus_per_node=4, node_names=["n2"], start=day + timedelta(hours=start),
            end=day + timedelta(hours=start + hours), state="approved",
        )  # fmt: skip
    sign_in(page)
    page.goto("/bookings/")
    short, long = (page.locator(".calendar .item").filter(has_text=name) for name in ("Exam", "Thesis"))
    mark = "(item) => getComputedStyle(item, '::before').content"
    width = "(item) => item.querySelector('.label').getBoundingClientRect().width"
    assert short.evaluate(width) <= 1 and "\u2022" in short.evaluate(mark)
    assert long.evaluate(width) > 30 and long.evaluate(mark) == "none"
    # Its words are there for all the same.
    expect(page.get_by_role("link", name=re.compile("Exam ?,"))).to_have_count(1)
    short.hover()
    expect(page.locator(".tip")).to_contain_text("Exam, ")


def test_the_button_that_chooses_files_is_not_cut(page: Page) -> None:
    sign_in(page)
    page.goto("/files/")
    needed, there = page.locator("#upload-files").evaluate(
        """(input) => {
            const button = getComputedStyle(input, "::file-selector-button"), own = getComputedStyle(input);
            const sum = (style, names) => names.reduce((total, name) => total + parseFloat(style[name]), 0);
            const sides = ["paddingTop", "paddingBottom", "borderTopWidth", "borderBottomWidth"];
            const room = input.clientHeight - sum(own, ["paddingTop", "paddingBottom"]);
            return [sum(button, [...sides, "lineHeight"]), room];
        }"""
    )
    assert needed <= there
