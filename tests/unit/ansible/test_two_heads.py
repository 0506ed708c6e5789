"""Two heads in the inventory, and passwords of databases, which are not part of the public configuration."""

import grp
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import carme.config
from carme.heads.promotion import SERVICES

from .conftest import ANSIBLE, FACTS, REFUSALS, Playbook, show, shown

# What is read of the role's variables.
VALUES = (
    "{'toml': lookup('template', template), 'passwords': carme_database_passwords, 'readers': readers, "
    "'starts': carme_starts_services, 'enables': carme_enables_services, 'head': carme_head}"
)
TWO: dict[str, Any] = {
    "carme_hub_database": "postgresql://carme-hub@db.example.org/hub",
    "carme_hub_database_password": "of the hub",
    # As inventories had it before passwords had variables of their own.
    "carme_portal_database": "postgresql://carme-portal:p%40ss@db.example.org/portal?sslmode=require",
    "carme_heads_address": "10.1.0.10/24",
    "carme_heads_interface": "eth1",
    "carme_site_url": "https://carme.example.org",
}


def names_of(heads: int) -> list[str]:
    return [f"head-{number}.example.org" for number in range(1, heads + 1)]


def play_of(**more: Any) -> dict[str, Any]:
    """The checks of the role carme, on the heads."""
    local = {"hosts": "head", "connection": "local", "gather_facts": False, "roles": ["carme"]}
    return local | more


@pytest.fixture
def play(playbook: Playbook, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the checks of the role carme for so many heads, and shows VALUES."""

    def run(
        heads: int, *options: str, gathers: bool = False, plays: list[Any] | None = None, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        groups = {"head": {"hosts": dict.fromkeys(names_of(heads))}, "compute": {"hosts": {"n1": None}}}
        (tmp_path / "hosts.yml").write_text(json.dumps(groups))
        facts = {} if gathers else {"ansible_facts": FACTS}
        whole = {"ansible_become": False, **facts, **settings}
        (tmp_path / "settings.json").write_text(json.dumps(whole))
        alone = play_of(gather_facts=gathers, gather_subset=["!all", "network"], tasks=[show(VALUES)])
        (tmp_path / "play.yml").write_text(json.dumps(plays or [alone]))
        template = ANSIBLE / "roles/base/templates/carme.toml.j2"
        exporter = yaml.safe_load((ANSIBLE / "roles/node_exporter/defaults/main.yml").read_text())
        places = json.dumps(
            {
                "template": str(template),
                "readers": exporter["node_exporter_readers"],
                "node_exporter_address": "10.1.0.21",
            }
        )
        more = ("-e", f"@{tmp_path / 'settings.json'}", "-e", places)
        return playbook("-i", tmp_path / "hosts.yml", *more, *options, tmp_path / "play.yml")

    return run


def test_both_heads_get_one_configuration_without_passwords(
    play: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    found = shown(play(2, gathers=True, **TWO))
    (first,), (second,) = (found[name] for name in names_of(2))
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


REFUSED = [
    ({"carme_hub_database": "sqlite:////var/lib/carme/hub/hub.sqlite"}, "are not both on"),
    ({"carme_portal_database": "postgresql:///carme-portal"}, "are not both on"),
    ({"carme_heads_address": ""}, "no address leads to the active one"),
    ({"carme_heads_address": "10.1.0.10"}, "with the length of its prefix"),
]


def test_what_two_heads_lack_is_reported(play: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """All in one run, in which each refusal is caught."""
    checks = [{"ansible.builtin.import_role": {"name": "carme"}}]
    cases = [
        {"vars": {**TWO, **changes}, "block": checks, "rescue": [show(REFUSALS)]} for changes, _ in REFUSED
    ]
    plays = [play_of(hosts="head[0]", roles=[], tasks=cases)]
    found = shown(play(2, plays=plays, carme_site_url=TWO["carme_site_url"]))["head-1.example.org"]
    for (message,), (changes, sentence) in zip(found, REFUSED, strict=True):
        assert sentence in message, changes


@pytest.mark.parametrize(
    ("heads", "left_out", "sentence"),
    [
        (3, "", "The inventory group 'head' has 3 hosts"),
        (2, "carme_site_url", "carme_site_url is not set"),
    ],
)
def test_a_refusal_ends_the_run(
    play: Callable[..., subprocess.CompletedProcess[str]], heads: int, left_out: str, sentence: str
) -> None:
    done = play(heads, **{name: value for name, value in TWO.items() if name != left_out})
    assert done.returncode != 0 and sentence in " ".join(done.stdout.split()), done.stdout


def test_one_head_starts_its_services_itself(play: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ((only,),) = shown(play(1, carme_head_address="10.1.0.2")).values()
    assert only["starts"] and only["enables"] and "[heads]" not in only["toml"]


def test_a_head_that_awaits_a_backup_starts_nothing_on_an_empty_database(
    play: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = play(1, "-e", "carme_awaits_restore=true", carme_head_address="10.1.0.2")
    ((only,),) = shown(done).values()
    assert (only["starts"], only["enables"]) == (False, False)


def test_the_role_binds_what_carme_head_starts() -> None:
    values = yaml.safe_load((ANSIBLE / "roles/heads/vars/main.yml").read_text())
    assert [f"{name}.service" for name in values["heads_services"]] == list(SERVICES)


PASSWORDS = {"p%40ss": "p@ss", "a+b": "a+b", "a/b": "a/b", "a#b": "a#b", "a?b:c": "a?b:c"}
UNREADABLE = {
    "postgresql://hub:a@b@db/hub": "write @ in a password as %40",
    "postgresql://hub@db/hub?password=secret": "holds a password in a form",
}


def test_passwords_leave_addresses_as_sqlalchemy_reads_them(
    play: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    checked = [{"ansible.builtin.import_role": {"name": "carme"}}, show(VALUES)]
    cases = [
        {"vars": {"carme_hub_database": f"postgresql://hub:{written}@db:5432/hub"}, "block": checked}
        for written in PASSWORDS
    ]
    refused = [
        {"vars": {"carme_hub_database": written}, "block": checked, "rescue": [show(REFUSALS)]}
        for written in UNREADABLE
    ]
    done = play(1, plays=[play_of(roles=[], tasks=[*cases, *refused])], carme_head_address="10.1.0.2")
    (answers,) = shown(done).values()
    found, refusals = answers[: len(cases)], answers[len(cases) :]
    for (message,), sentence in zip(refusals, UNREADABLE.values(), strict=True):
        assert sentence in message
    assert [values["passwords"] for values in found] == [
        {"hub": password, "portal": ""} for password in PASSWORDS.values()
    ]
    assert all('database = "postgresql://hub@db:5432/hub"' in values["toml"] for values in found)


def test_the_second_head_is_requested_where_the_first_does_not_answer(
    play: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    program = tmp_path / "venv/bin/carme-head"
    program.parent.mkdir(parents=True)
    # Both heads are this host here: the first call fails, the second answers.
    program.write_text(
        f"#!/bin/sh\nif mkdir {tmp_path}/called 2>/dev/null; then exit 1; fi\n"
        """echo '{"active": "head-2.example.org"}'\n"""
    )
    program.chmod(0o755)
    found = shown(play(2, **TWO, carme_venv=str(tmp_path / "venv")))
    for name, starts in zip(names_of(2), (False, True), strict=True):
        assert [(seen["head"], seen["starts"]) for seen in found[name]] == [("head-2.example.org", starts)]


def test_heads_that_cannot_be_reached_stop_the_run(playbook: Playbook, tmp_path: Path) -> None:
    unreachable = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    groups = {
        "head": {"hosts": {"head-1": unreachable, "head-2": unreachable}},
        "compute": {"hosts": {"n1": {"ansible_connection": "local"}}},
    }
    (tmp_path / "hosts.yml").write_text(json.dumps(groups))
    (tmp_path / "settings.json").write_text(json.dumps({**TWO, "ansible_become": False}))
    (tmp_path / "play.yml").write_text("- hosts: n1\n  gather_facts: false\n  roles: [carme]\n")
    settings = ("-e", f"@{tmp_path / 'settings.json'}")
    done = playbook("-i", tmp_path / "hosts.yml", *settings, tmp_path / "play.yml")
    assert done.returncode != 0 and "No head answers" in " ".join(done.stdout.split()), done.stdout
    named = playbook(
        "-i", tmp_path / "hosts.yml", *settings, "-e", "carme_active_head=head-2", tmp_path / "play.yml"
    )
    assert named.returncode == 0, named.stdout + named.stderr


def test_an_exporter_knows_the_readers_of_a_head_that_is_left_out(
    play: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    # Facts that are given would be those of the other one, too.
    done = play(2, "--limit", "!head-1.example.org", gathers=True, **TWO, ansible_host="10.1.0.7")
    readers = shown(done)["head-2.example.org"][0]["readers"]
    assert readers[0] == "10.1.0.10" and "10.1.0.7" in readers


@pytest.mark.parametrize("heads", [1, 2])
def test_a_head_may_read_from_each_of_its_addresses(
    play: Callable[..., subprocess.CompletedProcess[str]], heads: int
) -> None:
    """To nodes in another network it comes from its address there."""
    facts = {"default_ipv4": {"address": "10.1.0.5"}, "all_ipv4_addresses": ["10.9.0.5", "10.1.0.5"]}
    extra = TWO if heads == 2 else {"carme_head_address": "10.1.0.5"}
    readers = shown(play(heads, **extra, ansible_facts=facts))["head-1.example.org"][0]["readers"]
    assert readers == [*(["10.1.0.10"] if heads == 2 else []), "10.1.0.5", "10.9.0.5"]


@pytest.mark.parametrize("role", ["heads/tasks/one.yml", "removal/tasks/main.yml"])
def test_the_key_of_the_other_head_goes(role: str) -> None:
    two = yaml.safe_load((ANSIBLE / "roles/heads/tasks/two.yml").read_text())
    line = next(t for t in two if t["name"].startswith("Let the other head read"))[
        "ansible.builtin.lineinfile"
    ]["line"]
    written = line.replace("{{ heads_key }}", "ssh-ed25519 AAAA carme-head head-2.example.org")
    tasks = yaml.safe_load((ANSIBLE / "roles" / role).read_text())
    gone = next(t["ansible.builtin.lineinfile"] for t in tasks if "ansible.builtin.lineinfile" in t)
    assert gone["state"] == "absent" and re.search(gone["regexp"], written)
    assert not re.search(gone["regexp"], "ssh-ed25519 AAAA admin@carme-head")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes files that belong to root")
def test_passwords_that_the_inventory_no_longer_has_go(playbook: Playbook, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for part in ("hub", "portal"):
        (secrets / f"{part}-database-password").write_text("old\n")
    group = grp.getgrgid(os.getgid()).gr_name
    settings = {
        "ansible_become": False,
        "carme_secrets_directory": str(secrets),
        "carme_database_passwords": {"hub": "new", "portal": ""},
        "carme_hub_account": group,
        "carme_portal_account": group,
        "carme_group": group,
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    tasks = ANSIBLE / "roles/secrets/tasks/databases.yml"
    (tmp_path / "play.yml").write_text(
        f"- hosts: localhost\n  gather_facts: false\n  tasks:\n    - ansible.builtin.include_tasks: {tasks}\n"
        "    - ansible.builtin.assert:\n"
        "        that: secrets_passwords is changed and secrets_passwords_gone is changed\n"
    )
    done = playbook(
        "-i", "localhost,", "-c", "local", "-e", f"@{tmp_path / 'settings.json'}", tmp_path / "play.yml"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in secrets.iterdir()] == ["hub-database-password"]


@pytest.mark.parametrize(
    ("program", "none_active"),
    [("echo '{\"active\": null}'", "True"), ('echo \'{"active": "head-2"}\'', "False"), ("exit 1", None)],
)
def test_only_an_answer_shows_that_no_head_was_promoted(
    playbook: Playbook, tmp_path: Path, program: str, none_active: str | None
) -> None:
    (tmp_path / "carme-head").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "carme-head").chmod(0o755)
    two = yaml.safe_load((ANSIBLE / "roles/heads/tasks/two.yml").read_text())
    names = ("Ask which head is active", "Note whether none ever was")
    tasks = [task for task in two if task["name"] in names]
    tasks.append({"ansible.builtin.debug": {"msg": "none active: {{ heads_none_active }}"}})
    variables = {
        "heads_program": str(tmp_path / "carme-head"),
        "carme_configuration": "x",
        "ansible_become": False,
    }
    play = {"hosts": "localhost", "gather_facts": False, "vars": variables, "tasks": tasks}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    done = playbook("-i", "localhost,", "-c", "local", tmp_path / "play.yml")
    assert (done.returncode == 0) == (none_active is not None), done.stdout
    assert none_active is None or f"none active: {none_active}" in done.stdout
    stopped = next(task for task in two if task["name"].startswith("Stop services"))
    promoted = next(task for task in two if task["name"].startswith("Make the first head"))
    assert all("heads_none_active" in task["when"] for task in (stopped, promoted))


def test_validation_expects_services_of_the_active_head_alone(playbook: Playbook, tmp_path: Path) -> None:
    names = ["head-1.example.org", "head-2.example.org", "n1", "db"]
    groups = {"head": names[:2], "compute": names[2:3], "slurm_controller": ["db"], "slurm_database": ["db"]}
    inventory = {group: {"hosts": dict.fromkeys(members)} for group, members in groups.items()}
    (tmp_path / "hosts.yml").write_text(json.dumps(inventory))
    keys = ("units", "stopped", "images", "closed")
    found = show("{" + ", ".join(f"'{key}': validation_expected.{key}" for key in keys) + "}")
    tasks = [{"ansible.builtin.include_vars": {"file": "{{ known }}"}}, found]
    (tmp_path / "play.yml").write_text(json.dumps([play_of(hosts="all", tasks=tasks)]))
    known = {"known": str(ANSIBLE / "roles/validation/vars/main.yml"), "ansible_become": False}
    known |= {"ansible_facts": FACTS | {"os_family": "Debian"}}
    known |= {"carme_active_head": names[1], "redis_configure": False, "validation_account": ""}
    known |= {"validation_partition": "gpu", "carme_head_address": "10.1.0.10", "validation_found": []}
    options = ("-e", json.dumps(TWO | known), "-i", tmp_path / "hosts.yml")
    seen = shown(playbook(*options, tmp_path / "play.yml"))
    first, second, node, database = (seen[name][0] for name in names)
    services = {name.removesuffix(".service") for name in SERVICES}
    assert set(first["stopped"]) == services and not services & set(first["units"])
    assert {"nginx", "carme-head-pull.timer"} <= set(first["units"]) and "carme-active" not in first["units"]
    assert second["stopped"] == [] and {*services, "carme-active"} <= set(second["units"])
    assert node["units"] == ["carme-node-exporter"] and node["stopped"] == database["stopped"] == []
    assert node["images"] and first["images"] and not database["images"]
    assert first["closed"] == [8000, 8001, 8100]
