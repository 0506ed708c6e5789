"""The site existing-22.05: Debian 12 with its Slurm 22.05, configured by files written by hand."""

from __future__ import annotations

import os
import time
from pathlib import Path

from certificates import self_signed

from carme_demo import image, registries
from carme_demo.settings import write_atomically

from .site_hosts import ANSIBLE, SiteDescription, SiteHosts, wait_until

FILES = Path(__file__).with_name("existing-22.05")
SYSTEM = image.System(
    "bookworm",
    (*image.PACKAGES, "sudo", "munge", "slurm-client", "libpmix2", "nano", "man-db"),
)
DESCRIPTION = SiteDescription(
    name="site2205",
    domain="example.org",
    subnet="10.78.0.0/24",
    system=SYSTEM,
    hosts=(("portal", 2, 0), ("ctl", 3, 0), ("gpu-01", 11, 2), ("gpu-02", 12, 2)),
    shared={"home": "/data/home", "scratch": "/scratch", "images": "/srv/carme/images"},
)
NODES = ("gpu-01", "gpu-02")
USERS = {"ada": 3001, "grace": 3002, "alan": 3003}
#: What a site of its own installs beyond the image, by host.
PACKAGES = {
    "portal": "nginx-light",
    "ctl": "slurmctld slurmdbd mariadb-server",
    "gpu-01": "slurmd",
    "gpu-02": "slurmd",
}
APPTAINER = "/var/cache/apt/archives/apptainer-site.deb"
#: Slurm's service of a host that is a container: job_container/tmpfs needs an old mount namespace there.
NAMESPACE = """[Service]
ExecStart=
ExecStart=/usr/local/sbin/slurmd-in-namespace /usr/sbin/slurmd -D -s $SLURMD_OPTIONS
"""
_INSTALL = """
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install --yes --no-install-recommends {packages}
"""
_DATABASE = """
systemctl start mariadb
mysql -e "CREATE DATABASE slurm_acct_db; CREATE USER slurm@localhost IDENTIFIED VIA unix_socket;
          GRANT ALL ON slurm_acct_db.* TO slurm@localhost"
"""


def set_up(site: SiteHosts) -> None:
    """Bring the site's hosts to the state in which their administrators read Carme's documentation."""
    _install_packages(site)
    _make_users(site)
    _distribute_munge_key(site)
    _configure_slurm(site)
    _start_slurm(site)
    _serve_own_pages(site)
    _issue_certificate(site)


def _install_packages(site: SiteHosts) -> None:
    script = (FILES / "apptainer-deb.sh").read_text()
    site.run("portal", "sh", "-s", registries.of_host().mirror, APPTAINER, data=script, timeout=1800)
    package = site.places.cache / "apt/portal" / Path(APPTAINER).name
    for name in NODES:
        target = site.places.cache / "apt" / name / package.name
        target.unlink(missing_ok=True)
        os.link(package, target)
    commands = {}
    for name, packages in PACKAGES.items():
        wanted = packages if name == "ctl" else f"{packages} squashfuse {APPTAINER}"
        commands[name] = ["sh", "-ec", _INSTALL.format(packages=wanted)]
    site.at_once(commands)


def _make_users(site: SiteHosts) -> None:
    for name, uid in USERS.items():
        site.everywhere(
            f"useradd --uid {uid} --user-group --shell /bin/bash --home-dir /data/home/{name} {name}"
        )
        site.run("portal", "install", "-d", f"--owner={name}", f"--group={name}", "-m", "0700",
                 f"/data/home/{name}")  # fmt: skip
    site.run("portal", "chmod", "1777", "/scratch")


def _distribute_munge_key(site: SiteHosts) -> None:
    key = os.urandom(1024)
    for name in site.machines:
        site.put(name, {"etc/munge/munge.key": (key, 0o400)})
    site.everywhere("chown munge: /etc/munge/munge.key; systemctl restart munge")


def _configure_slurm(site: SiteHosts) -> None:
    files = {}
    for file in sorted((FILES / "etc/slurm").iterdir()):
        mode = 0o755 if file.read_bytes().startswith(b"#!") else 0o644
        files[f"etc/slurm/{file.name}"] = (file.read_bytes(), mode)
    database = files.pop("etc/slurm/slurmdbd.conf")
    for name in site.machines:
        site.put(name, files)
    site.put("ctl", {"etc/slurm/slurmdbd.conf": (database[0], 0o600)})
    helper = (ANSIBLE / "roles/slurm_node/files/carme-slurmd").read_bytes()
    for name in NODES:
        unit = "etc/systemd/system/slurmd.service.d/namespace.conf"
        site.put(name, {
            "usr/local/sbin/slurmd-in-namespace": (helper, 0o755),
            unit: (NAMESPACE.encode(), 0o644),
        })  # fmt: skip
    site.everywhere(
        "systemctl daemon-reload; install -d -o slurm /var/log/slurm /var/spool/slurmctld;"
        "install -d /var/spool/slurmd /var/spool/slurm-tmp /var/spool/site-scratch"
    )
    site.run("ctl", "chown", "slurm:", "/etc/slurm/slurmdbd.conf")


def _start_slurm(site: SiteHosts) -> None:
    """The database first: slurmctld refuses a partition that names a QOS of which it knows nothing."""
    site.run("ctl", "sh", "-ec", _DATABASE)
    site.run("ctl", "systemctl", "restart", "slurmdbd")
    answers = ("sacctmgr", "--noheader", "show", "cluster")
    wait_until("slurmdbd answers", lambda: site.run("ctl", *answers, check=False).returncode == 0, 180)
    site.run("ctl", "sh", "-s", data=(FILES / "accounts.sh").read_text())
    site.run("ctl", "systemctl", "restart", "slurmctld")
    site.at_once({name: ["systemctl", "restart", "slurmd"] for name in NODES})

    def idle() -> bool:
        shown = site.run(
            "portal", "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%t", check=False
        )
        return shown.stdout.split() == ["idle"] * len(NODES)

    wait_until("both nodes are idle", idle, 180)
    # GPUs are a resource that the accounting knows once slurmctld has reported them.
    limit = ("MaxTRESPerUser=gres/gpu=4", "MaxWall=12:00:00")
    site.run("ctl", "sacctmgr", "--immediate", "modify", "qos", "gpu", "set", *limit)


def _serve_own_pages(site: SiteHosts) -> None:
    files = {
        "etc/nginx/sites-enabled/intranet": ((FILES / "etc/nginx/intranet").read_bytes(), 0o644),
        "srv/intranet/index.html": (b"The site's own page.\n", 0o644),
    }
    site.put("portal", files)
    site.run("portal", "rm", "/etc/nginx/sites-enabled/default")
    site.run("portal", "systemctl", "reload-or-restart", "nginx")


def _issue_certificate(site: SiteHosts) -> None:
    """For half a day the same: images hold what their host trusts, and are built anew for another one."""
    files = site.places.cache / "site.pem", site.places.cache / "site.key"
    if not files[0].exists() or time.time() - files[0].stat().st_mtime > 12 * 3600:
        for file, content in zip(files, self_signed(site.description.full_name("portal")), strict=True):
            write_atomically(file, content.decode(), 0o600)
    certificate, key = (file.read_bytes() for file in files)
    for name in site.machines:
        site.put(name, {"usr/local/share/ca-certificates/example.crt": (certificate, 0o644)})
    site.everywhere("update-ca-certificates >/dev/null")
    site.put("portal", {
        "etc/ssl/carme/fullchain.pem": (certificate, 0o644),
        "etc/ssl/private/carme.pem": (key, 0o600),
    })  # fmt: skip


def versions(site: SiteHosts) -> dict[str, str]:
    """What runs there."""
    queries = {
        "debian": ("cat", "/etc/debian_version"),
        "slurm": ("scontrol", "--version"),
        "apptainer": ("apptainer", "--version"),
        "python": ("/usr/bin/python3", "--version"),
        "nginx": ("nginx", "-v"),
    }
    found = {}
    for name, command in queries.items():
        done = site.run("portal", *command)
        found[name] = (done.stdout or done.stderr).strip().split()[-1]
    return found
