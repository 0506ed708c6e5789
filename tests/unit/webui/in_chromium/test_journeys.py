"""What people do on the portal's own pages, in Chromium; what needs the cluster is in tests/browser."""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from allauth.mfa.totp.internal import auth
from django.conf import settings
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import BrowserContext, Page, Route, expect

from carme.jobs import JobState
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job
from carme_webui.sessions.models import Session

from ..conftest import PASSWORD
from ..fake_broker import NOW, FakeBroker, make_job
from .conftest import PHONE, fits, keep, log_in, log_out, sign_in

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """An app that shows codes; the clock of the codes stands still, so that none runs out on its way."""
    now = time.time()
    monkeypatch.setattr(auth, "time", SimpleNamespace(time=lambda: now))
    return lambda secret: auth.format_hotp_value(auth.hotp_value(secret, int(now) // 30))


def test_an_app_is_set_up_and_requested_with_the_keyboard_alone(
    page: Page, alice: User, app: Callable[[str], str]
) -> None:
    log_in(page)
    page.get_by_role("link", name="Passkeys, app and recovery codes").press("Enter")
    page.get_by_role("link", name="Set up an app").press("Enter")
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    secret = page.get_by_label("Key").input_value()
    expect(page.get_by_alt_text("QR code")).to_be_visible()
    assert page.evaluate("document.querySelector('.qr img').naturalWidth") > 0, "the policy lets it be shown"
    assert fits(page)
    page.get_by_label("Code", exact=True).fill(app(secret))
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
    expect(page.locator("#id_code")).to_be_focused()
    page.keyboard.type(app(secret))
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

    # Anyone who cannot show it gets a sentence, and stays outside.
    log_out(page)
    console.send("WebAuthn.setUserVerified", {"authenticatorId": device, "isUserVerified": False})
    page.get_by_role("button", name="Sign in with a passkey").click()
    expect(page.get_by_role("alert").filter(has_text="was not accepted")).to_be_visible()
    page.goto("/profile/")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_token_is_made_used_and_revoked(page: Page, address: str, alice: User) -> None:
    log_in(page)
    page.goto("/tokens/")
    page.get_by_label("Purpose").fill("My laptop")
    page.get_by_role("button", name="Create").click()
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
    assert status() == 200, "it asks first"
    page.get_by_role("alertdialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_text("You have no tokens")).to_be_visible()
    assert status() == 401


def test_a_file_is_sent_and_fetched(
    page: Page, sample_data: None, broker: FakeBroker, tmp_path: Path
) -> None:
    sign_in(page)
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
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("link", name="results/")).to_be_visible()
    page.get_by_role("row", name=sent.name).get_by_text("More").click()
    page.get_by_role("row", name=sent.name).get_by_role("link", name="Delete").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("link", name=sent.name)).to_have_count(0)
    assert not (broker.home / sent.name).exists()


def test_an_upload_goes_on_in_another_tab_where_it_was_interrupted(
    context: BrowserContext, page: Page, sample_data: None, broker: FakeBroker, tmp_path: Path
) -> None:
    sign_in(page)
    file = tmp_path / "weights.bin"
    file.write_bytes(os.urandom(20_000_000))
    sent: list[int] = []

    def note(route: Route) -> None:
        if route.request.method == "PUT":
            sent.append(int(parse_qs(urlsplit(route.request.url).query)["offset"][0]))
        if page.is_closed() or len(sent) < 2:
            route.continue_()  # the first tab's second part is never answered

    page.route("**/files/upload/**", note)
    page.goto("/files/")
    with page.expect_request(lambda request: request.method == "PUT" and "offset=8388608" in request.url):
        page.get_by_label("Files from this computer").set_input_files(file)
    keep(page, "journey-upload-under-way")
    assert not (broker.home / file.name).exists()
    page.close()

    again = context.new_page()
    again.route("**/files/upload/**", note)
    again.goto("/files/")
    again.get_by_label("Files from this computer").set_input_files(file)
    expect(again.get_by_role("link", name=file.name)).to_be_visible()
    # Chromium may still have let the second part go when its tab closed, even before `note` was called.
    assert sent[-1] == 16777216 and sent == sorted(sent), sent
    assert sent.count(0) == 1, "the first part is not sent twice"
    assert (broker.home / file.name).read_bytes() == file.read_bytes()
    keep(again, "journey-upload-done")


def test_an_upload_whose_login_has_expired_says_so(page: Page, sample_data: None, tmp_path: Path) -> None:
    sign_in(page)
    page.goto("/files/")
    file = tmp_path / "weights.bin"
    file.write_bytes(b"1")
    page.wait_for_load_state("networkidle")  # no other part of the page finds out first
    page.context.clear_cookies(name=settings.SESSION_COOKIE_NAME)
    page.get_by_label("Files from this computer").set_input_files(file)
    expect(page.locator("#uploads")).to_contain_text("Not sent: Your login has expired.")


def test_a_batch_job_is_submitted_and_its_log_followed(
    page: Page, sample_data: None, broker: FakeBroker
) -> None:
    sign_in(page)
    page.goto("/jobs/submit/")
    page.get_by_label("Script", exact=True).fill("#!/bin/sh\npython train.py\n")
    page.get_by_label("Image").select_option("torch")
    page.get_by_label("GPUs per node").fill("1")
    keep(page, "journey-job-form")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.locator("#log")).to_be_attached()
    number = int(page.url.rstrip("/").rpartition("/")[2])
    broker.logs[number] = b"epoch 1\n"
    broker.put(broker.queue[number].model_copy(update={"state": JobState.RUNNING, "started": NOW}))
    expect(page.locator("#log")).to_contain_text("epoch 1")
    broker.logs[number] += b"epoch 2 <b>\n"
    expect(page.locator("#log")).to_contain_text("epoch 2 <b>")  # nothing is reloaded
    keep(page, "journey-job-log")
    page.get_by_role("link", name="Cancel").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("The job is stopping.")).to_be_visible()
    Job.store([broker.archive[number]])  # as the worker does; there is none here
    expect(page.locator(".status .state").first).to_have_text("Cancelled")  # by itself
    expect(page.get_by_text("The job is stopping.")).to_have_count(0)
    expect(page.get_by_role("link", name="Cancel")).to_have_count(0)


#: How far the end of a log is from the part of it that is shown, in pixels; 0 where it is within.
END_OF_LOG = """log => {
  const text = log.lastChild, range = document.createRange(), box = log.getBoundingClientRect();
  range.setStart(text, text.length - 4);
  range.setEnd(text, text.length - 1);
  const end = range.getBoundingClientRect();
  return Math.round(Math.max(0, box.top - end.top, end.bottom - box.bottom));
}"""


def test_a_log_begins_at_its_end_and_follows_unless_its_reader_looks_back(
    page: Page, sample_data: None, broker: FakeBroker
) -> None:
    lines = b"".join(b"line %d %s\n" % (number, b"x" * 300) for number in range(40))
    broker.logs[7] = broker.logs[8] = lines
    sign_in(page)
    page.goto("/jobs/7/")
    log = page.locator("#log")
    expect(log).to_contain_text("line 39 ")
    assert log.evaluate(END_OF_LOG) == 0
    broker.logs[7] += b"more 1\nmore 2\n"
    expect(log).to_contain_text("more 2")
    assert log.evaluate(END_OF_LOG) == 0
    log.evaluate("log => { log.scrollTop = 0 }")
    broker.logs[7] += b"more 3\nmore 4\n"
    expect(log).to_contain_text("more 4")
    assert log.evaluate(END_OF_LOG) > 0 and log.evaluate("log => log.scrollTop") == 0
    # What a session that failed wrote last.
    Session.objects.filter(name="s87654321").update(job_id=8)
    page.goto("/sessions/s87654321/")
    last = page.locator(".log")
    expect(last).to_contain_text("line 39 ")
    assert last.evaluate(END_OF_LOG) == 0
    assert last.evaluate("log => log.scrollHeight > log.clientHeight && log.scrollWidth > log.clientWidth")
    last.focus()
    page.keyboard.press("Home")
    page.wait_for_function("log => log.scrollTop < -100", arg=last.element_handle())
    keep(page, "session-failed-log")


def test_a_phone_has_a_small_header_with_a_menu_for_the_keyboard(page: Page, sample_data: None) -> None:
    sign_in(page)
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/jobs/")
    header = page.locator("header.top").bounding_box()
    assert header and header["height"] <= 64
    jobs = page.get_by_role("navigation", name="Main").get_by_role("link", name="Jobs")
    expect(jobs).to_be_hidden()
    page.get_by_role("button", name="Menu").focus()
    page.keyboard.press("Enter")
    expect(jobs).to_be_visible()
    keep(page, "phone-menu", whole=False)
    page.keyboard.press("Escape")
    expect(jobs).to_be_hidden()
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Help").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Jobs")).to_be_in_viewport()
    assert page.url.endswith("/help/#jobs")
    keep(page, "phone-help")


def test_a_page_on_paper_has_dark_letters_and_no_buttons(page: Page, sample_data: None) -> None:
    sign_in(page)
    page.emulate_media(media="print", color_scheme="dark")
    page.goto("/jobs/7/")
    expect(page.locator(".status .state").first).to_be_visible()
    for gone in ("nav", "button", "a.button", ".term"):
        assert [row.is_visible() for row in page.locator(gone).all()].count(True) == 0, gone
    colours = (
        "one => [getComputedStyle(one).color, getComputedStyle(document.documentElement).backgroundColor]"
    )
    assert page.locator("h1").evaluate(colours) == ["rgb(24, 36, 42)", "rgb(255, 255, 255)"]
    keep(page, "job-on-paper")


def test_the_menu_needs_no_javascript(chromium: Chromium, address: str, sample_data: None) -> None:
    context = chromium.new_context(base_url=address, viewport=PHONE, java_script_enabled=False)
    plain = context.new_page()
    sign_in(plain)
    plain.goto("/")
    plain.get_by_role("button", name="Menu").click()
    plain.get_by_role("link", name="Jobs", exact=True).click()
    expect(plain.get_by_role("heading", name="Jobs").first).to_be_visible()
    context.close()


def test_what_is_drawn_in_the_calendar_is_booked(page: Page, sample_data: None, broker: FakeBroker) -> None:
    free = {"available": True, "state": "IDLE"}
    nodes = [node.model_copy(update=free) for node in broker.cluster.nodes]
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes})
    sign_in(page)
    page.goto(f"/bookings/?view=day&day={datetime.now(UTC) + timedelta(days=4):%Y-%m-%d}")
    cells = page.locator("#calendar tbody tr").filter(has_text="n2").first.locator("a.free")
    cells.nth(20).scroll_into_view_if_needed()
    cells.nth(20).hover()
    page.mouse.down()
    cells.nth(21).hover()
    page.mouse.up()
    expect(page.get_by_label("On node")).to_have_value("n2")
    keep(page, "booking-form")
    page.get_by_role("button", name="Book", exact=True).click()
    expect(page.locator(".status .state")).to_have_text("Booked")
    expect(page.locator("dd").filter(has_text="n2")).to_be_visible()


def test_an_array_shows_its_failed_task(page: Page, sample_data: None, broker: FakeBroker) -> None:
    states = ["COMPLETED", "FAILED", "COMPLETED", "RUNNING"]
    for task, state in enumerate(states):
        reported = {"ended": None if state == "RUNNING" else NOW, "exit_code": int(state == "FAILED")}
        number = 20 if task == 3 else 21 + task
        job = make_job(number, state=state, array_id=20, task=task, kind="batch", started=NOW, **reported)
        Job.store([broker.put(job)])
    sign_in(page)
    page.goto("/jobs/20/")
    keep(page, "array-running")
    Job.store([broker.put(broker.queue[20].model_copy(update={"state": JobState.COMPLETED, "ended": NOW}))])
    expect(page.get_by_text("1 of 4 tasks failed.")).to_be_visible()
    keep(page, "array-failed")
    assert fits(page)
    page.get_by_role("link", name="20_1").click()
    expect(page.get_by_role("heading", name="Log")).to_be_visible()


def test_an_image_of_ones_own_is_built(page: Page, sample_data: None, broker: FakeBroker) -> None:
    sign_in(page)
    page.goto("/images/")
    page.get_by_role("link", name="Build an image").click()
    page.get_by_label("Name", exact=True).fill("vision")
    page.get_by_label("Packages or definition").fill("timm\n")
    page.get_by_role("button", name="Build", exact=True).click()
    expect(page.locator(".status .state")).to_have_text("Being built")
    job = broker.queue[max(broker.queue)]
    broker.logs[job.id] = b"Collecting timm\n"
    expect(page.locator("#log")).to_contain_text("Collecting timm")
    keep(page, "journey-image-being-built")
    left = {"digest": f"sha256:{'cd' * 32}", "size": 9, "packages": {"timm": "1.0"}}
    broker.results[job.id] = json.dumps(left).encode()
    broker.put(job.model_copy(update={"state": JobState.COMPLETED, "ended": NOW, "exit_code": 0}))
    expect(page.locator(".status .state")).to_have_text("Ready")  # by itself
    expect(page.get_by_text("timm 1.0")).to_be_attached()
    keep(page, "journey-image-ready")
    page.get_by_role("link", name="Start a session").click()
    expect(page.locator("input[name=image]:checked")).to_have_value("vision@alice")


def test_an_administrator_runs_the_site(page: Page, sample_data: None, broker: FakeBroker) -> None:
    log_in(page, "root1")
    page.get_by_role("link", name="Administration").click()
    page.get_by_role("link", name="Nodes").click()
    page.get_by_label("Reason to drain n1").fill("a fan is broken")
    page.get_by_role("button", name="Drain n1").click()
    expect(page.get_by_text("Sent to Slurm.")).to_be_visible()
    nodes = [node.model_copy(update={"available": node.name != "n1"}) for node in broker.cluster.nodes]
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes})
    page.get_by_role("button", name="Resume n1").click()  # which comes by itself
    expect(page.get_by_text("Sent to Slurm.")).to_be_visible()
    assert [(request.name, request.drain) for request in broker.requests_of("node")] == [
        ("n1", True),
        ("n1", False),
    ]
    keep(page, "journey-nodes")
    _read_lists_and_approve(page)
    _announce(page)
    _stop_a_job_and_write_to_its_owner(page)

    page.goto("/admin/record/")
    page.get_by_label("What", exact=True).fill("drained the node n1")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("cell", name="drained the node n1: a fan is broken").first).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(1)
    keep(page, "journey-record")


def _read_lists_and_approve(page: Page) -> None:
    for name, link in (("jobs", "All jobs"), ("record", "Audit log")):
        page.get_by_role("link", name=link).first.click()
        keep(page, f"journey-admin-{name}")
    page.get_by_role("link", name="Approvals").click()
    page.get_by_label("Message to the owner (optional)").fill("Good luck")
    keep(page, "journey-approval")
    page.get_by_role("button", name="Approve Deadline").click()
    expect(page.get_by_text("No bookings need approval.")).to_be_visible()


def _announce(page: Page) -> None:
    """News, and a maintenance window."""
    page.get_by_role("link", name="Announcements", exact=True).click()
    page.get_by_role("link", name="New announcement").click()
    page.get_by_label("Title").fill("More GPUs")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("link", name="New announcement")).to_be_visible()
    page.goto("/maintenance/new/")
    tomorrow = datetime.now(UTC) + timedelta(days=2)
    page.get_by_label("Title").fill("Cables")
    page.get_by_label("Nodes").fill("n2")
    for moment, hour in (("Start", "08:00"), ("End", "10:00")):
        page.get_by_label(f"{moment} date").fill(f"{tomorrow:%Y-%m-%d}")
        page.get_by_label(f"{moment} time").fill(hour)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="Cables")).to_be_visible()
    keep(page, "journey-maintenance")


def _stop_a_job_and_write_to_its_owner(page: Page) -> None:
    """The owner then reads both, as the administrator who views the page sees."""
    page.get_by_role("link", name="Administration").click()
    page.get_by_role("link", name="All jobs").click()
    page.get_by_role("link", name="Stop 7").click()
    page.get_by_label("Message to its owner").fill("It filled the disk.")
    page.get_by_role("button", name="Stop the job").click()
    expect(page.get_by_text("Job 7 is stopped")).to_be_visible()
    page.get_by_role("link", name="Users").click()
    page.get_by_role("link", name="alice").click()
    page.get_by_label("Message to this user").fill("Please clean up.")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("Message sent to alice.")).to_be_visible()
    page.get_by_role("button", name="View as this user").click()
    expect(page.get_by_text("You are viewing as alice (read-only).")).to_be_visible()
    page.goto("/profile/")
    expect(page.get_by_text("It filled the disk.")).to_be_visible()
    expect(page.get_by_text("Message from an administrator: Please clean up.")).to_be_visible()
    keep(page, "journey-looking")
    page.goto("/")
    expect(
        page.get_by_role("heading", name="More GPUs").or_(page.get_by_text("More GPUs")).first
    ).to_be_visible()
    page.get_by_role("button", name="Exit").click()
    expect(page.get_by_role("button", name="Exit")).to_have_count(0)


def test_an_administrator_makes_a_project_and_its_manager_invites(
    context: BrowserContext, page: Page, sample_data: None, bob: User
) -> None:
    log_in(page, "root1")
    page.goto("/projects/")
    page.get_by_role("link", name="New project").click()
    page.get_by_label("Name", exact=True).fill("genomes")
    page.get_by_label("Title").fill("Genomes")
    page.get_by_label("Manager").fill("alice")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", name="Genomes")).to_be_visible()
    page.goto("/projects/at/genomes/")
    page.get_by_label("Invite a user").fill("bob")
    page.get_by_role("button", name="Invite", exact=True).click()
    expect(page.get_by_text("bob is invited")).to_be_visible()
    keep(page, "journey-project-invited")
    log_out(page)
    log_in(page, "bob")
    page.goto("/projects/")
    page.get_by_role("button", name="Join Genomes").click()
    expect(page.get_by_role("heading", name="Genomes")).to_be_visible()
    expect(page.get_by_label("Invite a user")).to_have_count(0)
    sign_in(page)
    page.goto("/projects/at/genomes/")
    page.get_by_role("button", name="Make a manager bob").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Make a manager").click()
    expect(page.get_by_role("button", name="Make a member bob")).to_be_visible()
    keep(page, "journey-project-managers")
    sign_in(page, "bob")
    page.goto("/projects/at/genomes/")
    expect(page.get_by_label("Invite a user")).to_be_visible()
