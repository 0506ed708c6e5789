"""Attacks: the hub."""

from urllib.parse import urlsplit

from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Area, Step, add
from carme.validation.attacks.cases.notebook_server import (
    as_browser,
    certificate_of,
    moves_any,
    token,
    via_proxy,
)
from carme.validation.attacks.fixture import Fixture

AREA = Area("The hub")

HUB_API = "/jupyter/hub/api"


def hub(method: str, path: str, body: str = "", text: str = "") -> Step:
    """A request to the hub's interface with all that the attacker has: cookies, token, certificate."""

    def step(fixture: Fixture) -> Outcome:
        victim = fixture.victim
        where = HUB_API + path.replace("VICTIM", victim.name).replace("SESSION", victim.session)
        found = {"method": method, "body": body_of(fixture, body), "text": text}
        json_body = {"Content-Type": "application/json"}
        hub_address = urlsplit(fixture.settings.hub.listen)
        return moves_any(
            via_proxy(
                fixture,
                where,
                headers=as_browser(fixture.attacker, where) | token(fixture.attacker) | json_body,
                **found,
            ),
            via_proxy(fixture, where, headers=as_browser(fixture.attacker, where) | json_body, **found),
            fixture.attacker_node.run(
                "http",
                host=hub_address.hostname,
                port=hub_address.port,
                path=where,
                headers=token(fixture.attacker) | json_body,
                **found,
                **certificate_of(fixture.attacker),
            ),
            fixture.attacker_node.run(
                "http",
                host=hub_address.hostname,
                port=hub_address.port,
                path=where,
                tls=False,
                headers=token(fixture.attacker) | json_body,
                **found,
            ),
        )

    return step


def body_of(fixture: Fixture, body: str) -> str:
    """A body with the victim's address and names in it."""
    return (
        body.replace("HOST", fixture.server[0])
        .replace("PORT", str(fixture.server[1]))
        .replace("VICTIM", fixture.victim.name)
        .replace("SESSION", fixture.victim.session)
    )


def own_record(fixture: Fixture) -> Outcome:
    """What a token may do: its owner's own record."""
    path = f"{HUB_API}/user"
    return via_proxy(fixture, path, headers=token(fixture.victim), text=fixture.victim.name)


for name, what, step in (
    ("victim's record", "reads the victim's record", hub("GET", "/users/VICTIM")),
    ("all users", "lists all users", hub("GET", "/users")),
    ("stop", "stops the victim's server", hub("DELETE", "/users/VICTIM/servers/SESSION")),
    ("token", "makes a token of the victim's", hub("POST", "/users/VICTIM/tokens", "{}")),
    (
        "share",
        "shares the victim's server with the attacker",
        hub("POST", "/shares/VICTIM/SESSION", '{"user": "VICTIM"}'),
    ),
    ("admin", "makes the attacker an administrator", hub("PATCH", "/users/VICTIM", '{"admin": true}')),
    (
        "spawner's attributes",
        "sets any attribute of a spawner, such as the command that ends its job",
        hub("POST", "/batchspawner", '{"batch_cancel_cmd": "touch /tmp/carme-was-here", "port": PORT}'),
    ),
    (
        "ready elsewhere",
        "reports the victim's address as that of the attacker's own server",
        hub("POST", "/carme/ready", '{"port": PORT, "host": "HOST", "pid": 1, "marks": {}}'),
    ),
    (
        "ready for another",
        "reports for the victim's server",
        hub(
            "POST",
            "/carme/ready",
            '{"port": PORT, "host": "HOST", "pid": 1, "marks": {}, "user": "VICTIM", "server": "SESSION"}',
        ),
    ),
    (
        "activity for another",
        "reports activity for the victim's server",
        hub(
            "POST",
            "/carme/activity",
            '{"busy_since_last": true, "kernels": null, "terminals": null, "gpus": null, '
            '"ranks": null, "user": "VICTIM", "server": "SESSION"}',
        ),
    ),
    (
        "extend for another",
        "prolongs the victim's server",
        hub("POST", "/carme/extend", '{"minutes": 1, "user": "VICTIM", "server": "SESSION"}'),
    ),
    (
        "activity of the hub's",
        "says that the victim's server was active, by JupyterHub's own interface",
        hub(
            "POST",
            "/users/VICTIM/activity",
            '{"servers": {"SESSION": {"last_activity": "2030-01-01T00:00:00Z"}}}',
        ),
    ),
):
    add(AREA, name, what, step, own_record)
