"""The magics of notebooks and a session that is started again, in JupyterLab behind the portal."""

import os
import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from demo_site import DemoSite, wait_until

from .conftest import log_in, start

#: The width and height of a phone, in pixels.
PHONE = (390, 844)


@pytest.fixture
def source(demo: DemoSite) -> Iterator[str]:
    """A folder of 20 files with 300,000 bytes in all, which all nodes see."""
    folder = f"/scratch/browser-{os.urandom(4).hex()}"
    fill = f"mkdir {folder} && head -c 300000 /dev/urandom | split -b 15000 - {folder}/part"
    demo.run("head", "sh", "-c", fill)
    yield folder
    demo.run("head", "rm", "-rf", folder)


def open_lab(page: Page) -> str:
    """Open JupyterLab from the page of a session that is ready; the session's name."""
    expect(page.locator(".status .state")).to_have_text("Ready")
    page.get_by_role("link", name="Open JupyterLab").click()
    expect(page.locator(".jp-Launcher")).to_be_visible()
    return page.url.partition("/jupyter/user/")[2].split("/")[1]


def run(page: Page, number: int, text: str) -> Locator:
    """Run a cell, counted from 0; its output."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    cell.locator(".cm-content").click()
    page.keyboard.type(text)
    page.keyboard.press("Shift+Enter")
    return cell.locator(".jp-Cell-outputArea")


def test_magics_stage_data_and_draw_the_report(
    page: Page, demo: DemoSite, source: str, keep: Callable[[str], None]
) -> None:
    log_in(page, demo)
    start(page, "Magics", gpus_per_node=1, nodes=1, minutes=20)
    session = open_lab(page)
    page.locator('.jp-LauncherCard[data-category="Notebook"]').first.click()
    expect(page.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute("data-status", "idle")

    staged = run(page, 0, f"%carme_stage --verify read {source}")
    expect(staged.get_by_role("progressbar", name="Node 1")).to_have_attribute("value", "1.000")
    expect(staged).to_contain_text("20 files")
    # The value of the cell is where the data lies on each node.
    expect(staged).to_contain_text(f"/tmp/{source.rpartition('/')[2]}")
    keep("jupyterlab-stage")

    job = demo.job_of(session)["id"]
    report = run(page, 1, "%carme_report").locator(".carme-report")
    expect(report.get_by_role("region", name=f"Report of job {job}")).to_be_visible()
    expect(report).to_contain_text(re.compile("GPU", re.I))
    keep("jupyterlab-report")

    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    expect(page.locator("#carme-session-time button")).to_be_in_viewport()
    expect(page.locator(".jp-Notebook")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    keep("jupyterlab-phone")


def test_a_session_is_started_again_from_the_dialog_at_its_end(
    page: Page, demo: DemoSite, keep: Callable[[str], None]
) -> None:
    log_in(page, demo)
    start(page, "Once more", gpus_per_node=0, nodes=1, minutes=20)
    ended = open_lab(page)
    with demo.visitor(demo.user) as elsewhere:
        elsewhere.stop(ended)
    dialog = page.get_by_role("dialog").filter(has_text="This session has ended")
    expect(dialog).to_contain_text("You stopped this session.")
    keep("jupyterlab-ended")
    dialog.get_by_role("button", name="Start Again").click()
    # Its page gives way to JupyterLab by itself, in the new session.
    page.wait_for_url(lambda url: "/jupyter/user/" in url and ended not in url)
    expect(page.locator(".jp-Launcher, .jp-NotebookPanel").first).to_be_visible()
    name = page.url.partition("/jupyter/user/")[2].split("/")[1]
    known = {session: demo.carme_json("session", "show", session) for session in (ended, name)}
    assert known[name]["state"] == "ready" and known[ended]["state"] == "ended"
    page.goto(f"/sessions/{name}/")
    expect(page.get_by_role("heading", name="Once more")).to_be_visible()
    job = demo.job_of(name)
    assert (job["nodes"], job["gpus"]) == (1, 0)
    wait_until("only the new one runs", lambda: len(demo.carme_json("session", "list")) == 1)
