"""Ports of metrics that others have, and a MariaDB that serves others, are found before a change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import ANSIBLE
from .test_precheck import module

SOCKET = 'LISTEN 0 4096 {address}:{port} *:* users:(("{program}",pid={pid},fd=3))\n'
EXPORTERS = {"carme-cluster-exporter": 9751, "carme-node-exporter": 9750}
PROMETHEUS = {"prometheus": 9090, "prometheus-alertmanager": 9093}
PORTS = EXPORTERS | PROMETHEUS
USUAL = "information_schema\nmysql\nperformance_schema\nsys\n"

Finding = dict[str, Any]


@pytest.fixture
def read_finding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finding]:
    """Looks at a host whose programs print `answers`, by the last of their words; the finding of a check."""
    precheck, services = module("precheck"), module("precheck_services")

    def find(name: str, answers: dict[str, str], **changes: object) -> Finding:
        wanted: dict[str, Any] = {"host": "n1", "head": False, "compute": False, "own_slurm": False}
        wanted |= dict.fromkeys(("users_exist", "installs_slurm", "asks_directory"), False)
        wanted |= {"serves_database": True, "database_configure": True, "metrics_ports": PORTS} | changes
        monkeypatch.setattr(services, "output", lambda *words, **_options: answers.get(words[-1]))
        (check,) = (check for title, check in precheck.checks(wanted) if title == name)
        return precheck.run_check(name, check, wanted)

    return find


@pytest.mark.parametrize(
    ("port", "address", "taken"),
    [
        (9090, "*", True),
        (9093, "127.0.0.1", True),
        (9751, "[::]", True),
        (9751, "10.1.0.5", False),
        (9750, "10.1.0.5", True),
        (9750, "0.0.0.0", True),
        (9750, "127.0.0.1", False),
        (9090, "[::1]", True),
    ],
)
def test_a_port_of_metrics_that_another_program_has_is_found(
    read_finding: Callable[..., Finding], port: int, address: str, taken: bool
) -> None:
    """Its unit would start all the same, fail by itself, and the portal would show no metrics."""
    (unit,) = (name for name, number in PORTS.items() if number == port)

    def found(program: str, pid: int, main: str) -> Finding:
        line = SOCKET.format(address=address, port=port, program=program, pid=pid)
        return read_finding("ports of metrics", {f":{port}": line, unit: f"{main}\n"})

    finding = found("systemd", 1, "0")
    assert (finding["ok"], finding["stops"]) == (not taken, taken)
    if taken:
        assert finding["detail"] == f"In use are: port {port} by systemd, but {unit} needs it."
        assert "cockpit.socket" in finding["remedy"]
    assert found(unit[:15], 77, "77")["ok"], "the unit's own"
    assert found(unit[:15], 770, "77")["ok"] == (not taken), "another process with the same name"


def test_ports_that_nobody_has_are_free(read_finding: Callable[..., Finding]) -> None:
    assert read_finding("ports of metrics", {f":{port}": "" for port in PORTS.values()})["ok"]
    assert read_finding("ports of metrics", {})["ok"], "a host without ss"


def test_ports_of_metrics_are_those_on_which_the_units_listen() -> None:
    roles = ANSIBLE / "roles"
    ports = yaml.safe_load((roles / "carme/vars/main.yml").read_text())
    assert {unit: ports[f"{unit.replace('-', '_')}_port"] for unit in EXPORTERS} == EXPORTERS
    arguments = (roles / "prometheus/vars/main.yml").read_text()
    for port in PROMETHEUS.values():
        assert f"--web.listen-address=127.0.0.1:{port}" in arguments.split()


@pytest.mark.parametrize(
    ("databases", "state", "changes", "words"),
    [
        (USUAL, "active", {}, ""),
        (USUAL + "slurm_acct_db\n", "active", {}, ""),
        (USUAL + "wiki\nforum\n", "active", {}, "databases of others: forum, wiki. "),
        (USUAL + "wiki\n", "inactive", {}, ""),
        (USUAL + "wiki\n", "active", {"database_configure": False}, ""),
        (None, "active", {}, "root cannot log in"),
        (None, "inactive", {}, ""),
    ],
)
def test_a_mariadb_that_serves_others_is_not_closed(
    read_finding: Callable[..., Finding],
    databases: str | None,
    state: str,
    changes: dict[str, bool],
    words: str,
) -> None:
    """The role's settings for it close its port (skip-networking)."""
    answers = {"mariadb": f"{state}\n"} | ({} if databases is None else {"SHOW DATABASES": databases})
    finding = read_finding("mariadb", answers, **changes)
    assert (finding["ok"], finding["stops"]) == (not words, bool(words))
    assert words in finding["detail"] and bool(finding["remedy"]) == bool(words)


def test_a_mariadb_that_carme_has_configured_may_get_other_databases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, file = module("precheck_services"), tmp_path / "90-slurm.cnf"
    answers = {"mariadb": "active\n", "SHOW DATABASES": "wiki\n"}
    monkeypatch.setattr(services, "output", lambda *words, **_options: answers[words[-1]])
    template = ANSIBLE / "roles/slurm_database/templates/mariadb.cnf.j2"
    file.write_text(template.read_text())
    assert services.database({"database_configure": True}, (tmp_path,))
    file.write_text("[mariadbd]\n")
    with pytest.raises(services.Problem, match="databases of others: wiki"):
        services.database({"database_configure": True}, (tmp_path,))


def test_a_mariadb_that_serves_others_keeps_its_configuration() -> None:
    tasks = yaml.safe_load((ANSIBLE / "roles/slurm_database/tasks/main.yml").read_text())
    (task,) = (each for each in tasks if "90-slurm.cnf" in str(each))
    assert task["when"] == "slurm_database_configure | bool"
