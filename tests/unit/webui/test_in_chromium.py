"""The portal's own pages in Chromium, served by uvicorn; what needs the cluster is in tests/browser."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from allauth.mfa.totp.internal import auth
from django.core.asgi import get_asgi_application
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import BrowserContext, Page, ViewportSize, expect, sync_playwright

from carme_webui.accounts.models import User

from .conftest import PASSWORD

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
    pages = get_asgi_application()  # now that the static files are there
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
