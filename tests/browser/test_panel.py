"""The session's time in JupyterLab: what is left, warnings, more of it, and documents saved at the end."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from playwright.sync_api import Locator, Page, expect

from demo_site import DemoSite, wait_until

from .conftest import log_in, start


def toast(page: Page, words: str) -> Locator:
    """A message of JupyterLab."""
    return page.locator(".jp-Notification-Toast, .Toastify__toast").filter(has_text=re.compile(words)).first


def ask_for(page: Page, minutes: int) -> None:
    """Answer the question for how many minutes."""
    dialog = page.get_by_role("dialog").filter(has_text="More time for this session")
    dialog.locator("input").fill(str(minutes))
    dialog.get_by_role("button", name="Extend").click()


def test_jupyterlab_reports_the_time_left_extends_it_and_saves_documents_at_the_end(
    page: Page, demo: DemoSite, keep: Callable[[str], None]
) -> None:
    file = f"/home/{demo.user}/unsaved.txt"
    demo.run("head", "tee", file, user=demo.user, data="first line\n")
    log_in(page, demo)
    start(page, "An hour", gpus_per_node=0, minutes=60)
    expect(page.locator(".status .state")).to_have_text("Ready")
    lab = page.get_by_role("link", name="Open JupyterLab").get_attribute("href") or ""
    name = lab.split("/")[4]
    # By this browser's clock most of the hour has passed: what warns is the share of the time that is left.
    page.clock.set_system_time(datetime.now(UTC) + timedelta(minutes=56))
    page.goto(f"/jupyter/user/{demo.user}/{name}/lab/tree/unsaved.txt")

    # Less than five minutes: shown at once, and always in sight. How many depends on how busy the machine is.
    left = page.locator("#carme-session-time button")
    expect(left).to_have_text(re.compile(r"^[1234] min left$"))
    warning = toast(page, r"This session ends in [1234] min, at .* All documents are saved\.")
    expect(page.locator(".jp-FileEditor .cm-content")).to_contain_text("first line")
    more = warning.get_by_role("button", name="Extend")
    more.hover()  # when it has stopped moving
    keep("jupyterlab-near-the-end")

    # More time from the warning itself; then less than fifteen minutes are left, which is shown as well.
    more.click()
    ask_for(page, 8)
    expect(toast(page, "This session now ends at")).to_be_visible()
    expect(left).to_have_text(re.compile(r"^([89]|1[012]) min left$"))
    expect(toast(page, r"This session ends in ([89]|1[012]) min")).to_be_visible()

    # What is not allowed is refused, with the reason.
    left.click()
    ask_for(page, 5000)
    expect(toast(page, r"because a session in partition gpu lasts at most")).to_be_visible()
    keep("jupyterlab-not-extended")

    # A document that nobody saved, when the session is to end.
    page.locator(".jp-FileEditor .cm-content").click()
    page.keyboard.press("Control+End")
    page.keyboard.type("never saved by hand")
    expect(page.locator(".jp-Document .jp-mod-dirty, .lm-TabBar-tab.jp-mod-dirty").first).to_be_attached()
    assert "never saved" not in demo.run("head", "cat", file).stdout
    with demo.visitor(demo.user) as elsewhere:
        elsewhere.stop(name)
    expect(toast(page, "This session is ending")).to_be_visible()
    shown = ("session", "show", name)
    wait_until("the session is over", lambda: demo.carme_json(*shown)["state"] == "ended")
    assert demo.run("head", "cat", file).stdout == "first line\nnever saved by hand"
