"""The main job with a mouse and a keyboard: every page that a researcher meets on the way."""

import re
from collections.abc import Callable

from playwright.sync_api import Page, expect

from demo_site import DemoSite

from .conftest import log_in, open_start_form


def rename_job(page: Page, demo: DemoSite) -> None:
    """Let the owner and an administrator change what Slurm says of the session whose page is open.

    The page shows the session's new end when the broker has seen the job as it is then.
    """
    job = demo.job_of(re.findall(r"/sessions/([^/]+)/", page.url)[0])["id"]
    demo.run("head", "scontrol", "update", f"jobid={job}", "jobname=x", user=demo.user)
    changes = ("comment=site accounting: ok", "timelimit=50")
    demo.run("head", "scontrol", "update", f"jobid={job}", *changes)
    expect(page.locator("#limit-end")).to_contain_text(re.compile("4[5-9] minutes left"))
    expect(page.locator(".status .state")).to_have_text("Ready")


def test_a_user_trains_over_two_nodes_by_clicking(
    page: Page, demo: DemoSite, keep: Callable[[str], None]
) -> None:
    page.goto("/")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    keep("1-sign-in")
    log_in(page, demo)
    keep("2-dashboard")

    open_start_form(page)
    page.get_by_label("Title").fill("Digits on four GPUs")
    page.locator("input[name=image][value=torch]").check()
    page.get_by_label("GPUs per node").fill("2")
    page.get_by_label("Nodes", exact=True).fill("2")
    page.get_by_label("Hours").fill("0")
    page.get_by_label("Minutes").fill("20")
    keep("3-start-form")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_role("heading", name="Digits on four GPUs")).to_be_visible()
    keep("4-starting")
    # The page follows by itself: nothing is reloaded here.
    expect(page.locator(".status .state")).to_have_text("Ready")
    keep("5-ready")

    rename_job(page, demo)
    page.goto("/")
    card = page.locator(".card").filter(has_text="Digits on four GPUs")
    expect(card.locator(".state")).to_have_text("Ready")
    card.get_by_role("link", name=re.compile("^Open")).click()
    expect(page.locator(".jp-Launcher")).to_be_visible()
    keep("6-jupyterlab")
    page.locator('.jp-LauncherCard[data-category="Notebook"]').first.click()
    cell = page.locator(".jp-Notebook .jp-CodeCell .cm-content").first
    cell.click()
    page.keyboard.type("!carme-run -n 4 /opt/carme/examples/digits.py --epochs 2")
    expect(page.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute("data-status", "idle")
    page.keyboard.press("Shift+Enter")
    output = page.locator(".jp-OutputArea-output").first
    expect(output).to_contain_text(re.compile(r"\[rank 0\].*accuracy", re.S))
    keep("7-training")

    page.goto("/")
    page.get_by_role("link", name=re.compile("^Stop")).first.click()
    expect(page.get_by_role("heading", name=re.compile("^Stop"))).to_be_visible()
    keep("8-stop")
    page.get_by_role("button", name="Stop the session").click()
    expect(page.locator(".status .state")).to_have_text("Stopped")
    keep("9-ended")
    page.get_by_role("link", name="Jobs").click()
    expect(page.get_by_role("main")).to_contain_text("session-")
    keep("10-jobs")


def test_the_keyboard_alone_is_enough_to_start_and_stop(page: Page, demo: DemoSite) -> None:
    page.goto("/")
    # A page has loaded before its first field gets the focus.
    expect(page.get_by_label("User name")).to_be_focused()
    page.keyboard.type(demo.user)
    page.keyboard.press("Tab")
    page.keyboard.type(demo.passwords[demo.user])
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Start a session")).to_be_visible()
    page.locator("input[name=image]:checked").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.get_by_text("More options").focus()
    page.keyboard.press("Enter")
    page.get_by_label("Title").focus()
    page.keyboard.type("By keyboard")
    page.get_by_role("button", name="Start", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="By keyboard")).to_be_visible()
    expect(page.locator(".status .state")).to_have_text("Ready")
    page.get_by_role("link", name="Stop").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop the session")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".status .state")).to_have_text("Stopped")


def test_pages_load_nothing_from_other_sites(page: Page, demo: DemoSite) -> None:
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    log_in(page, demo)
    page.goto("/jobs/")
    assert seen
    elsewhere = [url for url in seen if not url.startswith((demo.url + "/", "data:"))]
    assert not elsewhere
