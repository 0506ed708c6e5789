"""The site own-24.11: what the demo is, on hosts of its own, with PostgreSQL, a provider and login hosts.

Slurm 24.11 is Debian 13's, which site.yml installs, as it does PostgreSQL. Users sign in with passwords, and
at an OpenID Connect provider of the site, which runs on the machine that runs the tests.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from simulated_provider import CLIENT, SECRET, Provider

from carme_demo import image

from . import whole_site
from .site_hosts import SiteDescription, SiteHosts

LOGIN = ("login-1", "login-2")
NODES = ("node-1", "node-2")
DESCRIPTION = SiteDescription(
    name="site2411",
    domain="example.org",
    subnet="10.82.0.0/24",
    # With socat the head reaches the provider at its own loopback address, where it may be without TLS.
    system=image.System("trixie", (*image.PACKAGES, "sudo", "socat")),
    hosts=(("portal", 2, 0), ("login-1", 3, 0), ("login-2", 4, 0), ("node-1", 11, 2), ("node-2", 12, 2)),
    shared={"home": "/home", "scratch": "/scratch", "images": "/srv/carme/images"},
)
URL = "https://10.82.0.2"
GROUPS = {
    "head": ("portal",),
    "compute": NODES,
    "slurm_controller": ("portal",),
    "slurm_database": ("portal",),
    "slurm_client": ("portal", *LOGIN),
    "slurm_node": NODES,
    "postgresql": ("portal",),
}
#: They have passwords; the third is known to the provider alone.
USERS = ("user1", "user2")
OUTSIDER = "carol"
PROVIDER_PORT = 18_081
ISSUER = f"http://127.0.0.1:{PROVIDER_PORT}"
_FORWARDER = "site-provider"
_SECRET = "etc/carme/secrets/oidc-provider-secret"


def set_up(site: SiteHosts) -> dict[str, str]:
    """Bring the hosts to the state in which site.yml begins; the users' passwords."""
    passwords = {name: secrets.token_urlsafe(12) for name in USERS}
    site.everywhere("chmod 1777 /scratch")
    write_inventory(site.places.state / "inventory", passwords)
    return passwords


def write_inventory(folder: Path, passwords: dict[str, str]) -> None:
    """The demo's inventory with PostgreSQL, the provider and hosts that have Slurm's commands alone."""
    users: list[dict[str, Any]] = [
        {"name": name, "uid": 2001 + number, "password": passwords[name]} for number, name in enumerate(USERS)
    ]
    changes = {
        "carme_site_name": "Own Slurm 24.11",
        "carme_site_url": URL,
        "carme_head_address": "10.82.0.2",
        "carme_portal_database": "postgresql:///carme-portal",
        "carme_oidc": {"issuer": ISSUER, "client_id": CLIENT, "name": "Example University"},
        "carme_users": [*users, {"name": OUTSIDER, "uid": 2001 + len(users)}],
        "images_names": ["base", "torch"],
        "images_horovod": False,
    }
    whole_site.write_inventory(folder, DESCRIPTION, GROUPS, changes)


def start_provider(site: SiteHosts) -> Provider:
    """The provider, which the head reaches from now on; it knows the outsider. The portal has its secret.

    The portal is installed: its group reads the secret.
    """
    gateway = site.settings.gateway
    provider = Provider(f"{URL}/accounts/outside/back/", ("127.0.0.1", gateway), PROVIDER_PORT)
    provider.claims = {"sub": "u-3", "preferred_username": OUTSIDER}
    site.run("portal", "systemctl", "stop", _FORWARDER, check=False)
    begin = ("systemd-run", "--quiet", "--collect", f"--unit={_FORWARDER}")
    site.run("portal", *begin, *provider.forwarder(gateway))
    site.put("portal", {_SECRET: (SECRET.encode(), 0o640)})
    site.run("portal", "chown", "root:carme-portal", f"/{_SECRET}")
    return provider
