"""Sites that have a Slurm of their own, configured by files written by hand, before Carme comes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from certificates import self_signed

from carme_demo import registries
from carme_demo.settings import write_atomically

from .site_hosts import ANSIBLE, SiteDescription, SiteHosts, wait_until

#: Files of the site existing-22.05. Other sites have the same with their own addresses, but those of their
#: own folder.
FILES = Path(__file__).with_name("existing-22.05")
NETWORK = "10.78.0."
HOSTS = (("portal", 2, 0), ("ctl", 3, 0), ("gpu-01", 11, 2), ("gpu-02", 12, 2))
SHARED = {"home": "/data/home", "scratch": "/scratch", "images": "/srv/carme/images"}
NODES = ("gpu-01", "gpu-02")
USERS = {"ada": 3001, "grace": 3002, "alan": 3003}
APPTAINER = "/var/cache/apt/archives/apptainer-site.deb"
#: Days for which the site's certificate is good. Images hold what their host trusts, and their layers are
#: built anew for another certificate: it stays the same for two thirds of these days.
CERTIFICATE_DAYS = 30
#: Slurm's service of a host that is a container: job_container/tmpfs needs an old mount namespace there.
NAMESPACE = """[Service]
ExecStart=
ExecStart=/usr/local/sbin/slurmd-in-namespace /usr/sbin/slurmd {options} $SLURMD_OPTIONS
"""
_INSTALL = """
export DEBIAN_FRONTEND=noninteractive
{before}
apt-get -q update
{installs}
"""
_PACKAGES = "apt-get -q install --yes --no-install-recommends"
#: Makes a directory of what a file says, and serves it.
_DIRECTORY = """
systemctl stop slapd
systemctl disable --quiet slapd
chown root:openldap /etc/ldap/directory.key
install -d -m 0700 /var/lib/directory
slapadd -f /etc/ldap/slapd.conf -l /etc/ldap/people.ldif
chown -R openldap: /var/lib/directory
systemctl daemon-reload
systemctl enable --quiet --now directory
"""
_DATABASE = """
systemctl start mariadb
mysql -e "CREATE DATABASE slurm_acct_db; CREATE USER slurm@localhost IDENTIFIED VIA unix_socket;
          GRANT ALL ON slurm_acct_db.* TO slurm@localhost"
"""


@dataclass(frozen=True)
class ExistingSlurm:
    """A site with a Slurm of its own.

    Args:
        name: as `./test sites` has it; files of the folder of this name go before those of existing-22.05.
        slurm: what its version begins with.
        description: its hosts.
        packages: what its administrators install beyond the image, by host and by call of apt-get.
        before: root's shell commands on each host before its packages are installed.
        own_apptainer: whether the administrators install Apptainer before Carme comes.
        variables: of group_vars/all.yml, other than those of install.md.
        renamed: settings that this version of Slurm calls otherwise than 22.05, as lines.
        slurmd: the options with which the service of its package runs slurmd.
        directory: the host whose LDAP server knows the users, which all hosts ask by SSSD; empty: each host
            has accounts of its own.
    """

    name: str
    slurm: str
    description: SiteDescription
    packages: Mapping[str, tuple[str, ...]]
    before: str = ""
    own_apptainer: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    slurmd: str = "-D -s"
    directory: str = ""

    def files(self, folder: str) -> dict[str, bytes]:
        """The site's files of a folder, by their names, with the site's own addresses."""
        found: dict[str, Path] = {}
        for place in (FILES, FILES.with_name(self.name)):
            if (place / folder).is_dir():
                found |= {file.name: file for file in sorted((place / folder).iterdir()) if file.is_file()}
        base = f"{self.description.subnet.rpartition('.')[0]}."
        contents = {name: file.read_text() for name, file in found.items()}
        for old, new in {NETWORK: base, **self.renamed}.items():
            contents = {name: text.replace(old, new) for name, text in contents.items()}
        return {name: text.encode() for name, text in contents.items()}

    def set_up(self, site: SiteHosts) -> None:
        """Bring the hosts to the state in which their administrators read Carme's documentation."""
        self._install_packages(site)
        if self.directory:
            self._serve_directory(site)
        else:
            _make_users(site)
        _make_homes(site)
        _distribute_munge_key(site)
        self._configure_slurm(site)
        self._start_slurm(site)
        self._serve_own_pages(site)
        _issue_certificate(site)

    def _install_packages(self, site: SiteHosts) -> None:
        if self.own_apptainer:
            _make_apptainer_package(site)
        commands = {}
        for name, calls in self.packages.items():
            if self.own_apptainer and name != "ctl":
                calls = (*calls, f"squashfuse {APPTAINER}")
            installs = "\n".join(f"{_PACKAGES} {packages}" for packages in calls)
            commands[name] = ["sh", "-ec", _INSTALL.format(before=self.before, installs=installs)]
        site.at_once(commands)

    def _serve_directory(self, site: SiteHosts) -> None:
        """The users are those of a directory: no host has them in its own files."""
        name = site.description.full_name(self.directory)
        certificate, key = _certificate_of(site, name, "directory")
        files = {f"etc/ldap/{name}": (content, 0o644) for name, content in self.files("etc/ldap").items()}
        files |= {"etc/ldap/directory.pem": (certificate, 0o644), "etc/ldap/directory.key": (key, 0o640)}
        unit = "etc/systemd/system"
        files |= {f"{unit}/{name}": (content, 0o644) for name, content in self.files(unit).items()}
        site.put(self.directory, files)
        site.run(self.directory, "sh", "-ec", _DIRECTORY)
        asks = {
            "usr/local/share/ca-certificates/directory.crt": (certificate, 0o644),
            "etc/sssd/sssd.conf": (self.files("etc/sssd")["sssd.conf"], 0o600),
        }
        for host in site.machines:
            site.put(host, asks)
        site.everywhere("update-ca-certificates >/dev/null; systemctl restart sssd")
        query = ("getent", "passwd", *USERS)
        for host in site.machines:
            wait_until(
                f"{host} knows the users",
                lambda host=host: site.run(host, *query, check=False).returncode == 0, 180,
            )  # fmt: skip

    def _configure_slurm(self, site: SiteHosts) -> None:
        files = {}
        for name, content in self.files("etc/slurm").items():
            files[f"etc/slurm/{name}"] = (content, 0o755 if content.startswith(b"#!") else 0o644)
        database = files.pop("etc/slurm/slurmdbd.conf")
        for name in site.machines:
            site.put(name, files)
        site.put("ctl", {"etc/slurm/slurmdbd.conf": (database[0], 0o600)})
        helper = (ANSIBLE / "roles/slurm_node/files/carme-slurmd").read_bytes()
        for name in NODES:
            unit = "etc/systemd/system/slurmd.service.d/namespace.conf"
            site.put(name, {
                "usr/local/sbin/slurmd-in-namespace": (helper, 0o755),
                unit: (NAMESPACE.format(options=self.slurmd).encode(), 0o644),
            })  # fmt: skip
        site.everywhere(
            "systemctl daemon-reload; install -d -o slurm /var/log/slurm /var/spool/slurmctld;"
            "install -d /var/spool/slurmd /var/spool/slurm-tmp /var/spool/site-scratch"
        )
        site.run("ctl", "chown", "slurm:", "/etc/slurm/slurmdbd.conf")

    def _start_slurm(self, site: SiteHosts) -> None:
        """The database first: slurmctld refuses a partition that names a QOS it does not know."""
        site.run("ctl", "sh", "-ec", _DATABASE)
        site.run("ctl", "systemctl", "restart", "slurmdbd")
        answers = ("sacctmgr", "--noheader", "show", "cluster")
        wait_until("slurmdbd answers", lambda: site.run("ctl", *answers, check=False).returncode == 0, 180)
        site.run("ctl", "sh", "-s", data=self.files("")["accounts.sh"].decode())
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

    def _serve_own_pages(self, site: SiteHosts) -> None:
        files = {
            "etc/nginx/sites-enabled/intranet": (self.files("etc/nginx")["intranet"], 0o644),
            "srv/intranet/index.html": (b"The site's own page.\n", 0o644),
        }
        site.put("portal", files)
        site.run("portal", "rm", "/etc/nginx/sites-enabled/default")
        site.run("portal", "systemctl", "reload-or-restart", "nginx")


def _make_apptainer_package(site: SiteHosts) -> None:
    script = (FILES / "apptainer-deb.sh").read_text()
    site.run("portal", "sh", "-s", registries.of_host().mirror, APPTAINER, data=script, timeout=1800)
    package = site.places.cache / "apt/portal" / Path(APPTAINER).name
    for name in NODES:
        target = site.places.cache / "apt" / name / package.name
        target.unlink(missing_ok=True)
        os.link(package, target)


def _make_users(site: SiteHosts) -> None:
    for name, uid in USERS.items():
        site.everywhere(
            f"useradd --uid {uid} --user-group --shell /bin/bash --home-dir /data/home/{name} {name}"
        )


def _make_homes(site: SiteHosts) -> None:
    for name in USERS:
        site.run("portal", "install", "-d", f"--owner={name}", f"--group={name}", "-m", "0700",
                 f"/data/home/{name}")  # fmt: skip
    site.run("portal", "chmod", "1777", "/scratch")


def _distribute_munge_key(site: SiteHosts) -> None:
    key = os.urandom(1024)
    for name in site.machines:
        site.put(name, {"etc/munge/munge.key": (key, 0o400)})
    site.everywhere("chown munge: /etc/munge/munge.key; systemctl restart munge")


def _certificate_of(site: SiteHosts, host: str, name: str) -> tuple[bytes, bytes]:
    """The certificate that a host has, and its key: those of an earlier run, as long as they are good.

    Args:
        host: its full name.
        name: of the files in the site's cache.
    """
    files = site.places.cache / f"{name}.pem", site.places.cache / f"{name}.key"
    if not files[0].exists() or time.time() - files[0].stat().st_mtime > CERTIFICATE_DAYS / 1.5 * 86400:
        for file, content in zip(files, self_signed(host, CERTIFICATE_DAYS), strict=True):
            write_atomically(file, content.decode(), 0o600)
    return files[0].read_bytes(), files[1].read_bytes()


def _issue_certificate(site: SiteHosts) -> None:
    certificate, key = _certificate_of(site, site.description.full_name("portal"), "certificate")
    for name in site.machines:
        site.put(name, {"usr/local/share/ca-certificates/example.crt": (certificate, 0o644)})
    site.everywhere("update-ca-certificates >/dev/null")
    site.put("portal", {
        "etc/ssl/carme/fullchain.pem": (certificate, 0o644),
        "etc/ssl/private/carme.pem": (key, 0o600),
    })  # fmt: skip


def versions(site: SiteHosts) -> dict[str, str]:
    """What runs there, without what is not there yet."""
    queries = {
        "debian": ("cat", "/etc/debian_version"),
        "slurm": ("scontrol", "--version"),
        "apptainer": ("apptainer", "--version"),
        "python": ("/usr/bin/python3", "--version"),
        "nginx": ("nginx", "-v"),
    }
    found = {}
    for name, command in queries.items():
        done = site.run("portal", *command, check=False)
        if done.returncode == 0:
            found[name] = (done.stdout or done.stderr).strip().split()[-1]
    return found
