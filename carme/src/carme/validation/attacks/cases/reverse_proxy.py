"""Attacks: the reverse proxy."""

from urllib.parse import urljoin

from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Area, add
from carme.validation.attacks.cases.notebook_server import (
    api,
    as_browser,
    moves_any,
    via_proxy,
    victim_reads,
)
from carme.validation.attacks.fixture import Fixture, Player
from carme.validation.notebook import ChannelClosed

AREA = Area("The reverse proxy")

CONFUSING = (
    "/jupyter/user/ATTACKER/%2e%2e/VICTIM/REST",
    "/jupyter/user/ATTACKER/..%2fVICTIM/REST",
    "/jupyter/user/ATTACKER%2f..%2fVICTIM/REST",
    "/jupyter/user/ATTACKER/../VICTIM/REST",
    "/jupyter/user/ATTACKER\\..\\VICTIM/REST",
    "/jupyter/user/ATTACKER%5c..%5cVICTIM/REST",
    "/jupyter/user/./VICTIM/REST",
    "/jupyter/user//VICTIM/REST",
    "/jupyter//user/VICTIM/REST",
    "//jupyter/user/VICTIM/REST",
    "/jupyter/%75ser/VICTIM/REST",
    "/jupyter/%2575ser/VICTIM/REST",
    "/jupyter/hub/../user/VICTIM/REST",
    "/jupyter/hub/..%2fuser/VICTIM/REST",
    "/jupyter/hub\\..\\user\\VICTIM/REST",
    "/static/../jupyter/user/VICTIM/REST",
    "/static/..%2fjupyter/user/VICTIM/REST",
    "/jupyter/user/VICTIM%00/REST",
    "/jupyter/user/ATTACKER/#/../VICTIM/REST",
    "/jupyter/user/ATTACKER/?/../VICTIM/REST",
    "/jupyter/user/ATTACKER;/../VICTIM/REST",
)


def try_confusing_paths(fixture: Fixture, owner: Player, server: Player, rest: str, text: str) -> Outcome:
    """Try each spelling of an address of `server` that could pass for one of `owner`."""
    reached, statuses = [], set()
    for spelling in CONFUSING:
        path = spelling.replace("ATTACKER", owner.name).replace("VICTIM", server.name).replace("REST", rest)
        headers = as_browser(owner, f"/jupyter/user/{owner.name}/") | as_browser(owner, owner.base)
        is_reached, message = via_proxy(fixture, path, headers=headers, text=text)
        statuses.add(message)
        if is_reached:
            reached.append(spelling)
    return bool(reached), "reached by " + ", ".join(reached) if reached else ", ".join(sorted(statuses))


def path_after_user(player: Player, tail: str) -> str:
    """What follows the user's name in the address of a server."""
    return player.base.split(f"/{player.name}/", 1)[1] + tail


add(
    AREA,
    "spellings of the victim's address",
    "reaches the victim's server by addresses that nginx, the proxy and the portal could read differently",
    lambda s: try_confusing_paths(
        s, s.attacker, s.victim, path_after_user(s.victim, "api/contents"), '"path"'
    ),
    victim_reads,
)
add(
    AREA,
    "question to the portal",
    "asks from outside what only nginx may ask",
    lambda s: moves_any(
        *(
            via_proxy(s, path, headers=as_browser(s.attacker, "/") | {"X-Original-URI": s.attacker.base})
            for path in ("/internal/enter", "//internal/enter", "/%69nternal/enter", "/x/..%2finternal/enter")
        )
    ),
    victim_reads,
)
add(
    AREA,
    "signed out",
    "uses a copy of the victim's cookies after the victim has signed out",
    lambda s: signed_out(s, leave=True),
    lambda s: signed_out(s, leave=False),
)


def signed_out(fixture: Fixture, leave: bool) -> Outcome:
    """Use a browser's cookies, after its owner has signed out there or not."""
    with fixture.another_browser(fixture.victim) as visitor:
        owner = Player(fixture.victim.account, "", visitor)
        headers = as_browser(owner, api(fixture))
        via_proxy(fixture, api(fixture), headers=headers)  # so that nginx may remember the yes
        if leave:
            fixture.sign_out(visitor)
        return via_proxy(fixture, api(fixture), headers=headers, text='"path"')


add(
    AREA,
    "signed out, kernel open",
    "goes on computing over a connection to a kernel that was opened before the victim signed out",
    lambda s: run_after_sign_out(s, leave=True),
    lambda s: run_after_sign_out(s, leave=False),
)


def run_after_sign_out(fixture: Fixture, leave: bool) -> Outcome:
    """Run a cell over an open connection, after its owner has signed out there or not."""
    server = urljoin(fixture.settings.site.url, fixture.victim.base)
    with fixture.another_browser(fixture.victim) as visitor, visitor.kernel(server) as kernel:
        kernel.run("40 + 1", timeout=60)
        if leave:
            fixture.sign_out(visitor)
        try:
            message = kernel.run("40 + 2", timeout=60).output
        except ChannelClosed as closed:
            message = str(closed)
    return "42" in message, message
