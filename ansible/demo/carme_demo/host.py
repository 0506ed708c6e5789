"""What the host must offer, checked before anything is changed, and the packages that it needs."""

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import cleanup, commands
from .errors import DemoError
from .podman import Runtime
from .registries import missing_programs
from .settings import Places, Settings

FIRST_GIB = 12
LATER_GIB = 2


def check_space(free: int, first: bool) -> None:
    """Args: ``free`` bytes, and whether the demo is made for the first time."""
    needed = FIRST_GIB if first else LATER_GIB
    if free < needed << 30:
        raise DemoError(
            f"There are {free / (1 << 30):.1f} GiB free below /var/lib, but the demo needs {needed} GiB.",
            "Free some space and run the same command again.",
        )


def check_host(places: Places, settings: Settings, *, running: bool) -> None:
    """See that there is room for the demo.

    Args:
        running: the demo's head runs, so that its port and its network are taken by itself.
    """
    check_space(shutil.disk_usage(places.state_base).free, first=not places.storage.exists())
    if not running:
        check_port(settings.port)
        routes = commands.run(
            ["ip", "-o", "-4", "route", "show", "root", settings.subnet], check=False, timeout=30
        )
        check_routes(routes.stdout.decode(errors="replace"), settings.subnet, places.bridge)


def check_port(port: int) -> None:
    """See that nobody listens on the portal's port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise DemoError(
                f"Port {port} on 127.0.0.1 is taken by another program.",
                "Choose another one, for example: ./demo up --port 9443",
            ) from None


def check_routes(routes: str, subnet: str, bridge: str) -> None:
    """See that the nodes' network is not in use for something else.

    Args:
        routes: output of ``ip route show root SUBNET``.
        bridge: our own interface, which does not count.
    """
    for line in routes.splitlines():
        words = line.split()
        if "dev" in words and words[words.index("dev") + 1] != bridge:
            raise DemoError(
                f"The network {subnet} is in use here ({words[0]} on {words[words.index('dev') + 1]}).",
                "Choose another one, for example: ./demo up --subnet 10.99.0.0/24",
            )


def programs(runtime: Runtime) -> dict[str, str]:
    """Programs and files that the demo needs on the host, and the packages that bring them."""
    return {
        "podman": "podman",
        "conmon": "conmon",
        runtime.name: runtime.name,
        "/usr/lib/podman/netavark": "netavark",
        "/usr/lib/podman/aardvark-dns": "aardvark-dns",
        "iptables": "iptables",
        "nft": "nftables",
        "ip": "iproute2",
        "mmdebstrap": "mmdebstrap",
        "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
    }


def install_packages(runtime: Runtime, places: Places) -> list[str]:
    """Install what is missing on the host.

    Returns:
        The packages that were installed.
    """
    missing = missing_programs(programs(runtime))
    if missing:
        log = places.log / "packages.log"
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        remedy = "See that apt works on this host, then run the same command again."
        waiting = ["-o", "DPkg::Lock::Timeout=300"]
        commands.run(
            ["apt-get", *waiting, "update"], log=log, timeout=900, environment=environment, remedy=remedy
        )
        install = ["apt-get", *waiting, "install", "--yes", "--no-install-recommends", *missing]
        commands.run(install, log=log, timeout=1800, environment=environment, remedy=remedy)
    return missing


@contextmanager
def exclusive_lock(places: Places) -> Iterator[None]:
    """Keep a second demo of the same name out; the kernel lets go when the process ends, however it ends."""
    places.state.mkdir(parents=True, exist_ok=True)
    handle = os.open(places.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(
                f"Another ./demo is working on the demo {places.name!r} right now.",
                "Wait until it has ended.",
            ) from None
        yield
    finally:
        os.close(handle)


def remove_state(places: Places) -> None:
    """Remove the state folder with all it holds; the lock goes last."""
    for entry in list(places.state.iterdir()) if places.state.exists() else []:
        if entry.is_dir():
            cleanup.remove_tree(entry)
        elif entry != places.lock:
            entry.unlink(missing_ok=True)
    cleanup.remove_tree(places.state)


def last_lines(log: Path | None, count: int = 15) -> list[str]:
    """The end of a log, or nothing."""
    if log is None or not log.is_file():
        return []
    return log.read_text(errors="replace").rstrip().splitlines()[-count:]
