"""Attacks: the notebook server."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from carme.validation.attacks import actions
from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Area, Step, add
from carme.validation.attacks.fixture import Fixture, Player

AREA = Area("The notebook server")


def via_proxy(fixture: Fixture, path: str, **more: Any) -> Outcome:
    """A request at the site's own address, sent exactly as it is written."""
    site = urlsplit(fixture.settings.site.url)
    return actions.http(site.hostname or "", site.port or 443, path, **more)


def as_browser(player: Player, path: str) -> dict[str, str]:
    """The headers of a request that a user's browser sends to a path."""
    return {"Cookie": player.cookies(path)}


def api(fixture: Fixture) -> str:
    """An address of the victim's server that only the victim may read."""
    return f"{fixture.victim.base}api/contents"


def victim_reads(fixture: Fixture) -> Outcome:
    """The victim's own browser at that address."""
    return via_proxy(fixture, api(fixture), headers=as_browser(fixture.victim, api(fixture)), text='"path"')


def certificate_of(player: Player) -> dict[str, str]:
    """The certificate of a user's own server, which lies in their job's folder."""
    folder = f"{player.folder}/files"
    return {"certificate": f"{folder}/singleuser.crt", "key": f"{folder}/singleuser.key"}


FORGED = {
    "X-Forwarded-For": "127.0.0.1",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "localhost",
    "X-Forwarded-User": "VICTIM",
    "X-Remote-User": "VICTIM",
    "Remote-User": "VICTIM",
    "X-Real-IP": "127.0.0.1",
    "X-Original-URI": "/",
    "Forwarded": "for=127.0.0.1;proto=https",
}


def forged(fixture: Fixture) -> dict[str, str]:
    """Headers that pretend to come from the proxy, for the victim."""
    return {name: value.replace("VICTIM", fixture.victim.name) for name, value in FORGED.items()}


def directly(**more: Callable[[Fixture], Any]) -> Step:
    """A request to the victim's port from the attacker's job on the same node."""
    return lambda s: s.attacker_node.run(
        "http", host=s.server[0], port=s.server[1], path=api(s), **{k: make(s) for k, make in more.items()}
    )


def with_own_certificate(**more: Callable[[Fixture], Any]) -> Step:
    """The same with the certificate of the attacker's own server."""
    return directly(
        certificate=lambda s: certificate_of(s.attacker)["certificate"],
        key=lambda s: certificate_of(s.attacker)["key"],
        **more,
    )


def token(player: Player) -> dict[str, str]:
    """The header with a session's own token."""
    return {"Authorization": f"token {player.token}"}


for name, what, step in (
    ("port, plain", "asks the victim's port without TLS", directly(tls=lambda s: False)),
    ("port, no certificate", "asks the victim's port without a certificate", directly()),
    (
        "port, own certificate",
        "asks it with the certificate of the attacker's own server",
        with_own_certificate(),
    ),
    (
        "port, own token",
        "asks it with that certificate and the attacker's own hub token",
        with_own_certificate(headers=lambda s: token(s.attacker)),
    ),
    (
        "port, forged headers",
        "asks it with that certificate and headers that pretend to be the proxy, for the victim",
        with_own_certificate(headers=forged),
    ),
    (
        "port, the victim's certificate name",
        "asks without certificate but with the victim's host name and cookies of the attacker's",
        directly(headers=lambda s: as_browser(s.attacker, api(s)) | {"Host": s.victim.session}),
    ),
):
    add(AREA, name, what, step, victim_reads)

for name, what, headers in (
    (
        "proxy, own cookies",
        "reads files through the site's reverse proxy with the attacker's cookies",
        lambda s: as_browser(s.attacker, api(s)),
    ),
    (
        "proxy, cookies of own server",
        "does so with the cookies of the attacker's own server",
        lambda s: as_browser(s.attacker, s.attacker.base),
    ),
    ("proxy, own token", "does so with the attacker's hub token", lambda s: token(s.attacker)),
    (
        "proxy, cookies and token",
        "does so with the attacker's cookies and hub token",
        lambda s: as_browser(s.attacker, api(s)) | token(s.attacker),
    ),
    (
        "proxy, forged headers",
        "does so with forged headers",
        lambda s: as_browser(s.attacker, api(s)) | forged(s),
    ),
    ("proxy, nobody", "does so without any cookie", lambda s: {}),
):
    add(
        AREA,
        name,
        what,
        lambda s, headers=headers: via_proxy(s, api(s), headers=headers(s), text='"path"'),
        victim_reads,
    )
add(
    AREA,
    "proxy, token in the address",
    "does so with the attacker's hub token in the address",
    lambda s: via_proxy(s, f"{api(s)}?token={s.attacker.token}", text='"path"'),
    victim_reads,
)
add(
    AREA,
    "proxy, terminal",
    "opens a terminal on the victim's server through the reverse proxy",
    lambda s: via_proxy(
        s,
        f"{s.victim.base}api/terminals",
        method="POST",
        headers=as_browser(s.attacker, api(s)) | token(s.attacker),
    ),
    victim_reads,
)
add(
    AREA,
    "proxy, WebSocket",
    "opens a WebSocket of the victim's server through the reverse proxy",
    lambda s: websocket(s, s.attacker),
    lambda s: websocket(s, s.victim),
)
add(
    AREA,
    "proxy, from the head",
    "asks JupyterHub's proxy itself, past the site's reverse proxy, on the head",
    lambda s: s.attacker_head.run(
        "http",
        host="127.0.0.1",
        port=8000,
        path=api(s),
        tls=False,
        text='"path"',
        headers=as_browser(s.attacker, api(s)) | token(s.attacker) | forged(s),
    ),
    victim_reads,
)
add(
    AREA,
    "proxy's routes",
    "asks the proxy's own interface on the head for its routes",
    lambda s: moves_any(
        s.attacker_head.run(
            "http", host="127.0.0.1", port=8001, path="/api/routes", tls=False, headers=token(s.attacker)
        ),
        s.attacker_head.run(
            "http", host="127.0.0.1", port=8001, path="/api/routes", headers=token(s.attacker)
        ),
    ),
    victim_reads,
)


def moves_any(*outcomes: Outcome) -> Outcome:
    """Several tries at the same thing: reached when one was."""
    return any(reached for reached, _ in outcomes), "; ".join(dict.fromkeys(text for _, text in outcomes))


def websocket(fixture: Fixture, player: Player) -> Outcome:
    """Open the socket on which the server reports what happens."""
    path = f"{fixture.victim.base}api/events/subscribe"
    handshake = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Origin": fixture.settings.site.url,
        "Host": urlsplit(fixture.settings.site.url).netloc,
    }
    return via_proxy(fixture, path, headers=as_browser(player, path) | handshake)
