"""A session that nears its end, which takes minutes; with a user of its own, as other tests run beside it."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from demo_site import DemoSite

from .conftest import log_in, start

USER = "admin"


@pytest.fixture(autouse=True)
def own_beginning_and_end(demo: DemoSite) -> Iterator[None]:
    """The others' jobs stay."""
    yield
    demo.run("head", "scancel", f"--user={USER}")


def test_a_session_near_its_end_warns_and_can_be_extended(
    page: Page, demo: DemoSite, keep_looks: Callable[[str], None]
) -> None:
    log_in(page, demo, USER)
    start(page, "Nearly over", gpus_per_node=0, minutes=3)
    expect(page.locator(".status .state")).to_have_text("Ready")
    # In the last quarter of its time, so short as it is.
    warning = page.locator("#limit-end.near, #limit-end.urgent")
    expect(warning).to_contain_text("left, until", timeout=240_000)
    expect(page).to_have_title(re.compile(r"^(\d minutes|less than a minute) left · Nearly over"))
    keep_looks("expiring")
    page.get_by_label("More time").select_option("60")
    page.get_by_role("button", name="Extend").click()
    expect(page.get_by_role("status")).to_contain_text("The session now ends at")
    expect(warning).to_have_count(0)
    expect(page.locator("#limit-end")).to_contain_text("1 hour")
    # More than a session may last in all is refused, with the reason. At once, as the page takes the
    # server's choices again when there is news.
    page.locator("#extend").evaluate(
        """form => {
            const first = form.elements.minutes.options[0];
            first.value = "1440";
            first.selected = true;
            form.requestSubmit();
        }"""
    )
    expect(page.locator(".notice.bad")).to_be_visible()
