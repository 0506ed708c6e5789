"""Sites that site.yml makes of new hosts, Slurm too: the demo's inventory, with what differs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from carme.validation import Visitor
from carme_demo.settings import write_atomically

from .site_hosts import ADMIN, ANSIBLE, SiteDescription
from .site_run import Run, SiteRun

#: As the demo has them, for hosts with two simulated GPUs each.
GPUS = [{"type": "a100", "devices": ["/dev/nvidia0", "/dev/nvidia1"]}]


@dataclass
class WholeSite(SiteRun):
    """A site with the demo's inventory.

    Attributes:
        passwords: of users, and of whatever else the site gives one.
        url: what users type.
        served: the host that has the portal's certificate.
    """

    passwords: Mapping[str, str]
    url: str
    served: str

    def run_playbook(self, step: str, *options: str, playbook: str = "site.yml") -> Run:
        """Run one of the playbooks, as the site's administrator does."""
        return self.play(step, ["-i", str(self.site.places.state / "inventory"), playbook, *options])

    @contextlib.contextmanager
    def browser(self) -> Iterator[Visitor]:
        """A browser, on the machine that runs the tests, in which nobody is signed in."""
        certificate = self.site.places.state / "site.pem"
        certificate.write_text(self.site.run(self.served, "cat", "/etc/carme/tls/site.pem").stdout)
        with Visitor(self.url, str(certificate)) as visitor:
            yield visitor

    @contextlib.contextmanager
    def visitor(self, user: str) -> Iterator[Visitor]:
        """The browser of a user who is signed in."""
        with self.browser() as visitor:
            visitor.login(user, self.passwords[user])
            yield visitor


def write_inventory(
    folder: Path,
    description: SiteDescription,
    groups: Mapping[str, tuple[str, ...]],
    changes: Mapping[str, Any],
) -> None:
    """Write the demo's inventory for other hosts, reached by ssh.

    Args:
        folder: takes hosts.yml and group_vars.
        description: the hosts.
        groups: hosts by the inventory's groups.
        changes: variables that differ from the demo's.
    """
    values: dict[str, Any] = yaml.safe_load((ANSIBLE / "inventories/demo/group_vars/all.yml").read_text())
    values |= {"ansible_become": True, "ansible_user": ADMIN, "slurm_node_gpus": GPUS} | dict(changes)
    names = [machine.name for machine in description.machines()]
    hosts = {name: {"ansible_host": description.full_name(name)} for name in names}
    members = {name: {"hosts": dict.fromkeys(found)} for name, found in groups.items()}
    (folder / "group_vars").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "hosts.yml", yaml.safe_dump({"all": {"hosts": hosts}, **members}), 0o600)
    write_atomically(folder / "group_vars/all.yml", yaml.safe_dump(values), 0o600)
