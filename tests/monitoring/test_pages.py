"""What a session uses, as its owner sees it in JupyterLab and on the job's page, in Chromium."""

import json
from collections.abc import Callable

from browser.conftest import log_in, start
from playwright.sync_api import Locator, Page, expect

from demo_site import DemoSite, wait_until
from patience import HANG

from .conftest import Gpus

#: Shorter runs get no advice.
PATIENCE = 2 * HANG * 1000
CURVES = ("GPU utilization", "GPU memory", "Processors", "Memory")


def expect_use(part: Locator) -> None:
    """The curves and the advice of a session one of whose GPUs idles."""
    expect(part.get_by_text("1 of the job's 2 GPUs did nothing.")).to_be_visible(timeout=PATIENCE)
    expect(part.locator("pre").first).to_contain_text("--gpus 1")
    for title in CURVES:
        expect(part.get_by_role("heading", name=title, exact=True)).to_be_visible()
    expect(part.locator("carme-chart canvas").first).to_be_visible()
    # Two GPUs: their work, their memory.
    expect(part.locator("carme-chart .legend li", has_text="n1 GPU")).to_have_count(4)


def test_jupyterlab_and_the_job_s_page_show_curves_and_advice(
    page: Page, demo: DemoSite, gpus: Gpus, keep: Callable[[str], None]
) -> None:
    log_in(page, demo)
    start(page, "Two GPUs", gpus_per_node=2, minutes=30)
    expect(page.locator(".status .state")).to_have_text("Ready")
    lab = page.get_by_role("link", name="Open JupyterLab").get_attribute("href") or ""
    name = lab.split("/")[4]
    job = demo.carme_json("session", "show", name)["job_id"]
    record = demo.run("n1", "cat", f"/run/carme/allocations/{job}.json").stdout
    working = min(int(word) for word in json.loads(record)["gpus"].split(","))
    gpus.show(*(f"util={85 if place == working else 0}" for place in range(4)))

    page.goto(f"/jupyter/user/user1/{name}/lab")
    page.locator(".jp-SideBar.jp-mod-right").get_by_role("tab", name="Use").click()
    panel = page.get_by_role("region", name="What this session uses, and advice")
    expect_use(panel)
    keep("use-in-jupyterlab")

    page.goto(f"/jobs/{job}/")
    expect_use(page.locator("#use"))
    page.locator("#use").scroll_into_view_if_needed()
    keep("use-on-the-job-s-page")

    # Without Prometheus both say so and show no figures; then it returns.
    demo.run("head", "systemctl", "stop", "prometheus")
    try:
        page.reload()
        use = page.locator("#use")
        expect(use.get_by_text("not known. The site's metrics cannot be read:")).to_be_visible()
        expect(use.locator("carme-chart")).to_have_count(0)
        text = demo.carme("report", str(job)).stdout
        assert "not known. The site's metrics cannot be read" in text and "Advice: none." in text
    finally:
        demo.run("head", "systemctl", "start", "prometheus")
    wait_until("Prometheus answers", lambda: demo.carme_json("report", str(job))["source"] == "live")
    page.reload()
    expect_use(page.locator("#use"))

    # No other user sees it.
    with demo.visitor("user2") as visitor:
        assert visitor.fetch(f"{visitor.url}jobs/{job}/use/").status_code == 404
