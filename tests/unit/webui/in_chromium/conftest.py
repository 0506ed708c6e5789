"""The portal alone, served by uvicorn to a real Chromium; what needs the cluster is in tests/browser."""

import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import uvicorn
from django.conf import settings as django_settings
from django.test import Client
from django.utils import timezone
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import BrowserContext, Page, ViewportSize, expect, sync_playwright
from real_chromium import OPTIONS, program

from carme.jobs import SessionOptions
from carme_webui.accounts import zone
from carme_webui.accounts.models import User
from carme_webui.announcements.models import Maintenance, News
from carme_webui.api.models import Token
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker as site_broker
from carme_webui.images.models import ImageState, OwnImage
from carme_webui.jobs.models import Job
from carme_webui.profile.notices import notify
from carme_webui.projects import services
from carme_webui.projects.models import Invitation, Membership, Project
from carme_webui.sessions.models import Preset, Session
from patience import HANG

from ..conftest import PASSWORD
from ..fake_broker import NOW, FakeBroker, make_job

DESKTOP: ViewportSize = {"width": 1280, "height": 860}
PHONE: ViewportSize = {"width": 375, "height": 740}


@pytest.fixture(scope="package")
def chromium() -> Iterator[Chromium]:
    if program() is None:
        pytest.skip("Chromium is not installed.")
    # Playwright's own event loop in this thread makes Django think that it runs in one.
    with pytest.MonkeyPatch.context() as patched, sync_playwright() as playwright:
        patched.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        expect.set_options(timeout=HANG * 1000)
        browser = playwright.chromium.launch(executable_path=program(), args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def address(transactional_db: None, settings) -> Iterator[str]:
    """Where the portal is served; on localhost a browser takes plain HTTP for secure."""
    with patch.dict(os.environ):  # it names the portal's settings to all processes that come of this one
        from carme_webui.asgi import Pages

    settings.ALLOWED_HOSTS = [*settings.ALLOWED_HOSTS, "localhost"]
    settings.SECURE_HSTS_SECONDS = 0
    pages = Pages()  # now that the static files are there
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # a browser that connects before the server accepts waits
        server = uvicorn.Server(uvicorn.Config(pages, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield f"http://localhost:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(HANG)


@pytest.fixture
def context(chromium: Chromium, address: str) -> Iterator[BrowserContext]:
    context = chromium.new_context(base_url=address, viewport=DESKTOP)
    context.set_default_timeout(HANG * 1000)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture
def complaints(page: Page) -> Iterator[list[str]]:
    """What the browser refused or could not do: nothing, also at the end."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    yield found
    assert not found


@pytest.fixture
def root(transactional_db: None) -> User:
    """An administrator."""
    return User.objects.create_user("root1", password=PASSWORD, is_staff=True)


@pytest.fixture
def sample_data(alice: User, bob: User, root: User, broker: FakeBroker, settings) -> None:
    """Something on every page of Alice's, who manages a project; all that has a number has 7."""
    site = django_settings.SITE
    policy = site.bookings.model_copy(
        update={"enabled": True, "share_percent": 100, "approval_gpu_hours": 100}
    )
    settings.SITE = site.model_copy(update={"bookings": policy})
    now = timezone.now().replace(second=0, microsecond=0)
    project = services.create(root, "vision", "Computer vision", alice, site_broker())
    Membership.objects.create(project=project, user=bob)
    Invitation.objects.create(project=project, user=root, by=alice)
    speech = Project.objects.create(name="speech", title="Speech")
    Invitation.objects.create(pk=7, project=speech, user=alice, by=root)
    Job.store([broker.put(make_job(7, kind="batch", started=NOW)), broker.put(make_job(8, state="FAILED"))])
    broker.logs[7] = b"epoch 1\n"
    options = SessionOptions(image="torch", minutes=60, title="Mine")
    Session.request(alice, options, "s12345678")
    ended, _ = Session.request(alice, options, "s87654321")
    Session.objects.filter(pk=ended.pk).update(
        state="ended", ending="out_of_memory", sentence="The job ran out of memory.", settled=True
    )
    Preset.objects.create(pk=7, owner=alice, name="Two GPUs", options=options.model_dump())
    Token.make(alice, "laptop", ["jobs"], now + timedelta(days=30))
    notify(alice, lambda: "Your booking begins in an hour.", link="/bookings/")
    News.objects.create(pk=7, title="New nodes", text="There are two more.", by=root)
    Maintenance.objects.create(
        pk=7, title="New cooling", start=now + timedelta(hours=5), end=now + timedelta(hours=9),
        node_names=["n1", "n2"], by=root, text="Save what you need.",
    )  # fmt: skip
    OwnImage.objects.create(
        owner=alice, name="mine", kind="requirements", base="torch", text="numpy", file="/home/a/mine.sif",
        state=ImageState.READY, digest=f"sha256:{'ab' * 32}", size=1_000_000, packages={"numpy": "2.1"},
        entry_points={"lab": "JupyterLab"}, project=project,
    )  # fmt: skip
    for name, state, begins in (
        ("carme-0123456789ab", "approved", 1),
        ("carme-ba9876543210", "requested", 30),
    ):
        Booking.objects.create(
            name=name, owner=alice, title="Deadline", partition="gpu", gpu_type="a100", gpus_per_node=4,
            node_names=["n1"], start=now + timedelta(hours=begins), end=now + timedelta(hours=begins + 2),
            state=state, project=project if state == "requested" else None,
        )  # fmt: skip
    broker.home.mkdir()
    (broker.home / "data.txt").write_text("x")
    (broker.home / "figures").mkdir()


def log_in(page: Page, user: str = "alice") -> None:
    """By the form; ends on the profile, or where a second factor is requested."""
    page.goto("/profile/")
    page.get_by_label("User name").fill(user)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in", exact=True).click()


def sign_in(page: Page, user: str = "alice") -> None:
    """What is there after the form (`log_in`), without its two pages: for tests of something else."""
    client = Client()
    client.force_login(User.objects.get(username=user))
    name = django_settings.SESSION_COOKIE_NAME
    here = page.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone")
    values = {name: client.cookies[name].value, zone.COOKIE: here}
    page.context.add_cookies(
        [
            {"name": key, "value": value, "domain": "localhost", "path": "/", "secure": True}
            for key, value in values.items()
        ]
    )


def log_out(page: Page) -> None:
    """By the button that is on every page."""
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def fits(page: Page) -> bool:
    """Whether nothing sticks out on a phone."""
    page.set_viewport_size(PHONE)
    width = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size(DESKTOP)
    return width <= PHONE["width"]


def keep(page: Page, name: str, *, whole: bool = True) -> None:
    """Take a picture of a page, or of its part in view, where CARME_SCREENSHOTS names a folder.

    Drawing and packing one takes about half a second of a processor.
    """
    if folder := os.environ.get("CARME_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"portal-{name}.png", full_page=whole)
