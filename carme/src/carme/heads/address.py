"""The address that moves with the active head."""

from __future__ import annotations

import socket
import struct
import subprocess
from ipaddress import IPv4Address, ip_interface
from pathlib import Path

from carme.errors import CarmeError

__all__ = ["assign", "drop"]

_BROADCAST = b"\xff" * 6
_ARP, _IPV4 = 0x0806, 0x0800
_REQUEST = 1


def assign(address: str, interface: str) -> None:
    """Give an interface the address, and announce it to the neighbours. Raises CarmeError."""
    _ip(["address", "replace", _as_shown(address), "dev", interface])
    ip = ip_interface(address).ip
    if isinstance(ip, IPv4Address):
        announce(ip, interface)


def drop(address: str, interface: str) -> None:
    """Take the address from the interface, if it has it."""
    shown = subprocess.run(
        ["ip", "-oneline", "address", "show", "dev", interface], capture_output=True, text=True, check=False
    ).stdout
    if f" {_as_shown(address)} " in shown:
        _ip(["address", "delete", _as_shown(address), "dev", interface])


def _as_shown(address: str) -> str:
    """As `ip` shows it: with the length of the prefix, and IPv6 in its shortest form."""
    return ip_interface(address).with_prefixlen


def announce(ip: IPv4Address, interface: str) -> None:
    """Send an ARP announcement (RFC 5227, section 3), so that neighbours forget where the address was."""
    hardware = bytes.fromhex(Path(f"/sys/class/net/{interface}/address").read_text().strip().replace(":", ""))
    header = _BROADCAST + hardware + struct.pack("!H", _ARP)
    body = struct.pack("!HHBBH", 1, _IPV4, 6, 4, _REQUEST) + hardware + ip.packed + bytes(6) + ip.packed
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind((interface, 0))
        for _ in range(3):
            raw.send(header + body)


def _ip(words: list[str]) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CarmeError(
            f"ip {' '.join(words)} failed: {done.stderr.strip()}.",
            "Correct 'address' and 'interface' of [heads] in carme.toml.",
        )
