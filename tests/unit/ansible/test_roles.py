"""Every role says what it does, what can be set, and what it expects."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment

from carme.backup.main import STARTED

ANSIBLE = Path(__file__).resolve().parents[3] / "ansible"
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
    others = [path for path in (ANSIBLE / "roles").rglob("*") if path.suffix in (".yml", ".j2")]
    used = "".join(path.read_text() for path in others if path.parent.name not in ("defaults", "meta"))
    defined = "".join((other / "defaults/main.yml").read_text() for other in ROLES if defaults(other))
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
        tasks = [one for task in tasks for one in task.get("block", [task])]
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
    """Not on a standby, and not on a head that awaits its backup."""
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
