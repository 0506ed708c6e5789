"""Where the site's help says more about how a run ended: a line below the message of carme-run.

The job's variable CARME_HELP has the address of the portal's help. Without it, as outside of jobs, there is
no line.
"""

import os
from collections.abc import Mapping
from enum import StrEnum

__all__ = ["HELP", "Section", "help_link"]

HELP = "CARME_HELP"


class Section(StrEnum):
    """Sections of the users' guide to training, `docs/users/training.md`."""

    FAILURE = "when-something-goes-wrong"
    LOSS = "when-ranks-or-nodes-are-lost"
    LAUNCHERS = "other-launchers"


def help_link(section: Section, environment: Mapping[str, str] = os.environ) -> str:
    """What follows a message, like `\\nMore: https://.../help/training/#...`; empty without an address."""
    address = environment.get(HELP, "").rstrip("/")
    return f"\nMore: {address}/training/#{section}" if address else ""
