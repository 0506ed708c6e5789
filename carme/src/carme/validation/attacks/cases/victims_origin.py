"""Attacks: the victim's origin."""

from typing import Any

from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Area, add
from carme.validation.attacks.cases.notebook_server import as_browser, via_proxy
from carme.validation.attacks.cases.reverse_proxy import path_after_user, try_confusing_paths
from carme.validation.attacks.fixture import EVIL, EVIL_TEXT, Fixture, Player

AREA = Area("The victim's origin")


def evil(player: Player) -> str:
    """The address of the page that the attacker's server gives to everybody."""
    return f"{player.base.rstrip('/')}{EVIL}"


def attacker_gets_page(fixture: Fixture) -> Outcome:
    """The attacker's own browser gets the page, so the page is really there."""
    path = evil(fixture.attacker)
    return via_proxy(fixture, path, headers=as_browser(fixture.attacker, path), text=EVIL_TEXT)


add(
    AREA,
    "page of the attacker's",
    "leads the victim's browser to a page that the attacker's server delivers without asking who comes",
    lambda s: via_proxy(
        s,
        evil(s.attacker),
        headers=as_browser(s.victim, evil(s.attacker)) | {"Sec-Fetch-Mode": "navigate"},
        text=EVIL_TEXT,
    ),
    attacker_gets_page,
)
add(
    AREA,
    "page by another spelling",
    "leads it there by addresses that look like the victim's own",
    lambda s: try_confusing_paths(
        s, s.victim, s.attacker, path_after_user(s.attacker, EVIL.lstrip("/")), EVIL_TEXT
    ),
    attacker_gets_page,
)
add(
    AREA,
    "page to nobody",
    "leads a browser there in which nobody is signed in",
    lambda s: via_proxy(s, evil(s.attacker), headers={"Sec-Fetch-Mode": "navigate"}, text=EVIL_TEXT),
    attacker_gets_page,
)
add(
    AREA,
    "portal's cookie",
    "lets a notebook server read the cookie with which its visitor is signed in to the portal",
    lambda s: via_proxy(
        s, evil(s.attacker), headers=as_browser(s.attacker, evil(s.attacker)), text="__Host-carme-session="
    ),
    lambda s: via_proxy(
        s,
        evil(s.attacker),
        headers={"Cookie": as_browser(s.attacker, evil(s.attacker))["Cookie"] + "; carme-probe=1"},
        text="carme-probe=1",
    ),
)


add(
    AREA,
    "cookies and scripts",
    "reads a cookie with which the victim is signed in by a script, without TLS, or from another site",
    lambda s: loose_cookies(s),
    lambda s: (
        any(name.startswith("__Host-") for name in sign_in_cookies(s)),
        f"the victim has {', '.join(sign_in_cookies(s))}",
    ),
)


def sign_in_cookies(fixture: Fixture) -> dict[str, Any]:
    """The victim's cookies that a thief would want; `_xsrf` is made for scripts."""
    wanted = ("session", "login", "jupyterhub-user")
    jar = fixture.victim.visitor.http.cookies.jar
    return {cookie.name: cookie for cookie in jar if any(word in cookie.name for word in wanted)}


def loose_cookies(fixture: Fixture) -> Outcome:
    """Those that scripts can read, that go over the wire without TLS, or that other sites may have sent."""
    loose = []
    for name, cookie in sign_in_cookies(fixture).items():
        if not cookie.has_nonstandard_attr("HttpOnly") or not cookie.secure:
            loose.append(name)
        if cookie.get_nonstandard_attr("SameSite") not in ("Lax", "Strict"):
            loose.append(name)
    return bool(loose), f"not closed: {', '.join(loose)}" if loose else "HttpOnly, Secure, SameSite"
