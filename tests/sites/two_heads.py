"""The site two-heads: one head is active, one stands by; PostgreSQL and slurmctld are on another host.

All of it is what site.yml makes on Debian 13, but PostgreSQL, which is the site's own.
"""

from __future__ import annotations

import secrets
from typing import Any

from carme_demo import image

from . import whole_site
from .site_hosts import SiteDescription, SiteHosts, wait_until

HEADS = ("head-1", "head-2")
DESCRIPTION = SiteDescription(
    name="siteheads",
    domain="example.org",
    subnet="10.79.0.0/24",
    system=image.System("trixie", (*image.PACKAGES, "sudo")),
    hosts=(("head-1", 2, 0), ("head-2", 3, 0), ("db", 4, 0), ("node-1", 11, 2)),
    shared={"home": "/home", "scratch": "/scratch", "images": "/srv/carme/images"},
)
#: Moves with the active head.
ADDRESS = "10.79.0.10"
URL = f"https://{ADDRESS}"
PROGRAM = "/opt/carme/venv/bin/carme-head"
USERS = ("user1", "user2")
GROUPS = {
    "head": HEADS,
    "compute": ("node-1",),
    "slurm_controller": ("db",),
    "slurm_database": ("db",),
    "slurm_client": HEADS,
    "slurm_node": ("node-1",),
    "postgresql": (),
}
_POSTGRESQL = """
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install --yes --no-install-recommends postgresql
cd /etc/postgresql/*/main
echo 'host all all 10.79.0.0/24 scram-sha-256' >>pg_hba.conf
echo "listen_addresses='*'" >conf.d/all.conf
systemctl restart postgresql
"""


def set_up(site: SiteHosts) -> dict[str, str]:
    """Bring the hosts to the state in which site.yml begins; the users' passwords."""
    names = (*USERS, "hub", "portal")
    passwords = {name: secrets.token_urlsafe(12) for name in names}
    site.everywhere("chmod 1777 /scratch")
    site.run("db", "sh", "-ec", _POSTGRESQL, timeout=1800)
    ready = ("pg_isready", "--quiet")
    wait_until("PostgreSQL runs", lambda: site.run("db", *ready, check=False).returncode == 0, 180)
    for part in ("hub", "portal"):
        lines = f"""
            CREATE ROLE "carme-{part}" LOGIN PASSWORD '{passwords[part]}';
            CREATE DATABASE "carme-{part}" OWNER "carme-{part}";
        """
        words = ("runuser", "--user", "postgres", "--", "psql", "--quiet", "-v", "ON_ERROR_STOP=1")
        site.run("db", *words, data=lines)
    write_inventory(site, passwords)
    return passwords


def write_inventory(site: SiteHosts, passwords: dict[str, str]) -> None:
    """The demo's inventory with two heads, and Slurm's controller apart from both."""
    server = site.machines["db"].address
    changes: dict[str, Any] = {
        "carme_site_name": "Two heads",
        "carme_site_url": URL,
        "carme_heads_address": f"{ADDRESS}/24",
        "carme_hub_database": f"postgresql://carme-hub@{server}/carme-hub",
        "carme_hub_database_password": passwords["hub"],
        # As inventories had it before there were variables for passwords.
        "carme_portal_database": f"postgresql://carme-portal:{passwords['portal']}@{server}/carme-portal",
        "carme_users": [
            {"name": name, "uid": 2001 + number, "password": passwords[name]}
            for number, name in enumerate(USERS)
        ],
        "carme_bookings": {"enabled": True, "notice_minutes": 0, "at_a_time": 1000, "share_percent": 100},
        "carme_default_image": "base",
        "images_names": ["base"],
        "images_horovod": False,
        # As many sessions as memory allows share the node's processors.
        "slurm_node_cpus": 48,
        "slurm_node_memory_mb": 48000,
    }
    whole_site.write_inventory(site.places.state / "inventory", site.description, GROUPS, changes)
