"""Every role says what it does, what can be set, and what it expects."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment

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
