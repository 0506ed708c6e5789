"""The site two-heads: Debian 12, two heads of which one is active, and PostgreSQL on a host of its own."""

from __future__ import annotations

from .existing_22_05 import SYSTEM
from .site_hosts import SiteDescription

DESCRIPTION = SiteDescription(
    name="siteheads",
    domain="example.org",
    subnet="10.79.0.0/24",
    system=SYSTEM,
    hosts=(("head-1", 2, 0), ("head-2", 3, 0), ("db", 4, 0)),
)
#: Moves with the active head.
ADDRESS = "10.79.0.10"
