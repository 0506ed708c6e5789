"""The site two-heads: Debian 12, two heads of which one is active, and PostgreSQL on a host of its own.

Real are `carme-head`, its units, systemd, ssh, PostgreSQL and the address that moves. The services are
stand-ins: Carme itself is not installed, as site.yml sets no second head up yet.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from carme.heads.promotion import SERVICES

from .existing_22_05 import SYSTEM
from .site_hosts import SiteDescription, SiteHosts, wait_until

HEADS = ("head-1", "head-2")
FILES = Path(__file__).with_name("two-heads")
SOURCE = Path(__file__).resolve().parents[2] / "carme/src/carme"
DESCRIPTION = SiteDescription(
    name="siteheads",
    domain="example.org",
    subnet="10.79.0.0/24",
    system=SYSTEM,
    hosts=(("head-1", 2, 0), ("head-2", 3, 0), ("db", 4, 0)),
)
#: Moves with the active head.
ADDRESS = "10.79.0.10"
PROGRAM = "/opt/carme/venv/bin/carme-head"
SECRET = "/etc/carme/secrets/hub-cookie-secret"
_CONFIGURATION = f"""[site]
url = "https://carme.example.org"
[slurm]
cluster = "c"
[hub]
database = "postgresql://carme:trial@10.79.0.4/carme"
[portal]
database = "postgresql://carme:trial@10.79.0.4/carme"
[heads]
names = ["head-1", "head-2"]
address = "{ADDRESS}/24"
interface = "eth0"
"""
_INSTALL = """
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install --yes --no-install-recommends {packages}
"""
_VENV = """
python3 -m venv /opt/carme/venv
/opt/carme/venv/bin/pip install --quiet 'pydantic>=2' cryptography
echo /opt/carme/source >/opt/carme/venv/lib/python3.11/site-packages/carme.pth
cat >/opt/carme/venv/bin/carme-head <<'PROGRAM'
#!/opt/carme/venv/bin/python
from carme.heads.main import main
raise SystemExit(main())
PROGRAM
chmod 755 /opt/carme/venv/bin/carme-head
"""
_DATABASE = """
cd /
echo 'host carme carme 10.79.0.0/24 scram-sha-256' >>/etc/postgresql/15/main/pg_hba.conf
echo "listen_addresses='*'" >/etc/postgresql/15/main/conf.d/all.conf
pg_ctlcluster 15 main restart
"""
_TABLES = """
CREATE ROLE carme LOGIN PASSWORD 'trial';
CREATE DATABASE carme OWNER carme;
\\connect carme
CREATE TABLE booking (number integer);
ALTER TABLE booking OWNER TO carme;
"""
_HEAD = """
useradd --system carme-portal
useradd --system carme-hub
install -d -m 0700 /etc/carme/heads /root/.ssh /var/lib/carme/broker
install -d /etc/carme/secrets
install -d -o carme-hub -m 0700 /var/lib/carme/hub
install -d -o carme-portal -m 0700 /var/lib/carme/portal
ssh-keygen -q -t ed25519 -N '' -f /etc/carme/heads/id_ed25519
systemctl daemon-reload
systemctl enable --quiet carme-active {services}
systemctl enable --quiet --now carme-head-pull.timer
"""


def set_up(site: SiteHosts) -> None:
    """Bring two heads to the state before the first promotion."""
    heads = _INSTALL.format(packages="postgresql-client") + _VENV
    database = _INSTALL.format(packages="postgresql") + _DATABASE
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(SOURCE, "opt/carme/source/carme")
    for name in HEADS:
        site.podman.execute(name, "tar", "-x", "-C", "/", data=content.getvalue(), timeout=120)
    site.at_once({"db": ["sh", "-ec", database], **{name: ["sh", "-ec", heads] for name in HEADS}})
    ready = ("pg_isready", "--quiet")
    wait_until("PostgreSQL runs", lambda: site.run("db", *ready, check=False).returncode == 0, 180)
    site.run("db", "runuser", "--user", "postgres", "--", "psql", "--quiet", "-v", "ON_ERROR_STOP=1",
             data=_TABLES)  # fmt: skip
    for name in HEADS:
        site.put(name, _files())
        site.run(name, "sh", "-ec", _HEAD.format(services=" ".join(SERVICES)))
    for name, other in (HEADS, HEADS[::-1]):
        key = site.run(name, "cat", "/etc/carme/heads/id_ed25519.pub").stdout
        allowed = f'restrict,command="{PROGRAM} send-state" {key}'
        site.put(other, {"root/.ssh/authorized_keys": (allowed.encode(), 0o600)})
        known = site.run(other, "cat", "/etc/ssh/ssh_host_ed25519_key.pub").stdout
        site.put(name, {"etc/carme/heads/known_hosts": (f"{other} {known}".encode(), 0o644)})
    site.run("head-1", "sh", "-ec", f"echo shared >{SECRET}; chgrp carme-hub {SECRET}; chmod 640 {SECRET}")


def _files() -> dict[str, tuple[bytes, int]]:
    files = {
        "etc/carme/carme.toml": (_CONFIGURATION.encode(), 0o644),
        "opt/carme/stand_in_portal.py": ((FILES / "stand_in_portal.py").read_bytes(), 0o644),
    }
    for name in ("carme-active.service", "carme-head-pull.service", "carme-head-pull.timer"):
        files[f"etc/systemd/system/{name}"] = ((FILES / name).read_bytes(), 0o644)
    for name in SERVICES:
        portal = "/usr/bin/python3 /opt/carme/stand_in_portal.py"
        command = portal if name == "carme-portal.service" else "/bin/sleep infinity"
        unit = f"[Service]\nExecStart={command}\nRestart=always\n[Install]\nWantedBy=multi-user.target\n"
        files[f"etc/systemd/system/{name}"] = (unit.encode(), 0o644)
        files[f"etc/systemd/system/{name}.d/active.conf"] = ((FILES / "active.conf").read_bytes(), 0o644)
    return files
