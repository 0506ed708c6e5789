"""How people start sessions, in Chromium: the start form, and its advice."""

from datetime import UTC, datetime, timedelta

import pytest
from axe_rules import EVERY
from playwright.sync_api import Page, Route, expect
from scaling_results import write_result

from carme.jobs import Node, Partition
from carme_webui.accounts.models import User
from carme_webui.sessions.models import Session

from ..fake_broker import FakeBroker, make_session
from .conftest import DESKTOP, PHONE, fits, keep, sign_in
from .test_accessibility import SIZES, violations

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_form_says_when_a_session_would_begin(page: Page, sample_data: None, broker: FakeBroker) -> None:
    sign_in(page)
    page.goto("/")
    expect(page.locator("#estimate")).to_contain_text("Starts now.")
    broker.starts = lambda requested: datetime.now(UTC) + timedelta(hours=3 if requested.minutes > 60 else 1)
    expect(page.locator("#estimate")).to_contain_text("Cost in GPU-hours: 1.")
    expect(page.get_by_label("Hours")).to_be_hidden()
    bottom = page.get_by_role("button", name="Start", exact=True).bounding_box()
    keep(page, "start-form")
    assert bottom and bottom["y"] + bottom["height"] <= DESKTOP["height"], "Start is in view"
    page.get_by_label("4 h").check()
    expect(page.locator("#estimate")).to_contain_text("Expected start: between")
    expect(page.locator("#estimate")).to_contain_text("Cost in GPU-hours: 4.")
    page.get_by_role("group", name="Hardware").get_by_label("Custom").check()
    page.get_by_role("group", name="Time").get_by_label("Custom").check()
    page.get_by_label("GPUs per node").fill("2")
    page.get_by_label("Hours").fill("2")
    page.get_by_label("Minutes").fill("60")
    page.keyboard.press("Tab")
    expect(page.locator("#estimate")).to_contain_text("Cost in GPU-hours: 6.")
    page.get_by_text("More options").click()
    page.get_by_label("Title").fill("Mine")
    assert fits(page)
    keep(page, "start-estimate")


def test_a_refused_start_keeps_what_was_typed_and_says_why(page: Page, sample_data: None) -> None:
    """The site's own sentence, not the browser's about a number that is too high."""
    sign_in(page)
    page.goto("/")
    page.get_by_text("More options").click()
    page.get_by_label("Title").fill("Too much")
    page.get_by_role("group", name="Hardware").get_by_label("Custom").check()
    page.get_by_label("GPUs per node").fill("9")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.locator(".errorlist")).to_contain_text("9 were requested")
    expect(page.get_by_label("Title")).to_have_value("Too much")
    expect(page.get_by_label("GPUs per node")).to_have_value("9")


def test_a_session_opens_by_itself_once_when_it_is_ready(page: Page, sample_data: None) -> None:
    sign_in(page)
    page.goto("/")
    page.get_by_role("button", name="Start and open").click()
    expect(page.locator("#opens")).to_have_text("It opens here as soon as it is ready.")
    assert violations(page, EVERY) == []
    keep(page, "start-and-open")
    address = page.url.partition("?")[0]
    name = address.rstrip("/").rpartition("/")[2]
    Session.objects.filter(name=name).update(
        state="ready", job_id=9, reported=make_session(name, steps=8, node_list="n1").model_dump(mode="json")
    )
    page.evaluate("document.body.dispatchEvent(new Event('update'))")
    page.wait_for_url(f"**/jupyter/user/alice/{name}/**")
    page.go_back()
    expect(page.get_by_role("link", name="Open JupyterLab")).to_be_visible()
    assert page.url == address, "who comes back stays"


def test_more_images_than_are_in_view_are_counted_and_fade_out(page: Page, sample_data: None) -> None:
    sign_in(page)
    page.goto("/")
    group = page.get_by_role("group", name="Image")
    expect(group.get_by_role("radio")).to_have_count(3)
    expect(group.get_by_text("3, scroll for all")).to_be_visible()
    assert page.locator(".images .many").evaluate("one => one.scrollHeight > one.clientHeight")
    keep(page, "start-form-many-images")
    group.get_by_role("radio").last.check()
    keep(page, "start-form-last-image")
    assert fits(page)
    assert violations(page, EVERY) == []


def test_a_phone_has_a_button_that_shows_the_start_form(page: Page, sample_data: None) -> None:
    sign_in(page)
    page.goto("/")
    expect(page.get_by_role("link", name="Start a session", exact=True)).to_be_hidden()
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("link", name="Start a session", exact=True).click()
    expect(page.get_by_role("heading", name="Start a session")).to_be_in_viewport()


#: What the bar at a phone's lower edge hides of the element that has the focus.
HIDDEN = """() => {
    const one = document.activeElement, bar = document.querySelector(".start-bar");
    if (bar.contains(one) || one === document.body) return "";
    const hides = one.getBoundingClientRect().bottom > bar.getBoundingClientRect().top + 1;
    return hides ? one.outerHTML.slice(0, 200) : "";
}"""
LAST = "() => document.activeElement === document.querySelector('.start-bar button:last-child')"


def test_a_phone_has_start_and_what_it_would_start_always_in_view(
    page: Page, sample_data: None, broker: FakeBroker, alice: User
) -> None:
    sign_in(page)
    page.emulate_media(reduced_motion="reduce")  # or else the page still moves when it is checked
    page.goto("/")
    bar, start = page.locator(".start-bar"), page.get_by_role("button", name="Start", exact=True)
    expect(bar).to_be_hidden()
    expect(start).to_have_count(1)
    page.set_viewport_size({"width": 390, "height": 844})
    expect(start).to_have_count(1)
    expect(bar.get_by_role("button", name="Start", exact=True)).to_be_in_viewport(ratio=1)
    expect(bar.get_by_role("button", name="Start and open")).to_be_in_viewport(ratio=1)
    expect(bar.get_by_role("link")).to_contain_text("torch · 1 node · 1 GPU · 1 hour Starts now.")
    assert violations(page, EVERY) == []
    keep(page, "phone-start", whole=False)
    # The choice's words follow the form.
    broker.starts = lambda requested: datetime.now(UTC) + timedelta(hours=3)
    page.get_by_label("4 h").check()
    expect(bar.get_by_role("link")).to_contain_text("4 hours Expected start: between")
    assert bar.get_by_role("link").locator("time").first.get_attribute("title")
    bar.get_by_role("link").click()
    expect(page.get_by_role("heading", name="Start a session")).to_be_in_viewport()
    # The keyboard comes to everything, and nothing that has the focus is behind the bar.
    page.evaluate("() => { scrollTo(0, 0); document.getElementById('main').focus(); }")
    seen = 0
    while not page.evaluate(LAST):
        page.keyboard.press("Tab")
        seen += 1
        assert not page.evaluate(HIDDEN)
        assert seen < 500, "the keyboard comes to the bar"
    while page.evaluate(
        "() => document.activeElement.id !== 'main' && document.activeElement !== document.body"
    ):
        page.keyboard.press("Shift+Tab")
        seen -= 1
        assert not page.evaluate(HIDDEN)
        assert seen > -500
    # At its end the page has nothing below the bar.
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    last = page.get_by_role("button", name="Save as preset").bounding_box()
    edge = bar.bounding_box()
    assert last and edge and last["y"] + last["height"] <= edge["y"]
    keep(page, "phone-start-form", whole=False)
    User.objects.filter(pk=alice.pk).update(language="de")
    page.goto("/")
    expect(bar.get_by_role("link")).to_contain_text("1 GPU · 1 Stunde")
    expect(bar.get_by_role("button", name="Starten", exact=True)).to_be_in_viewport(ratio=1)
    keep(page, "phone-start-german", whole=False)
    # A low window is left to the page: the form has the buttons itself.
    page.set_viewport_size({"width": 390, "height": 400})
    expect(bar).to_be_hidden()
    expect(page.locator(".start-buttons .primary")).to_be_visible()


def test_a_phone_says_at_the_top_that_the_form_needs_a_change(page: Page, sample_data: None) -> None:
    sign_in(page)
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/")
    page.get_by_role("group", name="Time").get_by_label("Custom").check()
    page.get_by_label("Hours").fill("0")
    page.get_by_label("Minutes").fill("0")
    page.locator(".start-bar").get_by_role("button", name="Start", exact=True).click()
    notice = page.get_by_role("alert").filter(has_text="Not done yet: correct the form first.")
    expect(notice).to_be_in_viewport()
    notice.get_by_role("link", name="Go to the form").click()
    expect(page.get_by_role("heading", name="Start a session")).to_be_in_viewport()
    expect(page.get_by_text("Enter a time of at least one minute.")).to_be_visible()
    assert violations(page, EVERY) == []
    page.set_viewport_size(DESKTOP)
    expect(notice).to_be_hidden()


def test_a_change_while_the_form_waits_for_an_answer_is_not_lost(
    page: Page, sample_data: None, broker: FakeBroker
) -> None:
    """Of several changes the last one is shown, though the first answer is still on its way."""
    write_result(broker.home / "scale.json")
    nodes = [Node(name=f"n{n}", cpus=16, memory_mb=64_000, gpus={"a100": 4}) for n in range(1, 5)]
    partition = Partition(name="gpu", default=True, node_names=[node.name for node in nodes])
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes, "partitions": [partition]})
    held: list[Route] = []
    is_slow = True

    def answer(route: Route) -> None:
        if is_slow:
            held.append(route)
        else:
            route.continue_()

    sign_in(page)
    page.route("**/sessions/estimate/", answer)
    with page.expect_request("**/sessions/estimate/"):
        page.goto("/?scaling=scale.json")
    page.evaluate(
        "document.getElementById('estimate').addEventListener("
        "'htmx:config:request', () => window.changes = (window.changes ?? 0) + 1)"
    )
    hardware = page.get_by_role("group", name="Hardware")
    for number, choice in enumerate(("No GPU", "2 nodes, 4 GPUs each"), 1):
        hardware.get_by_label(choice).check()
        page.wait_for_function("number => window.changes === number", arg=number)
    is_slow = False
    for route in held:
        route.continue_()  # of those that the page has given up, nothing comes
    chosen = page.locator("#estimate").get_by_role("row").filter(has_text="chosen")
    expect(chosen).to_contain_text("8 GPUs (2 nodes)")


def test_the_form_advises_how_many_gpus_to_ask_for(page: Page, sample_data: None, broker: FakeBroker) -> None:
    """With the keyboard alone, by eye in light and dark, and on a phone."""
    write_result(broker.home / "scale.json")
    nodes = [Node(name=f"n{n}", cpus=16, memory_mb=64_000, gpus={"a100": 4}) for n in range(1, 5)]
    partition = Partition(name="gpu", default=True, node_names=[node.name for node in nodes])
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes, "partitions": [partition]})
    broker.starts = lambda request: datetime.now(UTC) + timedelta(hours=3 if request.nodes > 1 else 0)
    sign_in(page)
    page.goto("/")
    advice = page.locator("#estimate")
    expect(advice).to_contain_text("Starts now.")
    page.get_by_text("How far does it scale?").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Result of a probe")).to_be_focused()
    # The field proposes what lies at home.
    expect(page.locator("#probe-files option")).to_have_attribute("value", "scale.json")
    page.keyboard.type("scale.json")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Training steps")).to_be_focused()
    page.keyboard.type("150000")
    page.keyboard.press("Tab")
    expect(advice).to_contain_text("Cheapest: 1 GPU,")
    expect(advice).to_contain_text("Fastest: 16 GPUs (4 nodes),")
    expect(advice.get_by_role("img")).to_be_visible()
    expect(advice.get_by_role("row").filter(has_text="chosen")).to_contain_text("1 GPU")
    page.get_by_role("group", name="Hardware").get_by_label("2 nodes, 4 GPUs each").check()
    expect(advice.get_by_role("row").filter(has_text="chosen")).to_contain_text("8 GPUs (2 nodes)")
    table = advice.get_by_role("region", name="Choices")
    table.focus()
    expect(table).to_be_focused()
    assert table.evaluate("table => table.scrollWidth - table.clientWidth") == 0, "each start is read in full"
    for screen, viewport in (("desktop", DESKTOP), ("phone", PHONE)):
        page.set_viewport_size(viewport)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert violations(page, EVERY if scheme == "light" else SIZES) == []
            assert fits(page)
            page.set_viewport_size(viewport)
            keep(page, f"start-scaling-{screen}-{scheme}")
    page.emulate_media(color_scheme="light")
    page.get_by_label("Result of a probe").fill("gone.json")
    page.keyboard.press("Tab")
    expect(advice.get_by_role("alert")).to_have_text(
        "There is no 'gone.json'. It may have been moved or deleted: load the folder again."
    )
    page.set_viewport_size(DESKTOP)
    page.goto("/jobs/submit/?pattern=distributed")
    page.get_by_text("How far does it scale?").click()
    page.get_by_label("Result of a probe").fill("scale.json")
    page.keyboard.press("Tab")
    expect(page.locator("#predicted")).to_contain_text("2 GPUs (2 nodes)")
    assert violations(page, EVERY) == []
    keep(page, "submit-scaling")
