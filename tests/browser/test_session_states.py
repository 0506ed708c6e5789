"""What a session's page shows while it waits, runs, nears its end and fails; nothing here reloads a page."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Page, expect

from demo_site import DemoSite, wait_until
from patience import HANG

from .conftest import log_in, start


def state(page: Page):
    return page.locator(".status .state")


@pytest.mark.alone
def test_a_waiting_session_says_what_to_expect_and_starts_by_itself(
    page: Page, demo: DemoSite, keep_screenshots: Callable[[str], None]
) -> None:
    everything = ("--nodes", "2", "--gpus", str(demo.settings.gpus), "--time", "20m")
    demo.carme("submit", "--name", "all", *everything, "--", "sleep", "1200", user=demo.second_user)
    running = ("squeue", "--noheader", f"--user={demo.second_user}", "--states=RUNNING")
    wait_until("all GPUs are taken", lambda: demo.run("head", *running).stdout.strip())
    log_in(page, demo)
    start(page, "Behind somebody else", gpus_per_node=1, minutes=20)
    expect(state(page)).to_have_text("Waiting in the queue")
    estimate = page.locator("#start-estimate")
    expect(estimate).to_contain_text("next in line")
    expect(estimate).to_contain_text(re.compile("Expected start|No estimated start"))
    expect(page).to_have_title(re.compile("^Waiting in the queue · Behind somebody else"))
    expect(page.get_by_role("link", name=re.compile("^Open"))).to_have_count(0)
    expect(estimate).to_contain_text("Expected start")  # Slurm plans every few seconds
    keep_screenshots("waiting")
    demo.run("head", "scancel", f"--user={demo.second_user}")
    expect(state(page)).to_have_text("Ready")
    expect(estimate).to_have_count(0)


@pytest.mark.alone  # it counts the GPUs that all leave
def test_a_ready_session_opens_everything_in_every_browser_of_its_owner(
    page: Page, chromium: Browser, demo: DemoSite, keep_screenshots: Callable[[str], None]
) -> None:
    log_in(page, demo)
    start(page, "Seen from everywhere", gpus_per_node=1, minutes=60)
    expect(state(page)).to_have_text("Ready")
    expect(page).to_have_title(re.compile("^Ready · Seen from everywhere"))
    rows = page.locator("table.timeline tbody tr")
    for step in (
        "Requested",
        "Submitted to Slurm",
        "Nodes allocated",
        "Container started",
        "Server listening",
    ):
        expect(rows.filter(has_text=step)).to_have_count(1)
    keep_screenshots("ready")

    second_context = chromium.new_context(base_url=demo.url, ignore_https_errors=True)
    second_context.set_default_timeout(HANG * 1000)
    second = second_context.new_page()
    log_in(second, demo)
    start(second, "One more", gpus_per_node=0, minutes=20)
    expect(state(second)).to_have_text("Ready")
    # What Slurm was given by itself has the GPUs that Slurm allotted, however they were requested.
    jobs = {demo.sbatch("--gpus=1"): "1 GPU", demo.sbatch("--gpus-per-task=2", "--ntasks=1"): "2 GPUs"}
    second.goto("/")
    for number, gpus in jobs.items():
        row = second.locator(f"#job-{number}")
        expect(row.locator(".state")).to_have_text("Running")
        expect(row).to_contain_text(re.compile(rf"1 node · {gpus}\b"))
    total = demo.settings.nodes * demo.settings.gpus
    expect(second.locator("section[aria-labelledby=free-heading] .supplies")).to_contain_text(
        f"{total - 4} of {total} free"
    )
    cards = second.locator(".card")
    expect(cards.filter(has_text="Seen from everywhere")).to_have_count(1)
    cards.filter(has_text="Seen from everywhere").get_by_role("link", name=re.compile("^Open")).click()
    expect(second.locator(".jp-Launcher, .jp-NotebookPanel").first).to_be_visible()
    second_context.close()
    expect(rows.filter(has_text="First opened")).to_have_count(1)

    for link in page.get_by_role("link", name=re.compile("^Open")).all():
        address = link.get_attribute("href")
        assert address is not None and address.startswith(f"/jupyter/user/{demo.user}/s")


def test_a_session_near_its_end_warns_and_can_be_extended(
    page: Page, demo: DemoSite, keep_screenshots: Callable[[str], None]
) -> None:
    log_in(page, demo)
    start(page, "Nearly over", gpus_per_node=1, minutes=3)
    expect(state(page)).to_have_text("Ready")
    # In the last quarter of its time, so short as it is.
    warning = page.locator("#limit-end.near, #limit-end.urgent")
    expect(warning).to_contain_text("left, until", timeout=2 * HANG * 1000)
    expect(page).to_have_title(re.compile(r"^(\d minutes|less than a minute) left · Nearly over"))
    keep_screenshots("expiring")
    page.get_by_label("More time").select_option("60")
    page.get_by_role("button", name="Extend").click()
    expect(page.get_by_role("status")).to_contain_text("The session now ends at")
    expect(warning).to_have_count(0)
    expect(page.locator("#limit-end")).to_contain_text("1 hour")
    # More than a session may last in all is refused, with the reason. At once, as the page takes the
    # server's choices again when something has changed.
    page.locator("#extend").evaluate(
        """form => {
            const first = form.elements.minutes.options[0];
            first.value = "1440";
            first.selected = true;
            form.requestSubmit();
        }"""
    )
    expect(page.locator(".notice.bad")).to_be_visible()


def test_a_failed_session_says_why_and_starts_again_with_one_click(
    page: Page, demo: DemoSite, keep_screenshots: Callable[[str], None]
) -> None:
    log_in(page, demo)
    start(page, "Killed", gpus_per_node=1, minutes=20)
    expect(state(page)).to_have_text("Ready")
    for node in ("n1", "n2"):
        demo.run(
            node, "pkill", "--signal", "KILL", "--euid", demo.user, "--full", "carme-singleuser", check=False
        )
    expect(page.locator(".state.ended.failed")).to_be_visible()
    expect(page.locator(".status")).to_contain_text(re.compile(r"exit code 137; .*start it again"))
    expect(page.get_by_role("link", name=re.compile("^Open"))).to_have_count(0)
    keep_screenshots("failed")
    again = page.get_by_role("button", name="Start again as before")
    again.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Killed")).to_be_visible()
    expect(state(page)).to_have_text("Ready")
