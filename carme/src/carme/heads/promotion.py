"""Making a head the active one, or no longer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from carme.backup.main import STARTED
from carme.errors import CarmeError
from carme.heads.lease import Holder, Lease
from carme.wording import listing

__all__ = ["ACTIVE", "SERVICES", "demote", "promote", "states"]

ACTIVE = "carme-active.service"
SERVICES = tuple(f"{name}.service" for name in STARTED)
#: How long services may take to start.
START_SECONDS = 120.0


def states(units: tuple[str, ...] = (ACTIVE, *SERVICES)) -> dict[str, str]:
    """What systemd says of each unit, like `active`, `inactive`, `failed`."""
    done = _systemctl("is-active", *units)
    return dict(zip(units, done.stdout.split(), strict=False))


def promote(lease: Lease, me: str, force: bool, report: Callable[[str], None]) -> Holder:
    """Make this head the active one, and start its services.

    Waits until the lease of a head that has failed has run out.

    Args:
        force: take the lease from a head that renews it, and give that one the time to stop.
        report: called with each step, a sentence.

    Raises:
        CarmeError: another head is active, or a service does not start.
    """
    holder = lease.read()
    if holder is not None and holder.name != me and not force:
        _wait_until_free(lease, holder, report)
    taken = lease.acquire(force)
    if taken is None:
        raise _is_active(lease.read() or holder)
    report(f"{me} has the lease (epoch {taken.epoch}).")
    if force and holder is not None and holder.name != me and holder.is_alive:
        report(f"Waiting {holder.seconds:.0f} s for {holder.name} to stop its services.")
        time.sleep(holder.seconds)
    _start(report)
    return taken


def _wait_until_free(lease: Lease, holder: Holder, report: Callable[[str], None]) -> None:
    """Until the lease has run out; a holder that renews it meanwhile is active."""
    if not holder.is_alive:
        return
    left = holder.seconds - holder.age
    report(f"{holder.name} renewed its lease {holder.age:.0f} s ago. Waiting {left:.0f} s for it to run out.")
    last = holder
    while last.is_alive:
        time.sleep(min(1.0, max(0.05, last.seconds - last.age)))
        seen = lease.read()
        if seen is None or (seen.name, seen.epoch) != (holder.name, holder.epoch):
            raise _is_active(seen)
        # Renewed: an older sign of life would be older by now.
        if seen.age < last.age and seen.is_alive:
            raise _is_active(seen)
        last = seen


def _is_active(holder: Holder | None) -> CarmeError:
    name = holder.name if holder else "another head"
    return CarmeError(
        f"{name} is the active head and renews its lease. Nothing was changed.",
        f"To change over, run carme-head demote on {name} first. If you cannot reach {name} and it still"
        " runs, use --force.",
        code="active",
    )


def _start(report: Callable[[str], None]) -> None:
    units = (ACTIVE, *SERVICES)
    _systemctl("reset-failed", *units)
    done = _systemctl("start", *units)
    end = time.monotonic() + START_SECONDS
    found = states(units)
    while "activating" in found.values() and time.monotonic() < end:
        time.sleep(0.2)
        found = states(units)
    failed = [f"{unit} ({state})" for unit, state in found.items() if state != "active"]
    if failed or not found:
        reason = f" systemctl: {done.stderr.strip()[:500]}" if done.stderr.strip() else ""
        which = listing(failed) if failed else "all"
        raise CarmeError(
            f"This head has the lease, but these services do not run: {which}.{reason}",
            "See journalctl --unit NAME, and run carme-head promote again.",
        )
    # It stands before them on both heads, and its certificate may have been renewed on the other one.
    _systemctl("try-reload-or-restart", "nginx.service")
    report(f"{len(found)} services run.")


def demote(lease: Lease, me: str, report: Callable[[str], None]) -> None:
    """Stop this head's services and let its lease run out at once. Raises CarmeError if it is not active."""
    holder = lease.read()
    if holder is None or holder.name != me:
        raise CarmeError(
            f"This head is not the active one; that is {holder.name if holder else 'none'}.",
            "Run carme-head demote on the active head.",
        )
    units = (*reversed(SERVICES), ACTIVE)
    done = _systemctl("stop", *units)
    running = [unit for unit, state in states(units).items() if state not in ("inactive", "failed")]
    if running:
        raise CarmeError(
            f"These services do not stop: {listing(running)}. The lease stays. {done.stderr.strip()[:500]}",
            "See journalctl --unit NAME.",
        )
    lease.release()
    report(f"The services of {me} are stopped and its lease has ended.")


def _systemctl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
