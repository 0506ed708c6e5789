"""Attacks: sockets and ports."""

from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Area, add, on_node
from carme.validation.attacks.fixture import Fixture

AREA = Area("Sockets and ports")

on_node(
    AREA,
    "agent's socket",
    "connects to the agent's Unix socket",
    "connect_unix",
    lambda s: {"path": f"{s.private}/agent.sock"},
)
on_node(
    AREA,
    "agent's socket by /proc",
    "connects to it by way of /proc/PID/root",
    "connect_unix",
    lambda s: {"path": f"/proc/{s.server_pid}/root{s.private}/agent.sock"},
)
on_node(
    AREA,
    "apps' folder",
    "looks into the folder with the sockets of the session's apps",
    "enter",
    lambda s: {"path": f"/proc/{s.server_pid}/root{s.private}"},
)
add(
    AREA,
    "other ports",
    "connects to every other port of the victim's programs, such as those of kernels",
    lambda s: kernels_ports(s),
    lambda s: s.victim_node.run("other_ports", user=s.victim.name, known=[]),
)


def kernels_ports(fixture: Fixture) -> Outcome:
    """With a kernel at work: by default those talk over ports that all users of a node can reach."""
    known = [fixture.server[1], fixture.agent[1]]
    url = fixture.settings.site.url + fixture.victim.base
    with fixture.victim.visitor.kernel(url) as kernel:
        kernel.run("1 + 1", timeout=60)
        return fixture.attacker_node.run("other_ports", user=fixture.victim.name, known=known)
