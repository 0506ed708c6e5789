"""What runs on the active head as long as it is active: carme-active.service."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

from carme.config import Settings
from carme.errors import CarmeError
from carme.heads import address
from carme.heads.lease import Lease

__all__ = ["ANOTHER_IS_ACTIVE", "hold"]

#: Exit code; the unit is not started again after it.
ANOTHER_IS_ACTIVE = 3
#: Of the lease's length: how often it is renewed, and after how long without success all ends here.
RENEW, GIVE_UP = 0.2, 0.8


def hold(settings: Settings, lease: Lease, me: str) -> int:
    """Renew the lease until a signal comes; an exit code.

    0: stopped by a signal, the lease stays ours. 3: another head has it. 1: it could not be renewed in time.
    In the latter two cases systemd stops the services, which are bound to this one.
    """
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    began = _now()
    holder = lease.renew()
    if holder is None:
        return _another_is_active(lease)
    if settings.heads.address:
        address.assign(settings.heads.address, settings.heads.interface)
    _notify(f"READY=1\nSTATUS=Active in epoch {holder.epoch}.")
    print(f"{me} is the active head (epoch {holder.epoch}).", flush=True)
    renewed = began
    while not stopped.wait(RENEW * lease.seconds):
        began = _now()
        # A host that slept finds here, before it does anything else, that its time is over.
        if began - renewed <= GIVE_UP * lease.seconds:
            try:
                # An attempt that lasts longer would end after another head may have started.
                if lease.renew(within=GIVE_UP * lease.seconds - (began - renewed)) is None:
                    return _another_is_active(lease)
                renewed = began
                continue
            except CarmeError as error:
                print(f"The lease cannot be renewed: {error}", file=sys.stderr, flush=True)
        if _now() - renewed > GIVE_UP * lease.seconds:
            print("The lease was not renewed in time. The services of this head stop.", file=sys.stderr)
            return 1
    return 0


def _another_is_active(lease: Lease) -> int:
    holder = None
    with contextlib.suppress(CarmeError):
        holder = lease.read()
    if holder is None:
        holder_text = "No head was promoted yet"
    elif holder.is_alive:
        holder_text = f"{holder.name} is the active head (epoch {holder.epoch})"
    else:
        holder_text = f"{holder.name} was the active head (epoch {holder.epoch}) and is no longer"
    print(f"{holder_text}. To make this one active: carme-head promote", file=sys.stderr)
    return ANOTHER_IS_ACTIVE


def _now() -> float:
    """Seconds, also those in which the host slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _notify(text: str) -> None:
    name = os.environ.get("NOTIFY_SOCKET", "")
    if name:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(f"\0{name[1:]}" if name.startswith("@") else name)
            sender.send(text.encode())
