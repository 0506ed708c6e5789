"""Every role says what it does, what can be set, and what it expects."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment

from carme.backup.main import STARTED

from .conftest import ANSIBLE, Playbook, show, shown

ROLES = sorted(path for path in (ANSIBLE / "roles").iterdir() if path.is_dir())


def defaults(role: Path) -> dict[str, Any]:
    file = role / "defaults/main.yml"
    return yaml.safe_load(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_the_readme_names_every_variable(role: Path) -> None:
    readme = (role / "README.md").read_text()
    assert [name for name in defaults(role) if f"`{name}`" not in readme] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_variable_is_specified_and_every_specified_variable_has_a_default(role: Path) -> None:
    specification = yaml.safe_load((role / "meta/argument_specs.yml").read_text())
    assert set(specification["argument_specs"]["main"]["options"]) == set(defaults(role))


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_variable_has_an_effect(role: Path) -> None:
    files = [path for path in (ANSIBLE / "roles").rglob("*") if path.suffix in (".yml", ".j2")]
    used = "".join(path.read_text() for path in files if path.parent.name not in ("defaults", "meta"))
    defined = "".join((each / "defaults/main.yml").read_text() for each in ROLES if defaults(each))
    unused = [name for name in defaults(role) if name not in used and defined.count(name) < 2]
    assert unused == []


@pytest.mark.parametrize("family", ["Debian", "RedHat"])
def test_every_component_has_packages_on_every_system(family: str) -> None:
    packages = yaml.safe_load((ANSIBLE / f"roles/base/vars/{family}.yml").read_text())[
        "base_packages_by_component"
    ]
    wanted = {
        name
        for names in defaults(ANSIBLE / "roles/base")["base_components_by_group"].values()
        for name in names
    }
    assert wanted | {"acme", "ldap", "nfs", "postgresql_client"} == set(packages)


@pytest.mark.parametrize(
    ("changed", "lists", "seconds"), [(False, 3, "86400"), (True, 3, "0"), (False, 0, "0")]
)
def test_a_host_without_lists_of_packages_fetches_them(changed: bool, lists: int, seconds: str) -> None:
    """The folder of a new host is young, which the module takes for a sign that its lists are, too."""
    tasks = yaml.safe_load((ANSIBLE / "roles/base/tasks/packages-Debian.yml").read_text())
    (install,) = [task["ansible.builtin.apt"] for task in tasks if "ansible.builtin.apt" in task]
    environment = Environment(autoescape=False)
    environment.tests["changed"] = lambda registered: registered["changed"]
    registered = {"base_sources": {"changed": changed}, "base_lists": {"matched": lists}}
    assert environment.from_string(install["cache_valid_time"]).render(registered) == seconds


SERVICES = [
    file
    for file in sorted((ANSIBLE / "roles").glob("*/templates/*.service.j2"))
    if "oneshot" not in file.read_text()
]


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_a_service_comes_back_however_often_it_is_killed(service: Path) -> None:
    unit, _, rest = service.read_text().partition("\n[Service]\n")
    assert "\nStartLimitIntervalSec=0\n" in unit
    assert "\nRestart=always\n" in rest.partition("\n[Install]\n")[0]


def systemd_tasks() -> list[tuple[str, dict[str, Any]]]:
    """The tasks about units, each after the text of what it and its loop name."""
    found: list[tuple[str, dict[str, Any]]] = []
    for file in sorted((ANSIBLE / "roles").glob("*/tasks/*.yml")):
        tasks = yaml.safe_load(file.read_text())
        tasks = [inner for task in tasks for inner in task.get("block", [task])]
        registers = {task["register"]: str(task) for task in tasks if "register" in task}
        variables = file.parents[1] / "vars/main.yml"
        values = yaml.safe_load(variables.read_text()) if variables.exists() else {}
        for task in tasks:
            if "ansible.builtin.systemd_service" in task:
                text = str(task["ansible.builtin.systemd_service"].get("name")) + str(task.get("loop", ""))
                for names in (registers, values):
                    text += "".join(str(names[name]) for name in re.findall(r"\w+", text) if name in names)
                found.append((text, task))
    return found


def test_what_runs_on_the_active_head_starts_where_it_may_alone() -> None:
    """Neither on a standby nor on a head that awaits its backup."""
    started = set[str]()
    for text, task in systemd_tasks():
        named = {unit for unit in STARTED if re.search(rf"(?<![\w.-]){unit}(?![\w.-])", text)}
        unit = task["ansible.builtin.systemd_service"]
        if named and unit.get("state") != "stopped":
            assert unit.get("enabled") == "{{ carme_enables_services }}", task["name"]
            assert re.search(
                r"omit if not carme_starts_services|if carme_starts_services else omit", unit["state"]
            )
            started |= named
    assert started == set(STARTED)


def test_no_certificate_is_requested_on_a_head_that_awaits_its_backup() -> None:
    tasks = yaml.safe_load((ANSIBLE / "roles/reverse_proxy/tasks/main.yml").read_text())
    (request,) = (task for task in tasks if "reverse_proxy_renewal" in str(task))
    about = {"reverse_proxy_acme_directory": "https://acme.example.org/"}
    environment = Environment(autoescape=False)
    environment.filters["bool"] = bool
    condition = environment.compile_expression(request["when"])
    assert [bool(condition(**about, carme_awaits_restore=awaits)) for awaits in (False, True)] == [
        True,
        False,
    ]
    (timer,) = (task for task in tasks if "carme-certificate.timer" in str(task) and "loop" not in task)
    for word in ("enabled", "state"):
        assert "carme_awaits_restore" in timer["ansible.builtin.systemd_service"][word]


def test_only_modules_that_ansible_core_brings_are_used() -> None:
    for file in (ANSIBLE / "roles").glob("*/*/*.yml"):
        if file.parent.name in ("tasks", "handlers"):
            assert "community." not in file.read_text() and "ansible.posix" not in file.read_text(), file


def programs_of(role: Path) -> list[dict[str, Any]]:
    """The tasks of a role that run programs, those in blocks too."""
    found: list[dict[str, Any]] = []

    def collect(tasks: list[dict[str, Any]]) -> None:
        for task in tasks:
            for part in ("block", "rescue", "always"):
                collect(task.get(part, []))
            if any(f"ansible.builtin.{module}" in task for module in ("command", "shell", "script")):
                found.append(task)

    for file in sorted([*(role / "tasks").glob("*.yml"), *(role / "handlers").glob("*.yml")]):
        collect(yaml.safe_load(file.read_text()))
    return found


#: What changes nothing that is worth a report, and says nothing that a later step reads.
WITHOUT_ANSWER = {"Keep it so from now on", "Check nginx's configuration"}


@pytest.mark.parametrize(
    "role", [role for role in ROLES if role.name != "validation"], ids=lambda role: role.name
)
def test_a_run_in_check_mode_reads_what_later_steps_need(role: Path) -> None:
    """In check mode Ansible runs no programs: a later step would find an empty answer, and fail or guess."""
    tasks = programs_of(role)
    reads = [task for task in tasks if task.get("changed_when") is False]
    unread = {task["name"] for task in reads if task.get("check_mode") is not False}
    assert unread - WITHOUT_ANSWER == set()
    for task in tasks:
        if "from_json" in str(task.get("changed_when", "")):
            assert "not ansible_check_mode" in task["when"], task["name"]
        assert "async" not in task or "not ansible_check_mode" in task["when"], task["name"]


def test_parts_that_were_installed_for_another_python_are_outdated(
    playbook: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """An upgrade of the system leaves them where its new Python does not look."""
    venv = tmp_path / "venv"
    play = [
        {
            "hosts": "head:compute",
            "gather_subset": ["!all", "network"],
            "vars": {"carme_source": str(ANSIBLE.parent), "carme_archives": str(tmp_path / "archives")},
            "roles": ["carme"],
            "tasks": [
                {"include_role": {"name": "base", "tasks_from": "parts"},
                 "when": "inventory_hostname == 'n1'"},
                {"copy": {"dest": str(tmp_path / "found"), "content": "{{ found | to_json }}"},
                 "check_mode": False,
                 "when": "inventory_hostname == 'n1'",
                 "vars": {"found": {"wanted": "{{ base_wanted }}", "outdated": "{{ base_outdated }}"}}},
            ],
        }
    ]  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    hosts = {"head": {"hosts": {"portal": None}}, "compute": {"hosts": {"n1": None}}}
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))

    def collect() -> dict[str, Any]:
        # A part without anything to compile.
        known = {"carme_venv": str(venv), "base_parts_by_group": {"compute": ["monitoring"]}}
        options = ("-c", "local", "-e", json.dumps(known), "-i", tmp_path / "hosts.json")
        done = playbook("--check", *options, tmp_path / "play.yml")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / "found").read_text())

    first = collect()
    assert first["outdated"] == list(first["wanted"]) == ["monitoring"]
    venv.mkdir()
    (venv / "parts.json").write_text(json.dumps(first["wanted"]))
    older, current = "lib/python3.1/site-packages/pip", f"lib/python{sys.version_info.major}"
    (venv / older).mkdir(parents=True)
    assert collect()["outdated"] == ["monitoring"]
    there = venv / f"{current}.{sys.version_info.minor}/site-packages/pip"
    there.mkdir(parents=True)
    assert collect()["outdated"] == []
    there.chmod(0o700)
    assert collect()["outdated"] == ["monitoring"], "root's umask has closed it to others"


@pytest.mark.parametrize("installs", [True, False])
def test_the_group_of_slurm_clients_is_named_only_where_it_may_have_hosts(installs: bool) -> None:
    """The role carme refuses hosts in it where the site runs its own Slurm."""
    tasks = yaml.safe_load((ANSIBLE / "roles/broker/tasks/main.yml").read_text())
    (task,) = (each for each in tasks if "broker_slurm.rc == 0" in str(each.get("ansible.builtin.assert")))
    assert "{{ broker_remedy }}" in task["ansible.builtin.assert"]["fail_msg"]
    remedy = Environment(autoescape=False).from_string(task["vars"]["broker_remedy"])
    assert ("slurm_client" in remedy.render(carme_installs_slurm=installs)) == installs


def test_an_interrupted_run_with_only_postgresqls_account_is_continued() -> None:
    """PostgreSQL's account and database are each made where they are missing, not one with the other."""
    tasks = yaml.safe_load((ANSIBLE / "roles/postgresql/tasks/main.yml").read_text())
    environment = Environment(autoescape=False)
    present = ["carme-portal"]
    created = {}
    for task in tasks:
        argv = task.get("ansible.builtin.command", {}).get("argv", [])
        for program in {"createuser", "createdb"} & set(argv):
            condition = environment.compile_expression(task["when"])
            created[program] = [
                bool(
                    condition(
                        carme_portal_account="carme-portal",
                        postgresql_accounts={"stdout_lines": accounts},
                        postgresql_databases={"stdout_lines": databases},
                    )
                )
                for accounts, databases in (([], []), (present, []), (present, present))
            ]
    assert created == {"createuser": [True, False, False], "createdb": [True, True, False]}


#: Modules that write what the role holds itself: they fail on a broken host alone.
WRITING = {"template", "copy", "set_fact"}


def flat_tasks(file: Path) -> Iterator[dict[str, Any]]:
    """A role's tasks in the order in which they run: those of blocks and of files that it includes, too."""
    tasks = yaml.safe_load(file.read_text())
    while tasks:
        task = tasks.pop(0)
        if "block" in task:
            tasks[:0] = task["block"]
        elif "ansible.builtin.include_tasks" in task and "item" not in str(task):
            yield from flat_tasks(file.with_name(task["ansible.builtin.include_tasks"]))
        else:
            yield task


def changes_noticed(restart: dict[str, Any], before: list[dict[str, Any]]) -> list[int]:
    """The places of the tasks for whose changes a service starts anew."""
    conditions = str(restart["ansible.builtin.systemd_service"]) + str(restart.get("loop", ""))
    found = list[int]()
    for place in reversed(range(len(before))):
        task = before[place]
        facts = task.get("ansible.builtin.set_fact", {})
        for name in [task.get("register", ""), *facts]:
            if name and re.search(rf"\b{name}\b", conditions):
                found.append(place)
                conditions += str(facts.get(name, ""))
    return found


@pytest.mark.parametrize(
    "role", sorted({file.parents[1] for file in SERVICES if "base_revision" in file.read_text()}),
    ids=lambda role: role.name,
)  # fmt: skip
def test_nothing_fails_between_a_change_and_the_start_of_its_service(role: Path) -> None:
    """A run that ended there would leave the earlier version running: the next run finds no change."""
    tasks = list(flat_tasks(role / "tasks/main.yml"))
    restarts = 0
    for place, task in enumerate(tasks):
        if "restarted" in str(task.get("ansible.builtin.systemd_service", {}).get("state")):
            restarts += 1
            noticed = changes_noticed(task, tasks[:place])
            assert any("ansible.builtin.template" in tasks[change] for change in noticed), task["name"]
            for between in tasks[min(noticed) + 1 : place]:
                modules = {name.removeprefix("ansible.builtin.") for name in between}
                assert modules & WRITING, (tasks[min(noticed)]["name"], between["name"], task["name"])
    assert restarts


def test_changes_that_restart_the_broker_are_found() -> None:
    """Its own unit, those of homes and quotas, and pyslurm, by way of a fact that another file sets."""
    tasks = list(flat_tasks(ANSIBLE / "roles/broker/tasks/main.yml"))
    (place,) = (number for number, task in enumerate(tasks) if task["name"] == "Start the broker")
    registered = {tasks[change].get("register") for change in changes_noticed(tasks[place], tasks[:place])}
    assert registered == {"broker_unit", "broker_home_unit", "broker_pyslurm_run", None}


@pytest.mark.parametrize(
    ("state", "answers"),
    [
        *((state, True) for state in ("IDLE", "MIXED+PLANNED", "IDLE+PLANNED", "ALLOCATED+COMPLETING")),
        *((state, True) for state in ("IDLE+DRAIN", "MIXED+DRAIN", "IDLE+MAINTENANCE", "IDLE+RESERVED")),
        *((state, False) for state in ("DOWN", "DOWN+DRAIN", "UNKNOWN+NOT_RESPONDING", "IDLE*", "FUTURE")),
        *((state, False) for state in ("IDLE+DRAIN+NOT_RESPONDING", "IDLE+DRAIN+INVALID_REG")),
        *((state, False) for state in ("IDLE+CLOUD+POWERED_DOWN", "MIXED+POWERING_UP", "IDLE+REBOOT_ISSUED")),
    ],
)
def test_a_run_waits_for_a_node_that_answers_and_not_for_one_that_takes_jobs(
    state: str, answers: bool
) -> None:
    """Otherwise one node that an administrator has drained would end the run for the whole site."""
    tasks = yaml.safe_load((ANSIBLE / "roles/slurm_node/tasks/main.yml").read_text())
    (task,) = (each for each in tasks if "until" in each)
    # sinfo names no node that is in no partition.
    assert task["ansible.builtin.command"]["argv"][0] == "scontrol"
    environment = Environment(autoescape=False)
    environment.tests["match"] = lambda text, pattern: bool(re.match(pattern, text))
    line = f"NodeName=n1 Arch=x86_64 State={state} ThreadsPerCore=1 Reason=was State=IDLE then [root@now]\n"
    condition = environment.compile_expression(task["until"])
    assert condition(slurm_node_state={"stdout": line}, **task["vars"]) == answers


POLICY = """base-files:
  Installed: 13.8
  Candidate: 13.8+deb13u2
  Version table:
     13.8+deb13u2 500
        500 http://security.example.org/debian-security trixie-security/main amd64 Packages
 *** 13.8 500
        {priority} {source} trixie/main amd64 Packages
        100 /var/lib/dpkg/status
"""


def test_the_mirror_of_a_host_is_the_one_of_its_system(playbook: Playbook, tmp_path: Path) -> None:
    """Sources of others, such as a driver's, come first in apt's list and may have the same codename."""
    tasks = yaml.safe_load((ANSIBLE / "roles/base/tasks/packages-Debian.yml").read_text())
    (block,) = (task["block"] for task in tasks if "base_mirror" in str(task))
    assert block[0]["ansible.builtin.command"]["argv"] == ["apt-cache", "policy", "base-files"]
    sources = {
        "http://archive.example.org/debian": "http://archive.example.org/debian",
        "https://mirror.example.org/pub/debian": "https://mirror.example.org/pub/debian",
        "file:/srv/mirror": "",
    }
    play = {
        "hosts": "portal",
        "gather_facts": False,
        "vars_files": [str(ANSIBLE / "roles/base/vars/main.yml")],
        "tasks": [
            show("base_mirror")
            | {"vars": {"base_policy": {"stdout": POLICY.format(source=source, priority=priority)}}}
            for source in sources
            for priority in (500, -1)
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    found = shown(playbook("-i", "portal,", "-c", "local", tmp_path / "play.yml"))["portal"]
    assert found == [mirror for mirror in sources.values() for _priority in range(2)]
