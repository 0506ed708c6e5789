"""Where the hub and its proxy can reach this node."""

import os
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit


def cluster_address() -> str:
    """The address of this node at which the hub and its proxy can reach it."""
    name = os.environ.get("SLURMD_NODENAME")
    if name:
        try:
            for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
                address = str(entry[4][0])
                # Many systems map their own name to 127.0.1.1, which nobody else can reach.
                if not ip_address(address.partition("%")[0]).is_loopback:
                    return address
        except OSError:
            pass
    hub = urlsplit(os.environ["JUPYTERHUB_API_URL"])
    where = socket.getaddrinfo(hub.hostname, hub.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(where[0], socket.SOCK_DGRAM) as probe:
        # No packet is sent: this asks the routing table which of our addresses leads to the hub.
        probe.connect(where[4])
        return str(probe.getsockname()[0])


def service_url(scheme: str) -> str:
    """What JupyterHub's extension reads the address from; the port is replaced by a free one."""
    address = cluster_address()
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:1"
