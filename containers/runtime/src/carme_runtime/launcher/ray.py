"""Ray over the nodes of a job: its head on the first, a worker node on each other, the script once."""

import hashlib
import importlib.util
import secrets
import sys
from typing import TYPE_CHECKING

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.launcher.programs import Process, Program

if TYPE_CHECKING:
    from carme_runtime.fabric.members import Member
    from carme_runtime.launcher.placement import Place
    from carme_runtime.launcher.run_setup import Setup

TOKEN, FOLDER = "RAY_AUTH_TOKEN", "CARME_RAY_FOLDER"
#: What ranks get, and all of Ray's processes.
SETS = ("RAY_ADDRESS", "RAY_AUTH_MODE", TOKEN, "RAY_USAGE_STATS_ENABLED")
#: The first that asks its callers for a token: before, who reached its port could run programs.
_LEAST_VERSION = (2, 52)
_READY = "Ray runtime started."
# A busy machine needs longer than Ray waits.
_PATIENCE = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
}
# Ports of a node's agents. Else Ray lets the agents choose, and gives up after 15 s on a busy machine.
_AGENT_PORTS = (
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
    "--dashboard-agent-listen-port",
)


def variables(setup: "Setup", host: str) -> dict[str, str]:
    """By which `ray.init(address="auto")` finds the cluster.

    Args:
        host: Of the head, as the other nodes call it.
    """
    return {
        "RAY_ADDRESS": f"{host}:{setup.ports[0]}",
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        **setup.secrets,
    }


def members(places: "list[Place]") -> "list[Member]":
    """The nodes that ports are needed of: the first one twice for the head, and each for its agents."""
    nodes = _nodes(places)
    return [nodes[0].member, nodes[0].member, *(node.member for node in nodes for _ in _AGENT_PORTS)]


def token() -> list[str]:
    """What this run's processes show each other."""
    return [secrets.token_hex(32)]


def programs(setup: "Setup", hosts: dict[int, str]) -> list[Program]:
    """The head, then a worker on each other node, with the processors and GPUs of the node.

    Args:
        hosts: By a node's number, its address.
    """
    first = setup.places[0].member
    shared = variables(setup, hosts[first.number]) | _PATIENCE
    # Sockets lie in it, so it is short; other users of the node must not be able to guess it.
    name = hashlib.sha256(setup.secrets.get(TOKEN, "").encode()).hexdigest()[:12]
    shared[FOLDER] = f"/tmp/ray-{name}"
    commands = []
    port, client_port, *agent_ports = map(str, setup.ports)
    ports = iter(agent_ports)
    for place in _nodes(setup.places):
        host = hosts[place.member.number].strip("[]")
        size = ["--num-cpus", str(max(place.member.cpus, place.local_size))]
        size += ["--num-gpus", str(place.member.devices)]
        agents = [word for option in _AGENT_PORTS for word in (option, next(ports, "0"))]
        is_head = place.member.number == first.number
        where = ["--head", "--port", port, "--include-dashboard", "false", *_client_server(client_port)]
        where = where if is_head else ["--address", shared["RAY_ADDRESS"]]
        commands.append(
            Program(
                "Ray's head" if is_head else "A worker node of Ray",
                [
                    sys.executable,
                    "-m",
                    "carme_runtime.launcher.ray_node",
                    *where,
                    "--node-ip-address",
                    host,
                    *size,
                    *agents,
                ],
                [Process(place.member, shared)],
                _READY,
            )
        )
    return commands


def _client_server(port: str) -> list[str]:
    """The option for the server of Ray's clients, which the head starts where gRPC is installed.

    Else it takes port 10001, which another job on the node may have. Without gRPC Ray refuses the option.
    """
    return ["--ray-client-server-port", port] if importlib.util.find_spec("grpc") else []


def refuse(setup: "Setup") -> None:
    """Raise CarmeRuntimeError where Ray would take commands without a password."""
    import importlib.metadata  # which no other backend needs

    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return  # a dry run needs none
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        raise CarmeRuntimeError(
            f"Ray {version} asks nobody for a token, so everybody who reaches its port could run programs.",
            f"Use an image with Ray {least} or later, or install it: pip install 'ray>={least}'",
        )


def _nodes(places: "list[Place]") -> "list[Place]":
    """A place of each node, in their order."""
    return list({place.member.number: place for place in reversed(places)}.values())[::-1]
