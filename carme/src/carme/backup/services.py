"""Services that must not run while their state is replaced."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from carme.errors import CarmeError

__all__ = ["require_stopped"]

#: Where systemd runs this host.
SYSTEMD = Path("/run/systemd/system")
#: All other states are of services that run, or are about to, as between two starts.
STOPPED = {"inactive", "failed", "unknown"}


def require_stopped(units: Sequence[str]) -> None:
    """Raise CarmeError while one of these units of systemd runs: it would go on with its own state.

    So it does where systemd does not say how they are.
    """
    try:
        done = subprocess.run(["systemctl", "is-active", *units], capture_output=True, text=True, check=False)
    except OSError:
        return  # no systemd, no services
    states = done.stdout.split()
    running = [unit for unit, state in zip(units, states, strict=False) if state not in STOPPED]
    if running:
        raise CarmeError(
            f"These services run: {', '.join(running)}. Nothing was written.",
            "Use: systemctl stop 'carme-*.service'",
        )
    if len(states) != len(units) and SYSTEMD.is_dir():
        why = " ".join(done.stderr.split()).removesuffix(".") or "no answer"
        raise CarmeError(
            f"systemd does not say whether {', '.join(units)} run: {why}. Nothing was written.",
            "Check 'systemctl status'.",
        )
