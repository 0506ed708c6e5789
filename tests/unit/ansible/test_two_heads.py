"""Two heads in the inventory, and passwords of databases, which are no part of the public configuration."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import carme.config
from carme.heads.promotion import SERVICES

ANSIBLE = Path(__file__).resolve().parents[3] / "ansible"
Playbook = Callable[..., subprocess.CompletedProcess[str]]
# The checks of the role carme, and what is written from its variables, to a folder here.
PLAY = """
- hosts: head
  connection: local
  gather_facts: true
  gather_subset: ["!all", network]
  vars:
    ansible_become: false
  roles: [carme]
  tasks:
    - ansible.builtin.copy:
        dest: "{{ output }}/{{ inventory_hostname }}.json"
        content: "{{ {'toml': lookup('template', template), 'passwords': carme_database_passwords,
          'starts': carme_starts_services} | to_json }}"
"""
TWO: dict[str, Any] = {
    "carme_hub_database": "postgresql://carme-hub@db.example.org/hub",
    "carme_hub_database_password": "of the hub",
    # As inventories had it before passwords had variables of their own.
    "carme_portal_database": "postgresql://carme-portal:p%40ss@db.example.org/portal?sslmode=require",
    "carme_heads_address": "10.1.0.10/24",
    "carme_heads_interface": "eth1",
}


@pytest.fixture
def play(playbook: Playbook, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(heads: int, **settings: Any) -> subprocess.CompletedProcess[str]:
        names = [f"head-{number}.example.org" for number in range(1, heads + 1)]
        groups = {"head": {"hosts": dict.fromkeys(names)}, "compute": {"hosts": {"n1": None}}}
        (tmp_path / "hosts.yml").write_text(json.dumps(groups))
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        (tmp_path / "play.yml").write_text(PLAY)
        template = ANSIBLE / "roles/base/templates/carme.toml.j2"
        places = json.dumps({"output": str(tmp_path), "template": str(template)})
        more = ("-e", f"@{tmp_path / 'settings.json'}", "-e", places)
        return playbook("-i", tmp_path / "hosts.yml", *more, tmp_path / "play.yml")

    return run


def test_both_heads_get_one_configuration_without_passwords(
    play: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = play(2, **TWO)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (
        json.loads((tmp_path / f"head-{number}.example.org.json").read_text()) for number in (1, 2)
    )
    assert first == second
    # Nobody was promoted: carme-head starts the services, once all of it is there.
    assert not first["starts"]
    assert first["passwords"] == {"hub": "of the hub", "portal": "p@ss"}
    assert "p%40ss" not in first["toml"] and "of the hub" not in first["toml"]
    (tmp_path / "carme.toml").write_text(first["toml"])
    settings = carme.config.load(tmp_path / "carme.toml")
    assert settings.heads.names == ["head-1.example.org", "head-2.example.org"]
    assert (settings.heads.address, settings.heads.interface) == ("10.1.0.10/24", "eth1")
    assert settings.hub.listen == "https://10.1.0.10:8081"
    assert settings.portal.database == "postgresql://carme-portal@db.example.org/portal?sslmode=require"


@pytest.mark.parametrize(
    ("heads", "changes", "sentence"),
    [
        (3, {}, "The inventory group 'head' has 3 hosts"),
        (2, {"carme_hub_database": "sqlite:////var/lib/carme/hub/hub.sqlite"}, "are not both on"),
        (2, {"carme_portal_database": "postgresql:///carme-portal"}, "are not both on"),
        (2, {"carme_heads_address": ""}, "no address leads to the active one"),
        (2, {"carme_heads_address": "10.1.0.10"}, "with the length of its prefix"),
    ],
)
def test_what_two_heads_lack_is_reported_before_anything_is_changed(
    play: Callable[..., subprocess.CompletedProcess[str]], heads: int, changes: dict[str, str], sentence: str
) -> None:
    done = play(heads, **{**TWO, **changes})
    assert done.returncode != 0 and sentence in " ".join(done.stdout.split()), done.stdout


def test_one_head_starts_its_services_itself(
    play: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = play(1, carme_head_address="10.1.0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    only = json.loads((tmp_path / "head-1.example.org.json").read_text())
    assert only["starts"] and "[heads]" not in only["toml"]


def test_the_role_binds_what_carme_head_starts() -> None:
    values = yaml.safe_load((ANSIBLE / "roles/heads/vars/main.yml").read_text())
    assert [f"{name}.service" for name in values["heads_services"]] == list(SERVICES)
