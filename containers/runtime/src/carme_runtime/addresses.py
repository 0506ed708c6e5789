"""What addresses say about where they lead."""

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping

from carme_runtime.errors import CarmeRuntimeError

GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
TURN_LOOPBACK_ON = "Turn on this host's loopback interface: ip link set lo up."


def is_loopback(address: str) -> bool:
    """Whether `address` is this host's own, so that nothing sent to it reaches a network."""
    return address == "localhost" or address.startswith("127.") or address == "::1"


def loopback_works() -> bool:
    """Whether processes of this host reach each other at 127.0.0.1: not where its interface is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # sends nothing
        except OSError:
            return False
    return True


def loopback_is_down(host: str) -> str:
    """What happened to ranks that meet at an address of this host alone, as a sentence."""
    return f"The loopback interface of {host} is down, by which ranks on one host meet."


def meets_here(environment: Mapping[str, str]) -> bool:
    """Whether a rank meets others at an address of this host alone."""
    return environment.get("WORLD_SIZE", "1") != "1" and is_loopback(environment.get("MASTER_ADDR", ""))


def port_in_use(error: BaseException | None, environment: Mapping[str, str]) -> CarmeRuntimeError | None:
    """What to say where a rank could not meet the others because its port is taken; None: it is not that."""
    if error is None or "EADDRINUSE" not in str(error):
        return None
    place = f"port {environment.get('MASTER_PORT', '?')} of {environment.get('MASTER_ADDR', 'this host')}"
    return CarmeRuntimeError(
        f"Rank 0 cannot listen at {place}, where ranks meet: another process uses it.",
        "Start the program again: carme-run then takes another port. Without carme-run, set MASTER_PORT to a "
        "free one.",
    )


def interface_of(address: str) -> str:
    """The interface whose first IPv4 address is `address`; empty when there is none."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(probe, GET_INTERFACE_ADDRESS, request)[20:24] == wanted:
                    return name
    return ""
