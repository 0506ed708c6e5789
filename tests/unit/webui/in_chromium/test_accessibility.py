"""Every page of the portal by WCAG 2.2 AA: as user, manager and administrator, light, dark, on a phone,
in English and, on a phone, in German.

The pages are those of the URL configuration, so that a new one cannot be forgotten.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from axe_rules import AXE, EVERY, FIND, readable
from django.urls import URLResolver, get_resolver
from playwright.sync_api import BrowserContext, Page, expect

from carme_webui.accounts.models import User
from patience import HANG

from ..conftest import PASSWORD
from ..fake_broker import FakeBroker
from .conftest import DESKTOP, PHONE, keep, log_in

pytestmark = pytest.mark.django_db(transaction=True)

#: Parts of a page that it loads at once, as long as they are not there.
LOADING = 'main [hx-trigger="load"]'
COLOURS = EVERY | {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
#: What the size of the window decides, where it shows the same elements.
SIZES = EVERY | {
    "runOnly": {"type": "rule", "values": ["color-contrast", "target-size", "scrollable-region-focusable"]}
}
#: What more or longer text decides, where the elements are the same.
CROWDED = EVERY | {"runOnly": {"type": "rule", "values": ["target-size", "scrollable-region-focusable"]}}
#: What another language can change: no colour.
WORDS = EVERY | {"rules": {"color-contrast": {"enabled": False}}}

#: Pixels by which a page may become longer while it is judged.
ROOM = 1000

#: Makes axe of what `AXE_AT_HAND` has put there; whether the page has it.
TAKE_AXE = "'axe' in window || (window.loadAxe?.(), 'axe' in window)"
#: Gives each page that a tab loads what makes axe. Sent with each page, its half a megabyte takes longer than
#: many a rule.
AXE_AT_HAND = f"window.loadAxe = () => {{ {AXE} }}"
#: Two pages with the same outline are the same for most rules of axe: it has elements, and attributes with
#: what they do, but of texts, names and addresses only whether they are there, and of equal rows one.
OUTLINE = """
const NAMED = /^(href|src|action|value|title|alt|placeholder|datetime|name|hx-.*|data-.*)$/;
window.outline = (element, left_out = "") => {
  const attributes = [...element.attributes].filter(({ name }) => name !== left_out);
  let text = `<${element.localName}`;
  for (const { name, value } of attributes)
    text += ` ${name}=${NAMED.test(name) ? Boolean(value.trim()) : value}`;
  let last = "";
  for (const node of element.childNodes) {
    let part = "";
    if (node.nodeType === Node.ELEMENT_NODE) part = outline(node, left_out);
    else if (node.nodeType === Node.TEXT_NODE && node.data.trim()) part = "text";
    if (part && part !== last) text += `>${part}`;
    last = part || last;
  }
  return `${text}/>`;
};
outline(document.querySelector("main"))
"""
#: Notes which elements a wide screen shows.
NOTE_SHOWN = """
window.isShown = element => element.checkVisibility({ visibilityProperty: true });
window.shownBefore = new Map([...document.body.querySelectorAll("*")].map(one => [one, isShown(one)]));
"""
#: The outlines of the elements that only one of both screens shows, without what is within them.
ONLY_ON_ONE = """() => {
  const differs = one => shownBefore.get(one) !== isShown(one);
  const found = new Set([...document.body.querySelectorAll("*")].filter(differs));
  const outermost = [...found].filter(one => !found.has(one.parentElement));
  return outermost.map(one => outline(one, "aria-current") + isShown(one));
}"""

#: What is for programs.
PROGRAMS = ("api/", "metrics/", ".well-known/", "identity/o/api/")
#: What stands for the variable parts of addresses in `sample_data`.
EXAMPLES = {
    "<session_name:name>": "s12345678",
    "<job_id:job_id>": "7",
    "<int:number>": "7",
    "<int:pk>": "7",
    "<str:reference>": "mine@alice",
    "<booking_name:name>": "carme-0123456789ab",
    "<slug:name>": "vision",
    "<str:name>": "bob",
    "<str:image>": "torch",
    "<str:user>": "bob",
    "<str:username>": "alice",
    "<slug:secret>": "x",
    "<slug:guide>": "sessions",
}
#: Addresses at which no user sees a page when all is well, and why.
NOT_SEEN = {
    "identity/o/authorize": "JupyterHub's users agree to nothing: it leads on",
    "identity/o/device": "the site's provider has no such way",
    "identity/o/logout": "leads on",
    "accounts/outside/": "leads to the outside provider",
    "accounts/outside/back/": "leads on",
    "profile/security/webauthn/reauthenticate/": "for scripts",
    "profile/security/webauthn/login/": "for scripts",
    "bookings/feed/<str:username>/<slug:secret>.ics": "a calendar for programs",
    "sessions/<session_name:name>/state/": "for scripts",
    "jobs/<job_id:job_id>/new/": "leads on as soon as the job is known",
    "files/download/": "leads to no page",
    "files/upload/": "for scripts",
}
#: Further states of pages.
FURTHER = [
    *["nothing/", "bookings/?view=day", "files/delete/?path={home}/data.txt", "files/?path={home}/figures"],
    *[
        "sessions/s87654321/",
        "jobs/8/",
        "jobs/?q=nothing",
        "bookings/carme-ba9876543210/",
        "admin/record/?q=x",
    ],
    *["projects/at/speech/", "images/build/?from=mine@alice"],
]
#: Forms that are sent empty, and come back with what is wrong.
EMPTY = ["jobs/submit/", "images/build/", "bookings/new/", "projects/new/", "admin/users/new/"]
EMPTY += ["announcements/new/", "maintenance/new/", "tokens/"]


def routes(patterns: Any = None, before: str = "") -> Iterator[str]:
    """All routes of the portal but those for programs."""
    for pattern in get_resolver("carme_webui.urls").url_patterns if patterns is None else patterns:
        route = before + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from routes(pattern.url_patterns, route)
        elif not route.startswith(PROGRAMS):
            yield route


def concrete(route: str) -> str:
    for variable, example in EXAMPLES.items():
        route = route.replace(variable, example)
    assert "<" not in route, f"{route} needs an example"
    return route


def violations(page: Page, rules: dict[str, object]) -> list[str]:
    """What axe finds: the rule, and the first place."""
    if not page.evaluate(TAKE_AXE):
        page.evaluate(AXE)
    size = page.viewport_size
    if size and page.locator(".start-bar").is_visible():
        # What lies below the bar at the lower edge can be scrolled clear of it, but would count as small, as
        # it would if an answer that is still on its way made the page longer.
        height = page.evaluate("document.documentElement.scrollHeight") + ROOM
        page.set_viewport_size({**size, "height": height})
        page.wait_for_function("() => document.documentElement.scrollHeight <= innerHeight")
    found = page.evaluate(FIND, [rules, []])
    if size:
        page.set_viewport_size(size)
    return readable(found)


class Eyes:
    """Look at pages, at what is the same only once; `found`: what was wrong, by whom and where.

    Args:
        phone_alone: Judge them as a phone shows them, by what words decide, and not on a wide screen as well.
    """

    def __init__(self, page: Page, *, phone_alone: bool = False) -> None:
        page.add_init_script(AXE_AT_HAND)
        self.page = page
        self.phone_alone = phone_alone
        self.found: dict[str, list[str]] = {}
        self.seen: set[str] = set()
        self._known: set[str] = set()
        self._outlines: set[str] = set()
        self._only_on_one: set[str] = set()

    def inspect(self, who: str, path: str, html: str = "") -> None:
        """Load a page and judge it, with the parts that it loads itself.

        Args:
            who: Who is signed in.
            path: The address.
            html: What is there, where that is known.
        """
        main = re.sub(r'(name="csrfmiddlewaretoken" value|data-version)="[^"]*"', "", main_of(html))
        if main in self._known and not self._is_first(who):
            self.seen.add(f"{who} {path}")
            return
        if main and 'hx-trigger="load' not in main:
            self._known.add(main)
        self.page.goto(f"/{path}", wait_until="domcontentloaded")
        expect(self.page.locator(LOADING)).to_have_count(0)
        self.judge(who, path)

    def judge(self, who: str, path: str) -> None:
        """Judge the page that is there."""
        outline = self.page.evaluate(OUTLINE)
        known = outline in self._outlines and not self._is_first(who)  # the bar at the top is each role's own
        self._outlines.add(outline)
        self.seen.add(f"{who} {path}")
        if known:
            self.page.set_viewport_size(PHONE)
            wrong = [f"on a phone: {violation}" for violation in violations(self.page, CROWDED)]
        elif self.phone_alone:
            self.page.set_viewport_size(PHONE)
            wrong = violations(self.page, WORDS)
        else:
            wrong = self._on_both_screens()
        if self.page.evaluate("document.documentElement.scrollWidth") > PHONE["width"]:
            wrong.append("something sticks out on a phone")
        if wrong:
            self.found[f"{who} {path}"] = wrong
        if "CARME_SCREENSHOTS" in os.environ:
            name = f"{who}-{re.sub('[^a-zA-Z0-9]+', '-', path).strip('-') or 'dashboard'}"
            keep(self.page, f"{name}-phone")
            self.page.set_viewport_size(DESKTOP)
            keep(self.page, name)
        self.page.set_viewport_size(DESKTOP)

    def report(self) -> str:
        """What was wrong, a line each."""
        return "\n".join(f"{where}: {fault}" for where, wrong in self.found.items() for fault in wrong)

    def _is_first(self, who: str) -> bool:
        return not any(name.startswith(f"{who} ") for name in self.seen)

    def _on_both_screens(self) -> list[str]:
        """All rules on a wide, light screen, and on a dark phone those that size and colours decide.

        What only one of the two shows is judged in the other colours as well, where it is new. It leaves the
        page on a phone.
        """
        page = self.page
        wrong = violations(page, EVERY)
        page.evaluate(NOTE_SHOWN)
        page.set_viewport_size(PHONE)
        new = set(page.evaluate(ONLY_ON_ONE)) - self._only_on_one
        self._only_on_one |= new
        if new:
            wrong += [f"on a phone: {violation}" for violation in violations(page, EVERY)]
        page.emulate_media(color_scheme="dark")
        wrong += [f"on a phone in the dark: {violation}" for violation in violations(page, SIZES)]
        if new:
            page.set_viewport_size(DESKTOP)
            wrong += [f"in the dark: {violation}" for violation in violations(page, COLOURS)]
            page.set_viewport_size(PHONE)
        page.emulate_media(color_scheme="light")
        return wrong


def main_of(html: str) -> str:
    """The part of a page that is its own; empty where there is none."""
    return html.partition("<main")[2].rpartition("</main>")[0]


def page_at(http: httpx.Client, context: BrowserContext, path: str) -> str | None:
    """The whole page at an address, empty if something else is there; None: nothing for this user."""
    cookies = "; ".join(f"{cookie.get('name')}={cookie.get('value')}" for cookie in context.cookies())
    with http.stream("GET", f"/{path}", headers={"Cookie": cookies}) as answer:
        assert answer.status_code < 500, path
        if answer.status_code in (302, 403, 404):
            return None
        if answer.status_code != 200 or not answer.headers["content-type"].startswith("text/html"):
            return ""  # it takes forms alone, or is a stream, or a file
        answer.read()
        return answer.text if "<html" in answer.text else ""


def second_factors(user: User) -> None:
    """All that there can be, the keys without what is in them."""
    TOTP.activate(user, generate_totp_secret())
    RecoveryCodes.activate(user)
    data = {"name": "My key", "passwordless": True, "credential": {}}
    Authenticator.objects.create(pk=7, user=user, type=Authenticator.Type.WEBAUTHN, data=data)


def judge_refused_forms(eyes: "Eyes", who: str) -> None:
    """Send each form of EMPTY without values, and judge how that is refused."""
    page = eyes.page
    for path in EMPTY:
        page.goto(f"/{path}", wait_until="domcontentloaded")
        # The page that answers, not what this one asks for meanwhile, such as a prediction.
        with page.expect_navigation(wait_until="domcontentloaded") as sent:
            page.evaluate(
                """() => {
                  const form = document.querySelector("main form[method=post]:not([action*=impersonation])");
                  for (const one of form.querySelectorAll("input:not([type=hidden]), textarea"))
                    one.value = "";
                  form.noValidate = true;
                  form.requestSubmit();
                }"""
            )
        assert sent.value.status == 422, path
        eyes.judge(who, f"{path} refused")


def judge_viewing(eyes: "Eyes") -> None:
    """Pages of a user as an administrator views them."""
    page = eyes.page
    page.goto("/admin/users/at/bob/")
    page.get_by_role("button", name="View as this user").click()
    expect(page.get_by_role("button", name="Exit")).to_be_visible()
    eyes.judge("looking", "")
    page.goto("/files/")
    eyes.judge("looking", "files refused")


BUTTONS = "<button>A</button><button>B</button>"
SMALL_ON_A_PHONE = """<style>@media (max-width: 30rem) {
  button { display: block; height: 12px; padding: 0; border: 0 }
}</style>"""
#: Two pages, the second with a fault: only in the dark, on a phone, or on one of two that are alike.
FAULTS = {
    "on a phone in the dark: color-contrast": (
        "<p>Text</p>",
        "<style>@media (prefers-color-scheme: dark) { p { background: #111; color: #333 } }</style>"
        "<p>Text</p>",
    ),
    "image-alt": ("<img src=x alt=Picture>", "<img src=x>"),
    # Of two with the same outline, and of a page that is the first of its outline.
    "on a phone: target-size": (f"<style>p {{ margin: 0 }}</style>{BUTTONS}", SMALL_ON_A_PHONE + BUTTONS),
    "on a phone in the dark: target-size": ("<p>Text</p>", SMALL_ON_A_PHONE + BUTTONS),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_the_dark_a_phone_or_one_page_alone_shows_is_found(page: Page, fault: str) -> None:
    eyes = Eyes(page)
    for path, part in zip(("right", "wrong"), FAULTS[fault], strict=True):
        page.set_content(
            f"<!DOCTYPE html><html lang=en><title>A page</title><body><main>{part}</main></body></html>"
        )
        eyes.judge("user", path)
    assert eyes.found.keys() == {"user wrong"}
    assert any(text.startswith(fault) for text in eyes.found["user wrong"]), eyes.report()


@pytest.mark.timeout(10 * HANG)
def test_every_page_is_accessible(
    context: BrowserContext, page: Page, address: str, sample_data: None, broker: FakeBroker, alice: User
) -> None:
    eyes, http = Eyes(page), httpx.Client(base_url=address, verify=False, timeout=HANG)
    page.set_content("<html><body><img src='x'><p style='color: #eee'>Pale</p></body></html>")
    assert len(violations(page, EVERY)) >= 3, "what is wrong is found"
    todo = [route for route in routes() if route not in NOT_SEEN]
    assert NOT_SEEN.keys() <= set(routes()), "the list of what is not a page is not up to date"
    missing = set(todo)

    def walk(who: str, below: str = "") -> None:
        for route in [path for path in todo if path.startswith(below)]:
            there = page_at(http, context, path := concrete(route))
            if there is not None:
                missing.discard(route)
            if there == "":
                todo.remove(route)
            if there:
                eyes.inspect(who, path, there)
        for path in [] if below else FURTHER:
            if there := page_at(http, context, path := path.format(home=broker.home)):
                eyes.inspect(who, path, there)

    eyes.inspect("anonymous", "accounts/login/")
    eyes.inspect("anonymous", "accounts/inactive/")
    missing -= {"accounts/login/", "accounts/inactive/"}
    for who, name in (("user", "bob"), ("manager", "alice"), ("admin", "root1")):
        log_in(page, name)
        expect(page.get_by_role("heading", name="Profile")).to_be_visible()
        page.goto("/accounts/reauthenticate/")  # or else nothing of the second factor is shown
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Confirm").click()
        walk(who)
        eyes.inspect(who, "nothing/")
        if who == "manager":
            second_factors(alice)
            todo.remove("profile/security/webauthn/add/")  # which wants to read the keys that there are
            walk("protected", "profile/")
            Authenticator.objects.exclude(type=Authenticator.Type.TOTP).delete()
        if who == "admin":
            judge_refused_forms(eyes, who)
            judge_viewing(eyes)
        page.context.clear_cookies()

    # What is requested between the password and the portal.
    log_in(page, "alice")
    expect(page.get_by_role("heading", name="Second factor")).to_be_visible()
    eyes.judge("anonymous", "second factor")
    missing.discard("profile/security/authenticate/")
    assert not eyes.found, eyes.report()
    assert not missing, f"no example leads to {sorted(missing)}"


@pytest.mark.timeout(10 * HANG)
def test_every_page_is_accessible_in_german(
    context: BrowserContext, page: Page, address: str, sample_data: None, broker: FakeBroker
) -> None:
    """German words are longer: on a phone that is where pages break."""
    eyes, http = Eyes(page, phone_alone=True), httpx.Client(base_url=address, verify=False, timeout=HANG)
    for who, name in (("manager", "alice"), ("admin", "root1")):
        log_in(page, name)
        expect(page.get_by_role("heading", name="Profile")).to_be_visible()
        User.objects.filter(username=name).update(language="de")
        paths = [concrete(route) for route in routes() if route not in NOT_SEEN]
        for path in [*paths, *(path.format(home=broker.home) for path in FURTHER)]:
            if there := page_at(http, context, path):
                assert '<html lang="de"' in there, path
                eyes.inspect(f"German {who}", path, there)
        page.context.clear_cookies()
    assert not eyes.found, eyes.report()
    assert len(eyes.seen) > len(paths) / 2, "most pages were seen"
