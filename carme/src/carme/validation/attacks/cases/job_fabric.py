"""Attacks: the job fabric."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from carme.validation.attacks.case import Area, Arguments, add
from carme.validation.attacks.fixture import Fixture, Player

AREA = Area("The job fabric")


def to_agent(choose: Callable[[Fixture], Player] | None, **more: Any) -> Arguments:
    """Arguments of `talk` with the victim's agent, with the certificate of one of the two."""

    def arguments(fixture: Fixture) -> dict[str, Any]:
        pem = f"{choose(fixture).folder}/fabric.pem" if choose else ""
        return {"host": fixture.agent[0], "port": fixture.agent[1], "certificate": pem, **more}

    return arguments


VICTIM: Callable[[Fixture], Player] = attrgetter("victim")
ATTACKER: Callable[[Fixture], Player] = attrgetter("attacker")
HELLO = (b'{"protocol": "carme-fabric-1", "challenge": "' + b"00" * 32 + b'"}\n').hex()
for name, what, step in (
    ("without certificate", "speaks TLS with the agent and shows no certificate", to_agent(None)),
    ("own certificate", "shows the agent the certificate of the attacker's own job", to_agent(ATTACKER)),
    ("without TLS", "greets the agent without TLS", to_agent(None, tls=False, send=HELLO)),
    ("garbage", "sends the agent a megabyte of garbage", to_agent(None, tls=False, send="ff" * 1_000_000)),
):
    add(
        AREA,
        name,
        what,
        lambda s, step=step: s.attacker_node.run("talk", **step(s)),
        lambda s: s.victim_node.run("talk", **to_agent(VICTIM)(s)),
    )
