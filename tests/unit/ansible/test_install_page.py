"""The worked examples of docs/admins/install.md: what they name is there, and each makes a whole site."""

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from install_page import COMMANDS, FILES, commands, hook_line

import carme.config

from .conftest import ANSIBLE, Playbook

#: Ansible's own, and those of hosts that the role slurm_common asks for.
KNOWN = {"ansible_user", "ansible_become", "slurm_node_cpus", "slurm_node_memory_mb"}
PLAYS: list[dict[str, Any]] = yaml.safe_load((ANSIBLE / "site.yml").read_text())


def defaults() -> set[str]:
    files = ANSIBLE.glob("roles/*/defaults/main.yml")
    return {name for file in files for name in yaml.safe_load(file.read_text()) or {}}


def variables(hosts: dict[str, Any]) -> set[str]:
    """All variables that an inventory sets."""
    found = set[str]()
    for group in hosts.values():
        found |= set(group.get("vars", {}))
        found |= {name for host in group.get("hosts", {}).values() for name in host or {}}
    return found


def tags(node: Any) -> set[str]:
    if isinstance(node, list):
        return {tag for child in node for tag in tags(child)}
    if not isinstance(node, dict):
        return set()
    own = node.get("tags", [])
    return {*([own] if isinstance(own, str) else own), *tags(node.get("roles", []))}


def test_both_examples_are_there() -> None:
    assert {name: set(files) for name, files in FILES.items()} == {
        "own-slurm": {"hosts.yml", "group_vars/all.yml"},
        "new": {"hosts.yml", "group_vars/all.yml"},
    }


@pytest.mark.parametrize("name", FILES)
def test_every_group_and_variable_exists(name: str) -> None:
    hosts = yaml.safe_load(FILES[name]["hosts.yml"])
    groups = {group for play in PLAYS for group in play["hosts"].split(":")} | {"postgresql", "monitoring"}
    assert set(hosts) - {"all"} <= groups and {"head", "compute"} <= set(hosts)
    assert len(hosts["head"]["hosts"]) == 1
    assert any(group.startswith("slurm_") for group in hosts) == (name == "new")
    used = variables(hosts) | set(yaml.safe_load(FILES[name]["group_vars/all.yml"]))
    assert used <= defaults() | KNOWN


def test_every_command_names_existing_files_and_checks_come_first() -> None:
    assert COMMANDS
    known = tags(PLAYS) | {"images"}
    for command in COMMANDS:
        words = command.split()
        assert words[1] == "-i" and words[2].removeprefix("inventories/") in FILES, command
        assert (ANSIBLE / words[3]).exists(), command
        for option, value in itertools.pairwise(words):
            if option in ("--tags", "--skip-tags"):
                assert set(value.split(",")) <= known, command
            if option == "-e":
                assert value.partition("=")[0] in defaults(), command
    for name in FILES:
        own = commands(name)
        assert "site.yml --tags precheck" in own[0] and "validate.yml" in own[-1]


@pytest.mark.parametrize("name", FILES)
def test_an_example_has_two_users_for_the_check(name: str) -> None:
    """The check signs in as users who are not administrators, and two show that they are kept apart."""
    users = yaml.safe_load(FILES[name]["group_vars/all.yml"])["carme_users"]
    assert len([user for user in users if not user.get("admin")]) >= 2


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_a_sites_own_hooks_work_without_carme(hook: str, tmp_path: Path) -> None:
    """Before it is installed and after it was removed a call that failed would drain the node."""
    own = tmp_path / "own"
    own.write_text("set -e\n" + hook_line(hook).replace("/usr/libexec/carme", str(tmp_path)) + "\n")

    def code() -> int:
        return subprocess.run(["sh", own], check=False).returncode

    assert code() == 0
    (tmp_path / hook).write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / hook).chmod(0o755)
    assert code() == (1 if hook == "prolog" else 3)


#: The checks of the role carme, the site's configuration, and the broker's unit.
PLAY = """
- hosts: head
  connection: local
  gather_facts: false
  vars:
    ansible_become: false
  roles:
    - carme
  tasks:
    - ansible.builtin.copy:
        dest: "{{ output }}/carme.toml"
        content: "{{ lookup('template', roles ~ '/base/templates/carme.toml.j2') }}"
      vars:
        ansible_facts: {os_family: Debian}
    - ansible.builtin.include_vars: "{{ roles }}/broker/defaults/main.yml"
    - ansible.builtin.copy:
        dest: "{{ output }}/carme-broker.service"
        content: "{{ lookup('template', roles ~ '/broker/templates/carme-broker.service.j2') }}"
      vars:
        ansible_facts: {os_family: Debian}
        base_revision: x
        broker_slurm_facts: []
"""


@pytest.mark.parametrize("name", FILES)
def test_an_example_makes_a_whole_site(name: str, playbook: Playbook, tmp_path: Path) -> None:
    inventory = tmp_path / name
    for file, text in FILES[name].items():
        (inventory / file).parent.mkdir(parents=True, exist_ok=True)
        (inventory / file).write_text(text)
    play = tmp_path / "play.yml"
    play.write_text(PLAY)
    places = ["-e", f"output={tmp_path}", "-e", f"roles={ANSIBLE / 'roles'}"]
    places += ["-e", '{"carme_homes": ["/users"]}']
    done = playbook("-i", inventory, *places, play)
    assert done.returncode == 0, done.stdout + done.stderr
    unit = (tmp_path / "carme-broker.service").read_text()
    # Homes may lie elsewhere, and the broker makes jobs' folders there.
    assert re.search(r"^ReadWritePaths=/var/log/carme /users\b", unit, re.MULTILINE)
    site = carme.config.load(tmp_path / "carme.toml")
    values = yaml.safe_load(FILES[name]["group_vars/all.yml"])
    assert (site.site.url, site.slurm.cluster) == (values["carme_site_url"], values["carme_cluster"])
    # Where the site runs its own Slurm each user's own account pays.
    assert site.slurm.default_account == (None if name == "own-slurm" else "carme")
