"""All attacks, area by area, in the order in which they are made and reported."""

from carme.validation.attacks.case import Attack
from carme.validation.attacks.cases import (
    broker,
    command_line,
    hub,
    job_fabric,
    job_secrets,
    metrics,
    names_and_paths,
    node,
    notebook_server,
    portal,
    reverse_proxy,
    sockets_and_ports,
    victims_origin,
)

ATTACKS: list[Attack] = [
    *job_secrets.AREA.attacks,
    *node.AREA.attacks,
    *sockets_and_ports.AREA.attacks,
    *job_fabric.AREA.attacks,
    *notebook_server.AREA.attacks,
    *reverse_proxy.AREA.attacks,
    *victims_origin.AREA.attacks,
    *hub.AREA.attacks,
    *portal.AREA.attacks,
    *metrics.AREA.attacks,
    *broker.AREA.attacks,
    *command_line.AREA.attacks,
    *names_and_paths.AREA.attacks,
]
