"""Services that must not run while their state is replaced."""

import subprocess
from collections.abc import Sequence

from carme.errors import CarmeError

__all__ = ["require_stopped"]


def require_stopped(units: Sequence[str]) -> None:
    """Raise CarmeError while one of these units of systemd runs: it would go on with its own state."""
    try:
        done = subprocess.run(["systemctl", "is-active", *units], capture_output=True, text=True, check=False)
    except OSError:
        return  # no systemd, no services
    running = [unit for unit, state in zip(units, done.stdout.split(), strict=False) if state == "active"]
    if running:
        raise CarmeError(
            f"These services run: {', '.join(running)}. Nothing was written.", "Use: systemctl stop 'carme-*'"
        )
