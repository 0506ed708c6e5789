"""The worked example "your own Slurm" of docs/admins/install.md, followed on the hosts of a site.

Files, commands and lines come from the page. Numbers are changed, as the page asks its readers to, and what
these hosts cannot have: images with CUDA, and a file that could not be removed with its host.
"""

from __future__ import annotations

import json
import secrets
import shlex
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import install_page
import yaml

from carme.validation import Visitor
from carme_demo.settings import write_atomically

from .site_hosts import SiteHosts

NAME = "own-slurm"
ALL = "group_vars/all.yml"


class Example:
    """The example's inventory, and its commands."""

    def __init__(self, site: SiteHosts) -> None:
        self.site = site
        self.folder = site.places.state / "inventory"
        self.values: dict[str, Any] = yaml.safe_load(install_page.FILES[NAME][ALL])
        self._passwords = site.places.state / "passwords.json"
        known = self._passwords.exists()
        self.passwords: dict[str, str] = json.loads(self._passwords.read_text()) if known else {}

    def write(self, **changes: Any) -> None:
        """Write the inventory of the page, with changed values of group_vars/all.yml."""
        self.values |= changes
        for file, text in install_page.FILES[NAME].items():
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(self.values) if file == ALL else text)
            path.chmod(0o600)

    def with_passwords(self) -> list[dict[str, Any]]:
        """The page's users; those who are not administrators get passwords, to check the site with."""
        users = []
        for user in self.values["carme_users"]:
            self.passwords.setdefault(user["name"], secrets.token_urlsafe(12))
            known = {} if user.get("admin") else {"password": self.passwords[user["name"]]}
            users.append(user | known)
        write_atomically(self._passwords, json.dumps(self.passwords), 0o600)
        return users

    def commands(self, playbook: str) -> list[list[str]]:
        """The page's commands for a playbook, each as arguments of `ansible-playbook`."""
        found = []
        for command in install_page.commands(NAME):
            words = shlex.split(command)[1:]
            words[words.index(f"inventories/{NAME}")] = str(self.folder)
            # Nobody is there to type it: the password of sudo is in a file.
            words.remove("--ask-become-pass")
            if playbook in words:
                found.append(words)
        return found

    def add_administrator(self) -> None:
        """The account that the page makes by hand; its password is read from standard input."""
        (line,) = {line for line in install_page.PAGE.splitlines() if line.endswith("add-user ada --admin")}
        words = shlex.split(line)
        self.site.run("portal", *words, data=self.passwords["ada"] + "\n")

    @contextmanager
    def visitor(self, user: str) -> Iterator[Visitor]:
        """A browser of a user, on the machine that runs the tests."""
        name = self.site.description.full_name("portal")
        certificate = self.site.places.state / "site.pem"
        shown = self.site.run("portal", "cat", self.values["reverse_proxy_certificate"])
        certificate.write_text(shown.stdout)
        with (
            resolved(name, self.site.machines["portal"].address),
            Visitor(self.values["carme_site_url"], str(certificate)) as visitor,
        ):
            visitor.login(user, self.passwords[user])
            yield visitor


@contextmanager
def resolved(name: str, address: str) -> Iterator[None]:
    """Let this process know a host's address, which no name service here does."""
    original = socket.getaddrinfo

    def known(host: Any, *arguments: Any, **options: Any) -> Any:
        return original(address if host in (name, name.encode()) else host, *arguments, **options)

    socket.getaddrinfo = known
    try:
        yield
    finally:
        socket.getaddrinfo = original


def findings(output: str) -> str:
    """What the look has shown, on one line."""
    return " ".join(output.split())


def append_hooks(site: SiteHosts, folder: str) -> None:
    """What the page asks for: the site's own prolog and epilog call Carme's."""
    for host in site.machines:
        for hook in ("prolog", "epilog"):
            line = install_page.hook_line(hook)
            site.run(host, "tee", "--append", f"{folder}/{hook}", data=line + "\n")


def hide_processes(site: SiteHosts, hosts: Iterable[str]) -> None:
    """What docs/admins/security.md asks for once Carme is installed: /proc hides the processes of others."""
    line, command = install_page.processes_line(), install_page.processes_command()
    for host in hosts:
        site.run(host, "tee", "--append", "/etc/fstab", data=line + "\n")
        site.run(host, *shlex.split(command))


def leave_exporters_group(site: SiteHosts, hosts: Iterable[str]) -> None:
    """What docs/admins/remove.md asks for: the group of Carme's exporter goes, and /etc/fstab names it."""
    line = install_page.processes_line()
    script = 'sed --in-place "s|^$1$|$2|" /etc/fstab'
    for host in hosts:
        site.run(host, "sh", "-ec", script, "sh", line, line.replace(install_page.EXPORTERS_GROUP, ""))
