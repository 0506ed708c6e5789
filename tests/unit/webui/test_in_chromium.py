"""The portal's own pages in Chromium, served by uvicorn; what needs the cluster is in tests/browser."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import uvicorn
from allauth.mfa.totp.internal import auth
from axe_playwright_python.sync_playwright import Axe
from django.conf import settings as django_settings
from django.utils import timezone
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import BrowserContext, Page, ViewportSize, expect, sync_playwright

from carme.jobs import SessionOptions
from carme_webui.accounts.models import User
from carme_webui.api.models import Token
from carme_webui.asgi import Pages
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker as site_broker
from carme_webui.images.models import ImageState, OwnImage
from carme_webui.jobs.models import Job
from carme_webui.projects import desk
from carme_webui.projects.models import Invitation, Project
from carme_webui.sessions.models import Session

from .conftest import PASSWORD
from .fake_broker import NOW, FakeBroker, make_job

OPTIONS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
OPTIONS += ["--disable-component-update", "--disable-sync"]
DESKTOP: ViewportSize = {"width": 1280, "height": 860}
PHONE: ViewportSize = {"width": 375, "height": 740}

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    # Playwright's own event loop in this thread makes Django think that it runs in one.
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def address(transactional_db: None, settings) -> Iterator[str]:
    """Where the portal is served; on localhost a browser takes plain HTTP for secure."""
    settings.ALLOWED_HOSTS = [*settings.ALLOWED_HOSTS, "localhost"]
    settings.SECURE_HSTS_SECONDS = 0
    pages = Pages()  # now that the static files are there
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(pages, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield f"http://localhost:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.fixture
def context(chromium: Chromium, address: str) -> Iterator[BrowserContext]:
    context = chromium.new_context(base_url=address, viewport=DESKTOP)
    context.set_default_timeout(30_000)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


def log_in(page: Page, user: str = "alice") -> None:
    page.goto("/profile/")
    page.get_by_label("User name").fill(user)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in", exact=True).click()


def log_out(page: Page) -> None:
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def fresh_code(secret: str) -> str:
    """The app's code, with some seconds left to enter it."""
    if (left := 30 - time.time() % 30) < 10:
        time.sleep(left)
    return auth.format_hotp_value(auth.hotp_value(secret, int(time.time()) // 30))


def fits(page: Page) -> bool:
    """Whether nothing sticks out on a phone."""
    page.set_viewport_size(PHONE)
    width = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size(DESKTOP)
    return width <= PHONE["width"]


def test_an_app_is_set_up_and_asked_for_with_the_keyboard_alone(page: Page, alice: User) -> None:
    log_in(page)
    page.get_by_role("link", name="Passkeys, app and recovery codes").press("Enter")
    page.get_by_role("link", name="Set up an app").press("Enter")
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    secret = page.get_by_label("Key").input_value()
    expect(page.get_by_alt_text("QR code")).to_be_visible()
    assert page.evaluate("document.querySelector('.qr img').naturalWidth") > 0, "the policy lets it be shown"
    assert fits(page)
    page.get_by_label("Code", exact=True).fill(fresh_code(secret))
    page.keyboard.press("Enter")
    codes = page.locator(".codes").inner_text().split()
    assert len(codes) == 10
    assert fits(page)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").press("Enter")
    assert download.value.path().read_text().split() == codes

    log_out(page)
    log_in(page)
    expect(page.get_by_role("heading", name="Second factor")).to_be_visible()
    assert fits(page)
    page.keyboard.type(fresh_code(secret))  # the field has the focus
    page.keyboard.press("Enter")
    expect(page.get_by_text("Protected by a second factor")).to_be_visible()


def test_a_passkey_is_added_and_signs_in_alone(context: BrowserContext, page: Page, alice: User) -> None:
    """The authenticator is Chromium's own virtual one; all else is real."""
    console = context.new_cdp_session(page)
    console.send("WebAuthn.enable")
    options = {"protocol": "ctap2", "transport": "internal", "hasResidentKey": True}
    options |= {"hasUserVerification": True, "isUserVerified": True, "automaticPresenceSimulation": True}
    device = console.send("WebAuthn.addVirtualAuthenticator", {"options": options})["authenticatorId"]

    log_in(page)
    page.goto("/profile/security/webauthn/add/")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Confirm").click()
    page.get_by_label("Name").fill("My laptop")
    assert fits(page)
    page.get_by_role("button", name="Add a passkey").click()
    expect(page.get_by_role("heading", name="Recovery codes")).to_be_visible()
    page.get_by_role("link", name="Done").click()
    expect(page.get_by_text("My laptop").first).to_be_visible()
    expect(page.get_by_text("passkey, signs in without a password")).to_be_visible()
    assert fits(page)

    log_out(page)
    page.goto("/accounts/login/?next=/profile/")
    page.get_by_role("button", name="Sign in with a passkey").click()
    expect(page.get_by_text("Protected by a second factor")).to_be_visible()
    assert page.url.endswith("/profile/"), "to where the user wanted to go"

    # After the password it is the second factor.
    log_out(page)
    log_in(page)
    page.get_by_role("button", name="Use a passkey or security key").click()
    expect(page.get_by_text("Protected by a second factor")).to_be_visible()

    # Whoever cannot show it gets a sentence, and stays outside.
    log_out(page)
    console.send("WebAuthn.setUserVerified", {"authenticatorId": device, "isUserVerified": False})
    page.get_by_role("button", name="Sign in with a passkey").click()
    expect(page.get_by_role("alert").filter(has_text="was not accepted")).to_be_visible()
    page.goto("/profile/")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


# --- what everybody can use -------------------------------------------------------------------------------

#: The success criteria of WCAG 2.2, levels A and AA, as far as a program can judge them.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
PAGES = [
    *["/", "/sessions/s12345678/", "/sessions/s12345678/stop/", "/jobs/", "/jobs/7/", "/jobs/7/cancel/"],
    *["/jobs/submit/", "/images/", "/images/build/", "/images/at/mine@alice/", "/datasets/", "/bookings/"],
    *["/images/at/mine@alice/delete/", "/bookings/?view=day", "/bookings/new/", "/nothing/", "/files/"],
    *["/bookings/carme-0123456789ab/", "/bookings/carme-0123456789ab/delete/", "/projects/", "/profile/"],
    *["/projects/at/vision/", "/profile/security/", "/tokens/", "/admin/", "/admin/users/", "/admin/jobs/"],
    *["/admin/users/new/", "/admin/users/at/bob/", "/admin/nodes/", "/admin/record/", "/projects/new/"],
    *["/admin/jobs/7/stop/", "/projects/at/vision/limits/"],
]


@pytest.fixture
def a_life(alice: User, bob: User, broker: FakeBroker, settings) -> None:
    """Something on every page of Alice's, who is an administrator too."""
    site = django_settings.SITE
    policy = site.bookings.model_copy(update={"enabled": True, "share_percent": 100})
    settings.SITE = site.model_copy(update={"bookings": policy})
    alice.is_staff = True
    alice.save()
    project = desk.create(alice, "vision", "Computer vision", alice, site_broker())
    other = Project.objects.create(name="speech", title="Speech")
    Invitation.objects.create(project=other, user=alice, by=bob)
    Job.store([broker.put(make_job(7, kind="batch", started=NOW)), broker.put(make_job(8, state="FAILED"))])
    broker.logs[7] = b"epoch 1\n"
    Session.request(alice, SessionOptions(image="torch", minutes=60, title="Mine"), "s12345678")
    Token.make(alice, "laptop", ["jobs"], timezone.now() + timedelta(days=30))
    OwnImage.objects.create(
        owner=alice, name="mine", kind="requirements", base="torch", text="numpy", file="/home/a/mine.sif",
        state=ImageState.READY, digest=f"sha256:{'ab' * 32}", size=1_000_000, packages={"numpy": "2.1"},
        entry_points={"lab": "JupyterLab"}, project=project,
    )  # fmt: skip
    Booking.objects.create(
        name="carme-0123456789ab", owner=alice, title="Deadline", partition="gpu", gpu_type="a100",
        gpus_per_node=4, node_names=["n1"], start=timezone.now() + timedelta(hours=1),
        end=timezone.now() + timedelta(hours=3), state="approved",
    )  # fmt: skip
    broker.home.mkdir()
    (broker.home / "data.txt").write_text("x")


def violations(page: Page, rules: dict[str, object]) -> list[str]:
    """What axe finds: the rule, and the first place."""
    found = Axe().run(page, options=rules).response["violations"]
    return [f"{one['id']} ({one['help']}): {one['nodes'][0]['html'][:200]}" for one in found]


def keep(page: Page, path: str) -> None:
    """A screenshot, where CARME_SCREENSHOTS names a folder for them."""
    if folder := os.environ.get("CARME_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = "".join(letter if letter.isalnum() else "-" for letter in path.strip("/")) or "dashboard"
        page.screenshot(path=Path(folder) / f"portal-{name}.png", full_page=True)


@pytest.mark.timeout(600)
def test_no_page_keeps_anybody_out(page: Page, a_life: None) -> None:
    """Every page by WCAG 2.2 AA, its colours also in the dark, and nothing that sticks out on a phone."""
    every: dict[str, object] = {"runOnly": {"type": "tag", "values": RULES}}
    colours: dict[str, object] = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
    found: dict[str, list[str]] = {}

    def look(path: str) -> None:
        page.goto(path, wait_until="domcontentloaded")
        wrong = violations(page, every)
        page.emulate_media(color_scheme="dark")
        wrong += [f"in the dark: {one}" for one in violations(page, colours)]
        page.emulate_media(color_scheme="light")
        keep(page, path)
        if not fits(page):
            wrong.append("something sticks out on a phone")
        if wrong:
            found[path] = wrong

    page.set_content("<html><body><img src='x'><p style='color: #eee'>Pale</p></body></html>")
    assert len(violations(page, every)) >= 3, "what is wrong is found"
    look("/accounts/login/")
    log_in(page)
    for path in PAGES:
        look(path)
    assert not found, "\n".join(f"{path}: {one}" for path, wrong in found.items() for one in wrong)


# --- journeys ---------------------------------------------------------------------------------------------


def test_a_token_is_made_used_and_revoked(page: Page, address: str, alice: User) -> None:
    log_in(page)
    page.goto("/tokens/")
    page.get_by_label("What it is for").fill("My laptop")
    page.get_by_role("button", name="Make it").click()
    secret = page.locator("p.secret").inner_text()

    def status() -> int:
        answer = page.context.request.get(
            f"{address}/api/v1/profile", headers={"Authorization": f"Bearer {secret}"}
        )
        return answer.status

    assert status() == 200
    page.goto("/tokens/")
    expect(page.get_by_text(secret)).to_have_count(0)
    page.get_by_role("button", name="Revoke My laptop").click()
    expect(page.get_by_text("You have no tokens")).to_be_visible()
    assert status() == 401


def test_a_file_is_sent_and_fetched(page: Page, a_life: None, broker: FakeBroker, tmp_path: Path) -> None:
    log_in(page)
    page.goto("/files/")
    sent = tmp_path / "photo <b>.bin"
    sent.write_bytes(os.urandom(3_000_000))
    page.get_by_label("Files from this computer").set_input_files(sent)
    expect(page.get_by_role("link", name=sent.name)).to_be_visible()  # the page has loaded itself anew
    assert (broker.home / sent.name).read_bytes() == sent.read_bytes()
    with page.expect_download() as download:
        page.get_by_role("link", name=sent.name).click()
    assert download.value.path().read_bytes() == sent.read_bytes()
    page.get_by_label("New folder").fill("results")
    page.get_by_role("button", name="Make", exact=True).click()
    expect(page.get_by_role("link", name="results/")).to_be_visible()
    page.get_by_role("row", name=sent.name).get_by_text("More").click()
    page.get_by_role("row", name=sent.name).get_by_role("link", name="Delete").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("link", name=sent.name)).to_have_count(0)
    assert not (broker.home / sent.name).exists()


def test_an_administrator_makes_a_project_and_its_manager_invites(
    context: BrowserContext, page: Page, a_life: None, bob: User
) -> None:
    log_in(page)
    page.goto("/projects/")
    page.get_by_role("link", name="New project").click()
    page.get_by_label("Name", exact=True).fill("genomes")
    page.get_by_label("Title").fill("Genomes")
    page.get_by_label("Manager").fill("alice")
    page.get_by_role("button", name="Make it").click()
    page.goto("/projects/at/genomes/")
    page.get_by_label("Invite a user").fill("bob")
    page.get_by_role("button", name="Invite", exact=True).click()
    expect(page.get_by_text("bob is invited")).to_be_visible()
    log_out(page)
    log_in(page, "bob")
    page.goto("/projects/")
    page.get_by_role("button", name="Join Genomes").click()
    expect(page.get_by_role("heading", name="Genomes")).to_be_visible()
    expect(page.get_by_label("Invite a user")).to_have_count(0)
