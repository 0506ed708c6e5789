"""JupyterLab's page in Chromium, on a real single-user server: its first seconds, and the session's end."""

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from patience import HANG

from ..conftest import eventually
from .front import BASE, STOPPED, UNREACHED, Front, has_loaded, hurry

pytestmark = pytest.mark.asyncio(loop_scope="package")

#: Documents of the session.
DOCUMENTS = "/api/contents/"


def notebook(home: Path, name: str, code: str) -> None:
    """Write a notebook of one cell into the home."""
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": code, "outputs": []}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    whole = {"cells": [{**cell, "execution_count": None}], "metadata": {"kernelspec": kernel}}
    text = json.dumps({**whole, "nbformat": 4, "nbformat_minor": 5})
    (home / name).write_text(text)


async def test_what_is_typed_while_kernel_or_terminal_connect_is_not_lost(front: Front, page: Page) -> None:
    # Before the kernel is requested, while it starts, and while the way to it is opened.
    for number, held in enumerate(("/checkpoints", "POST /jupyter/user/ada/s1/api/sessions", "/channels")):
        notebook(front.home, f"{number}.ipynb", f"print('first', {number} + 10)")
        front.held, front.go_on = held, asyncio.Event()
        await page.goto(f"{front.url}{BASE}lab/tree/{number}.ipynb?reset")
        cell = page.locator(".jp-Notebook .jp-CodeCell").first
        await cell.locator(".cm-content").click()
        await page.keyboard.press("Shift+Enter")
        await expect(cell.locator(".jp-InputPrompt")).to_have_text("[*]:")
        front.go_on.set()
        await expect(cell.locator(".jp-OutputArea-output")).to_have_text(f"first {number + 10}")

    front.held, front.go_on = "/terminals/websocket", asyncio.Event()
    await page.goto(f"{front.url}{BASE}lab?reset&carme-open=terminal")
    await expect(page.locator(".jp-Terminal .xterm-helper-textarea")).to_be_focused()
    await page.keyboard.type("touch typed-at-once")
    await page.keyboard.press("Enter")
    front.go_on.set()
    await eventually((front.home / "typed-at-once").exists, "the command has run")


async def test_starting_again_without_the_portals_answer_leads_to_its_page(front: Front, page: Page) -> None:
    await hurry(page)
    await page.goto(f"{front.url}{BASE}lab?reset")
    await has_loaded(page)
    await front.lose_server()
    dialog = page.get_by_role("dialog").filter(has_text="This session has ended")
    await dialog.get_by_role("button", name="Start Again").click()
    await eventually(lambda: front.questions["/sessions/s1/"], "the portal's page of the session is opened")
    assert front.sent is None


async def test_a_session_with_documents_that_cannot_be_saved_is_not_stopped(front: Front, page: Page) -> None:
    (front.home / "unsaved.txt").write_text("first line\n")
    ends = (datetime.now(UTC) + timedelta(minutes=90)).isoformat()
    front.status = {"ends": ends, "stops_idle": None, "extend": True, "warned": [], "warned_idle": []}
    front.portal_reply = {
        "over": False,
        "state": "ready",
        "sentence": "Ready.",
        "token": "a token",
        "fresh": "s2",
    }
    await page.goto(f"{front.url}{BASE}lab/tree/unsaved.txt?reset")
    await page.locator(".jp-FileEditor .cm-content").click()
    await page.keyboard.type("more than the disk holds")
    front.full = DOCUMENTS
    await page.locator("#carme-session-time button").click()
    await page.get_by_role("dialog").get_by_role("button", name="Stop This Session").click()
    stop = page.get_by_role("dialog").filter(has_text="Stop this session?")
    await stop.get_by_role("button", name="Stop", exact=True).click()
    await expect(page.get_by_text("Not saved: unsaved.txt. The session goes on.").first).to_be_visible()
    assert front.sent is None


async def test_staying_for_unsaved_documents_is_confirmed_again(front: Front, fresh_page: Page) -> None:
    (front.home / "unsaved.txt").write_text("first line\n")
    await fresh_page.clock.install()
    await fresh_page.goto(f"{front.url}{BASE}lab/tree/unsaved.txt?reset")
    await has_loaded(fresh_page)
    await fresh_page.locator(".jp-FileEditor .cm-content").click()
    await fresh_page.keyboard.type("not saved")
    front.portal_reply = {
        "over": True,
        "state": "ended",
        "sentence": "Over.",
        "token": "a token",
        "fresh": "s2",
    }
    front.full = DOCUMENTS
    await front.lose_server()
    await fresh_page.clock.fast_forward("00:40")
    dialog = fresh_page.get_by_role("dialog").filter(has_text="This session has ended")
    async with fresh_page.expect_event("dialog") as leaving:
        await dialog.get_by_role("button", name="Start Again").click(no_wait_after=True)
    confirmation = await leaving.value
    assert confirmation.type == "beforeunload"
    await confirmation.dismiss()
    await fresh_page.clock.fast_forward("00:20")
    await expect(dialog).to_contain_text("You are still on the page of the old session.")


async def test_warnings_come_at_the_moments_that_the_hub_names(front: Front, fresh_page: Page) -> None:
    now = datetime.now(UTC)
    # A busy machine may need more than a minute for the page.
    await fresh_page.clock.set_fixed_time(now)

    def moment(minutes: float) -> str:
        return (now + timedelta(minutes=minutes)).isoformat()

    time: dict[str, object] = {"ends": moment(4), "stops_idle": None, "extend": True, "warned_idle": []}
    front.status = time | {"warned": [moment(3), moment(3.6)]}
    left = fresh_page.locator("#carme-session-time button")
    toast = fresh_page.get_by_text("This session ends in")
    await fresh_page.goto(f"{front.url}{BASE}lab?reset")
    await expect(left).to_have_text(re.compile(r"^[34] min left$"))
    assert await toast.count() == 0, "four minutes of four are no end"
    front.status = time | {"warned": [moment(-0.1), moment(3.6)]}
    await fresh_page.goto(f"{front.url}{BASE}lab?reset")
    await expect(toast.first).to_be_visible()


#: What of the bar at the bottom is seen where the time stands, too.
COVERED = """() => {
    const time = document.querySelector('#carme-session-time button').getBoundingClientRect();
    const items = [...document.querySelectorAll('#jp-main-statusbar .jp-StatusBar-Item')];
    const meets = box => box.width && box.left < time.right && box.right > time.left;
    return items.filter(item => meets(item.getBoundingClientRect())).map(item => item.innerText);
}"""


async def test_on_a_phone_the_files_are_folded_and_the_time_is_in_sight(front: Front, page: Page) -> None:
    ends = (datetime.now(UTC) + timedelta(hours=9)).isoformat()
    front.status = {"ends": ends, "stops_idle": None, "extend": True, "warned_idle": [], "warned": []}
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.goto(f"{front.url}{BASE}lab?reset")
    left = page.locator("#carme-session-time button")
    await expect(left).to_be_in_viewport(ratio=1)
    await expect(page.locator(".jp-FileBrowser")).to_be_hidden()
    await expect(page.get_by_role("menuitem", name="Help", exact=True)).to_be_in_viewport(ratio=1)
    # A panel at a side leaves its tab, which closes it, and the time within the screen.
    for name in ("carme-use", "filebrowser"):
        tab = page.locator(f'.lm-TabBar-tab[data-id="{name}"]')
        await tab.click()
        await expect(page.locator(f"#{name}")).to_be_in_viewport(ratio=1)
        await expect(tab).to_be_in_viewport(ratio=1)
        await expect(left).to_be_in_viewport(ratio=1)
        assert await page.evaluate("document.documentElement.scrollWidth") == 390
        await tab.click()
        await expect(page.locator(f"#{name}")).to_be_hidden()
    # Nothing else of the bar lies under the time, also when a document is open.
    notebook(front.home, "a.ipynb", "1")
    await page.goto(f"{front.url}{BASE}lab/tree/a.ipynb?reset")
    await expect(page.locator(".jp-Notebook .jp-CodeCell")).to_be_visible()
    kernel = page.locator("#jp-main-statusbar .jp-StatusBar-Item").filter(has_text="Python 3")
    await expect(kernel).to_be_attached()
    assert await page.evaluate(COVERED) == []


#: The portal's charts, as its pages have them, and a part of a job's page.
STATIC = Path(__file__).parents[4] / "webui/src/carme_webui/static/carme"
CHART = {
    "title": "Memory", "unit": "GiB", "start": 0, "step": 15, "series": [{"name": "n1", "values": [1, 2]}],
    "most": None, "summary": "n1 1.5 GiB on average", "line": {"name": "Requested", "value": 32},
    "words": {"table": "As a table", "time": "Time"},
}  # fmt: skip
PART = f"""<section id="use" lang="en" aria-labelledby="use-heading" data-plots="/static/uplot.js"
  data-charts="/static/charts.js" data-style="/static/charts.css" hx-get="/jobs/7/use/">
  <h2 id="use-heading">Resource usage</h2>
  <div class="charts"><carme-chart data-chart='{json.dumps(CHART)}'></carme-chart></div></section>"""


async def test_the_panel_draws_the_charts_of_the_jobs_page(front: Front, page: Page) -> None:
    """It asks the portal alone, which has the curves from Prometheus or from the nodes' exporters."""
    (plots,) = STATIC.glob("vendor/uplot-*.js")
    front.status = {"ends": None, "job": 7, "extend": False, "warned_idle": [], "warned": []}
    front.pages |= {"/jobs/7/use/": PART, "/static/uplot.js": plots.read_text()}
    front.pages["/static/charts.js"] = (STATIC / "charts.js").read_text()
    await page.goto(f"{front.url}{BASE}lab?reset")
    await has_loaded(page)
    await page.locator('.lm-TabBar-tab[data-id="carme-use"]').click()
    chart = page.locator("#carme-use carme-chart")
    await expect(chart.locator("canvas")).to_be_visible()
    await expect(chart.locator(".legend")).to_contain_text("n1: 2\xa0GiB")
    await expect(chart.locator(".legend")).to_contain_text("Requested: 32")
    paths = {path for path in front.questions if not path.startswith(BASE)}
    assert "/jobs/7/use/" in paths and not [path for path in paths if "metrics" in path], paths


#: Collects the texts of JupyterLab's messages, also of those that have disappeared.
LISTEN = """() => {
    window.shownMessages = '';
    new MutationObserver(() => {
        const messages = [...document.querySelectorAll('.Toastify__toast')];
        window.shownMessages += messages.map(message => message.innerText).join(' ');
    }).observe(document.body, { childList: true, subtree: true, characterData: true });
}"""


async def message_appears(page: Page, words: str) -> None:
    """Wait until one of JupyterLab's messages contains these words."""
    await page.wait_for_function("words => window.shownMessages.includes(words)", arg=words)


async def test_documents_are_called_saved_when_they_are_and_those_that_are_not_by_their_names(
    front: Front, fresh_page: Page
) -> None:
    file = front.home / "unsaved.txt"
    file.write_text("first line\n")
    now = datetime.now(UTC)
    passed = [(now + timedelta(minutes=minutes)).isoformat() for minutes in (-0.2, -0.1)]
    ends = (now + timedelta(minutes=40)).isoformat()
    time: dict[str, object] = {"ends": ends, "stops_idle": None, "extend": True, "warned_idle": []}
    front.status = time | {"warned": []}
    await fresh_page.clock.install()
    await fresh_page.goto(f"{front.url}{BASE}lab/tree/unsaved.txt?reset")
    text = fresh_page.locator(".jp-FileEditor .cm-content")
    await expect(text).to_contain_text("first line")
    await fresh_page.evaluate(LISTEN)

    # Over a slow network: nothing is called saved before it is.
    front.held, front.go_on = f"PUT {BASE}api/contents/", asyncio.Event()
    await text.click()
    await fresh_page.keyboard.press("Control+End")
    await fresh_page.keyboard.type("typed in time")
    front.status = time | {"warned": passed[:1]}
    await fresh_page.clock.fast_forward("00:40")
    await message_appears(fresh_page, "Documents are being saved.")
    assert "typed" not in file.read_text()
    assert not await fresh_page.evaluate("window.shownMessages.includes('All documents are saved')")
    front.go_on.set()
    await message_appears(fresh_page, "All documents are saved.")
    assert file.read_text() == "first line\ntyped in time"

    # A full disk.
    front.full = DOCUMENTS
    await fresh_page.keyboard.type(", and more")
    front.status = time | {"warned": passed}
    await fresh_page.clock.fast_forward("00:40")
    await message_appears(fresh_page, "Not saved: unsaved.txt.")
    assert file.read_text() == "first line\ntyped in time"


#: Sends a request to the session as JupyterLab's parts do; returns whether it passed.
ASK = """path => Promise.race([
    fetch(`${path}api/contents`).then(() => true),
    new Promise(done => setTimeout(done, 1000, false)),
])"""
#: The state of a new WebSocket to the session.
CONNECT = (
    "path => new WebSocket(`${location.origin.replace('http', 'ws')}${path}api/events/subscribe`).readyState"
)


async def test_the_end_of_the_session_is_reported_with_its_cause_and_nothing_is_queried_any_more(
    front: Front, page: Page
) -> None:
    await hurry(page)
    await page.goto(f"{front.url}{BASE}lab")
    await has_loaded(page)
    # The node does not answer: that is no end yet.
    front.portal_reply = {"over": False, "state": "lost", "sentence": "The node is out of reach."}
    await front.lose_server(UNREACHED)
    await expect(page.locator("#carme-session-time")).to_have_text("No answer from this session")
    assert await page.get_by_text("Server unavailable").count() == 0, "JupyterHub's own dialog"
    front.portal_reply = {"over": True, "state": "ended", "sentence": "The session ran out of memory."}
    front.gone = STOPPED
    dialog = page.get_by_role("dialog").filter(has_text="This session has ended")
    await expect(dialog).to_contain_text("The session ran out of memory.")
    await expect(page.locator("#carme-session-time")).to_have_text("This session has ended")
    assert await page.evaluate(ASK, BASE) is False
    assert await page.evaluate(CONNECT, BASE) == 0
    before = front.questions.copy()
    await page.evaluate(ASK, BASE)
    assert front.questions == before, "nothing reaches the site"
    await dialog.get_by_role("button", name="Go to the Portal").click()
    await page.wait_for_url("**/sessions/s1/")


# The last ones end their session, and the next one has to wait for another.


async def test_a_session_that_has_ended_starts_again_from_its_dialog(ending: Front, fresh_page: Page) -> None:
    await fresh_page.clock.install()
    await fresh_page.goto(f"{ending.url}{BASE}lab?reset")
    await has_loaded(fresh_page)
    # It is being stopped; its server is gone before the portal knows, and nothing of it is needed.
    ending.portal_reply = {"over": False, "state": "stopping", "sentence": "The session is being stopped."}
    ending.process.terminate()
    dialog = fresh_page.get_by_role("dialog").filter(has_text="This session has ended")
    # It opens by itself: a key that was meant for a document starts nothing, and the way back is there.
    await expect(dialog.get_by_role("button", name="Stay Here")).to_be_focused()
    await fresh_page.keyboard.press("Enter")
    await expect(dialog).to_have_count(0)
    await fresh_page.locator("#carme-session-time button").click()
    again = dialog.get_by_role("button", name="Start Again")
    await again.click()
    await expect(fresh_page.locator("#carme-session-time")).to_have_text("Starting again")
    assert ending.sent is None, "what it holds may be needed"
    # The dialog does not wait for ever without a message.
    await fresh_page.clock.fast_forward("01:10")
    await expect(dialog).to_contain_text("Try again in a minute.")
    await again.click()
    ending.portal_reply |= {"over": True, "state": "ended", "token": "a token", "fresh": "s22222222"}
    await fresh_page.wait_for_url("**/sessions/s22222222/")
    assert ending.sent == {"csrfmiddlewaretoken": "a token", "name": "s22222222", "then": "open"}


@pytest.mark.parametrize("save_seconds", [HANG], indirect=True)
async def test_a_session_that_is_stopped_says_what_is_saved_and_names_what_could_not_be(
    ending: Front, page: Page
) -> None:
    """In two tabs; the server waits for both, on a busy machine, too."""
    second_tab = await page.context.new_page()
    for tab, name in ((page, "unsaved.txt"), (second_tab, "large.txt")):
        (ending.home / name).write_text("first line\n")
        await tab.goto(f"{ending.url}{BASE}lab/tree/{name}?reset")
        await has_loaded(tab)
        await tab.locator(".jp-FileEditor .cm-content").click()
        await tab.keyboard.press("Control+End")
        await tab.keyboard.type("never saved by hand")
    ending.full = "large.txt"
    ending.portal_reply = {"over": True, "state": "ended", "sentence": "You stopped this session."}
    ending.process.terminate()
    for tab, words in (
        (page, "All documents are saved."),
        (second_tab, "Not saved: large.txt. Copy what you need"),
    ):
        dialog = tab.get_by_role("dialog").filter(has_text="This session has ended")
        await expect(dialog).to_contain_text("You stopped this session.")
        await expect(dialog).to_contain_text(words)
    assert (ending.home / "unsaved.txt").read_text() == "first line\nnever saved by hand"
    assert (ending.home / "large.txt").read_text() == "first line\n"


#: The pixels between each row of a dialog's buttons and the next one.
ROW_GAPS = """dialog => {
  const buttons = [...dialog.querySelectorAll(".jp-Dialog-footer button")];
  const boxes = buttons.map(one => one.getBoundingClientRect());
  const tops = [...new Set(boxes.map(box => box.top))].sort((one, other) => one - other);
  const bottom = top => Math.max(...boxes.filter(box => box.top === top).map(box => box.bottom));
  return tops.slice(1).map((top, place) => top - bottom(tops[place]));
}"""


async def test_time_more_of_it_and_the_end_are_in_one_place(ending: Front, page: Page) -> None:
    ends = (datetime.now(UTC) + timedelta(minutes=90)).isoformat()
    ending.status = {"ends": ends, "stops_idle": None, "extend": True, "warned": [], "warned_idle": []}
    await page.goto(f"{ending.url}{BASE}lab?reset")
    await page.locator("#carme-session-time button").click()
    dialog = page.get_by_role("dialog").filter(has_text="More time for this session")
    await expect(dialog).to_contain_text(re.compile(r"It ends at .* in 1 h \d+ min"))
    await expect(dialog.get_by_label("More time for this session, in minutes")).to_be_focused()
    await page.set_viewport_size({"width": 320, "height": 700})
    gaps = await dialog.evaluate(ROW_GAPS)
    assert gaps and min(gaps) >= 6, "on a small phone the buttons take several rows, which do not touch"
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.set_viewport_size({"width": 1280, "height": 860})
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)

    # The portal cannot be reached, or wants the password: a message says so, and nothing ends.
    stop = page.get_by_role("dialog").filter(has_text="Stop this session?")
    ready = {"over": False, "state": "ready", "sentence": "Ready.", "token": "a token", "fresh": "s2"}
    for answer, signed_out in ((None, False), (ready, True), (ready, False)):
        ending.portal_reply, ending.signed_out = answer, signed_out
        await page.locator("#carme-session-time button").click()
        await dialog.get_by_role("button", name="Stop This Session").click()
        await stop.get_by_role("button", name="Stop", exact=True).click()
        if answer is None:
            await expect(page.get_by_text("The portal does not answer").first).to_be_visible()
        elif signed_out:
            await expect(page.get_by_text("The portal could not stop").first).to_be_visible()
    ended = page.get_by_role("dialog").filter(has_text="This session has ended")
    await expect(ended).to_contain_text("You stopped this session.")
    assert ending.sent == {"csrfmiddlewaretoken": "a token"}
