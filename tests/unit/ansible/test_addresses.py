"""Where hosts are reached and from where, by IPv4 and IPv6, and which of two heads Prometheus watches."""

import base64
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port
from real_prometheus import promtool

import carme.config

from .conftest import ANSIBLE, Playbook, show, shown

Render = Callable[..., dict[str, dict[str, str]]]

#: What setup finds of hosts. The second node has no IPv4. Addresses fe80::/10 are those of one link.
HOSTS: dict[str, dict[str, Any]] = {
    "head-1": {
        "default_ipv4": {"address": "10.1.0.10"},
        "default_ipv6": {"interface": "eth6"},
        "all_ipv4_addresses": ["10.9.0.10", "10.1.0.10"],
        "all_ipv6_addresses": ["fd00::10", "fe80::10"],
    },
    "head-2": {
        "default_ipv4": {"address": "10.1.0.11"},
        "all_ipv4_addresses": ["10.1.0.11"],
        "all_ipv6_addresses": ["fd00::11", "fe80::11"],
    },
    "n1": {"default_ipv4": {"address": "10.1.0.21"}},
    "n2": {"default_ipv6": {"address": "fd00::22"}},
    "slurm": {"all_ipv4_addresses": ["10.1.0.2"], "all_ipv6_addresses": ["fe80::2"]},
}
TEMPLATES = {
    "broker": "broker/templates/carme-broker.service.j2",
    "exporter": "node_exporter/templates/carme-node-exporter.service.j2",
    "proxy": "hub/templates/carme-proxy.service.j2",
    "active": "heads/templates/carme-active.service.j2",
    "carme.toml": "base/templates/carme.toml.j2",
    "accounts": "base/templates/sysusers.conf.j2",
    "nodes.json": "prometheus/templates/nodes.json.j2",
    "table.json": "monitoring_authority/templates/table.json.j2",
    "prometheus.yml": "prometheus/templates/prometheus.yml.j2",
}
SITE: dict[str, Any] = {
    "carme_hub_database": "postgresql://carme-hub@db.example.org/hub",
    "carme_portal_database": "postgresql://carme-portal@db.example.org/portal",
    "carme_site_url": "https://carme.example.org",
}


def facts() -> dict[str, Any]:
    """A play that gives each host the facts in its variable `given`, if it has any."""
    names = ("default_ipv4", "default_ipv6", "all_ipv4_addresses", "all_ipv6_addresses")
    nothing = {name: "[]" if name.startswith("all") else "{}" for name in names}
    values = {name: f"{{{{ given.{name} | default({nothing[name]}) }}}}" for name in names}
    task = {"ansible.builtin.set_fact": {**values, "cacheable": True}, "when": "given is defined"}
    return {"hosts": "all", "gather_facts": False, "tasks": [task]}


def inventory(folder: Path, heads: int, without_facts: str = "", **groups: list[str]) -> Path:
    """The hosts above with so many heads; further groups by keyword."""
    members = {"head": ["head-1", "head-2"][:heads], "compute": ["n1", "n2"], **groups}
    named = {name for hosts in members.values() for name in hosts}
    given = {name: {"given": HOSTS[name]} if name != without_facts else {} for name in sorted(named)}
    described: dict[str, Any] = {name: {"hosts": dict.fromkeys(hosts)} for name, hosts in members.items()}
    described["all"] = {"hosts": given, "vars": {"ansible_become": False, "ansible_connection": "local"}}
    path = folder / "hosts.json"
    path.write_text(json.dumps(described))
    return path


@pytest.fixture
def render(playbook: Playbook, tmp_path: Path) -> Render:
    """Renders templates of TEMPLATES on hosts with these facts; their texts by host."""

    def run(on: str, names: list[str], hosts: Path, **settings: Any) -> dict[str, dict[str, str]]:
        roles = sorted({TEMPLATES[name].partition("/")[0] for name in names} - {"base"})
        texts = {name: f"{{{{ lookup('template', roles ~ '/{TEMPLATES[name]}') }}}}" for name in names}
        unused = [{"role": role, "when": False} for role in roles]
        play: dict[str, Any] = {"hosts": on, "gather_facts": False, "roles": ["carme", *unused]}
        play["tasks"] = [show("texts") | {"vars": {"texts": texts}}]
        (tmp_path / "play.yml").write_text(json.dumps([facts(), play]))
        known = {**SITE, "roles": str(ANSIBLE / "roles"), "role_path": str(ANSIBLE / "roles/carme")}
        # There is no program that could say which head is active.
        known |= {"base_revision": "1", "carme_venv": str(tmp_path / "venv"), **settings}
        done = playbook("-i", hosts, "-e", json.dumps(known), tmp_path / "play.yml")
        return {host: found for host, (found,) in shown(done).items()}

    return run


def allowed(unit: str) -> list[str]:
    """The addresses that a unit allows."""
    (line,) = re.findall(r"(?m)^IPAddressAllow=(.*)$", unit)
    return line.split()


SLURM: dict[str, Any] = {"slurm_controller": ["slurm"], "slurm_database": ["slurm"]}


def test_a_broker_without_prometheus_may_reach_the_exporters(render: Render, tmp_path: Path) -> None:
    ((_, found),) = render("head", ["broker"], inventory(tmp_path, 1, **SLURM)).items()
    assert allowed(found["broker"]) == ["localhost", "10.1.0.2", "10.1.0.21", "fd00::22"]
    watched_site = inventory(tmp_path, 1, **SLURM, monitoring=["head-1"])
    ((_, found),) = render("head", ["broker"], watched_site).items()
    assert allowed(found["broker"]) == ["localhost", "10.1.0.2"]


def test_a_broker_of_a_slurm_of_the_sites_own_needs_no_addresses(render: Render, tmp_path: Path) -> None:
    ((_, found),) = render("head", ["broker"], inventory(tmp_path, 1, without_facts="n2")).items()
    assert "IPAddress" not in found["broker"]


def test_exporters_listen_and_are_read_at_addresses_of_either_version(render: Render, tmp_path: Path) -> None:
    hosts = inventory(tmp_path, 1, monitoring=["head-1"])
    found = render("compute", ["exporter", "nodes.json", "table.json"], hosts)
    first, second = found["n1"]["exporter"], found["n2"]["exporter"]
    assert "--listen 10.1.0.21:9750 " in first and allowed(first) == ["10.1.0.10", "10.9.0.10"]
    assert "--listen [fd00::22]:9750 " in second and allowed(second) == ["10.1.0.10", "fd00::10"]
    nodes = json.loads(found["n1"]["nodes.json"])
    assert [node["targets"] for node in nodes] == [["10.1.0.21:9750"], ["[fd00::22]:9750"]]
    table = {entry["name"]: entry.get("hosts") for entry in json.loads(found["n1"]["table.json"])}
    assert (table["node-n1"], table["node-n2"]) == (["n1", "10.1.0.21"], ["n2", "fd00::22"])


def test_a_head_that_does_not_answer_keeps_the_addresses_that_exporters_allow(
    render: Render, tmp_path: Path
) -> None:
    unit = "[Service]\nIPAddressDeny=any\nIPAddressAllow=10.1.0.10 10.9.0.10 10.1.0.99\n"
    former = {"node_exporter_former": {"content": base64.b64encode(unit.encode()).decode()}}
    gone = inventory(tmp_path, 2, without_facts="head-1")
    found = render(
        "n1", ["exporter"], gone, **former, carme_heads_address="10.1.0.99/24", carme_heads_interface="eth0"
    )
    assert allowed(found["n1"]["exporter"]) == ["10.1.0.10", "10.1.0.11", "10.1.0.99", "10.9.0.10"]
    found = render("n1", ["exporter"], inventory(tmp_path, 1), **former)
    assert allowed(found["n1"]["exporter"]) == ["10.1.0.10", "10.9.0.10"]


def test_a_head_that_answers_without_ipv4_keeps_no_former_addresses(
    render: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = base64.b64encode(b"[Service]\nIPAddressAllow=fd00::10 fd00::99\n").decode()
    monkeypatch.setitem(HOSTS, "head-1", {"all_ipv6_addresses": ["fd00::10", "fe80::10"]})
    settings = {"node_exporter_former": {"content": unit}, "carme_head_address": "fd00::10"}
    found = render("n2", ["exporter"], inventory(tmp_path, 1), **settings)
    assert allowed(found["n2"]["exporter"]) == ["fd00::10"]


@pytest.mark.parametrize(
    ("heads", "settings"),
    [(1, {"carme_head_address": "fd00::10"}), (2, {"carme_heads_address": "fd00::10/64"})],
)
def test_an_ipv6_address_of_the_head_stands_in_brackets(
    render: Render, tmp_path: Path, heads: int, settings: dict[str, Any]
) -> None:
    found = render("head-1", ["carme.toml", "proxy"], inventory(tmp_path, heads), **settings)["head-1"]
    (tmp_path / "carme.toml").write_text(found["carme.toml"])
    site = carme.config.load(tmp_path / "carme.toml")
    assert site.hub.listen == "https://[fd00::10]:8081"
    assert heads == 1 or (site.heads.address, site.heads.interface) == ("fd00::10/64", "eth6")
    targets = re.findall(r"--(?:default|error)-target (\S+?)(?:'| )", found["proxy"])
    assert targets == ["https://[fd00::10]:8081", "https://[fd00::10]:8081/jupyter/hub/error"]


def watched(prometheus: str, name: str) -> list[str]:
    """The files in which Prometheus finds targets of a job, or of Alertmanager."""
    described = yaml.safe_load(prometheus)
    jobs = {job["job_name"]: job for job in described["scrape_configs"]}
    job = described["alerting"]["alertmanagers"][0] if name == "alertmanager" else jobs[name]
    return [file for sd in job.get("file_sd_configs", []) for file in sd["files"]]


@pytest.mark.parametrize("both", [False, True])
def test_prometheus_runs_on_one_of_two_heads_or_on_both(render: Render, tmp_path: Path, both: bool) -> None:
    hosts = inventory(tmp_path, 2, monitoring=["head-1", "head-2"][: 1 + both])
    names = ["accounts", "carme.toml", "active", "prometheus.yml"]
    found = render("head", names, hosts, carme_heads_address="10.1.0.99/24", carme_heads_interface="eth0")
    # The other's certificates belong to the group on each of them.
    assert all("\nu prometheus " in each["accounts"] for each in found.values())
    asks = 'prometheus = "https://127.0.0.1:9090"'
    assert [asks in found[name]["carme.toml"] for name in ("head-1", "head-2")] == [True, both]
    written = ["cluster.yml", *(["alertmanager.yml"] if both else [])]
    assert watched(found["head-1"]["prometheus.yml"], "carme-cluster") == ["/run/carme-active/cluster.yml"]
    assert watched(found["head-1"]["prometheus.yml"], "alertmanager") == [
        f"/run/carme-active/{name}" for name in written[1:]
    ]
    starts = [write_targets(found[name]["active"], tmp_path / name) for name in ("head-1", "head-2")]
    assert starts == [written, written if both else []]
    for status in (0, 1, 3):
        restarted = "--no-block try-restart prometheus-alertmanager" if both and status != 1 else ""
        assert stop(found["head-1"]["active"], tmp_path, status) == restarted, status


def stop(unit: str, folder: Path, status: int) -> str:
    """What a unit requests of systemd when its service has ended with a status.

    0: it was stopped. 3: another head is active. 1: the lease could not be renewed; it starts again.
    """
    called, program = folder / "called", folder / "systemctl"
    called.write_text("")
    program.write_text(f'#!/bin/sh\necho "$@" >{called}\n')
    program.chmod(0o755)
    environment = {"EXIT_STATUS": str(status), "PATH": f"{folder}:/usr/bin:/bin"}
    for line in re.findall(r"(?m)^ExecStopPost=-(.*)$", unit):
        subprocess.run(shlex.split(line.replace("$$", "$")), check=True, env=environment)
    return called.read_text().strip()


def write_targets(unit: str, folder: Path) -> list[str]:
    """Carry out what the unit of the active head does when it has started; the files that it has written."""
    folder.mkdir(exist_ok=True)
    for line in re.findall(r"(?m)^ExecStartPost=-(.*)$", unit):
        program, *words = shlex.split(line.replace("/run/carme-active", str(folder)))
        subprocess.run([program, *words], check=True)
    if list(folder.iterdir()):
        # It goes when the head is no longer active, and stays while the lease cannot be renewed.
        assert {"RuntimeDirectory=carme-active", "RuntimeDirectoryPreserve=restart"} <= set(unit.splitlines())
    ports = {"cluster.yml": 9751, "alertmanager.yml": 9093}
    for file in folder.iterdir():
        assert yaml.safe_load(file.read_text()) == [{"targets": [f"127.0.0.1:{ports[file.name]}"]}]
    return [name for name in ports if (folder / name).exists()]


def test_prometheus_accepts_the_configuration_of_two_heads(render: Render, tmp_path: Path) -> None:
    checker = promtool()
    hosts = inventory(tmp_path, 2, monitoring=["head-1", "head-2"])
    names = ["active", "prometheus.yml"]
    found = render("head-1", names, hosts, carme_heads_address="10.1.0.99/24", carme_heads_interface="eth0")[
        "head-1"
    ]
    text = re.sub(r"(?m)^ *(ca|cert|key)_file:.*\n", "", found["prometheus.yml"])
    for folder in ("/run/carme-active", "/etc/prometheus"):
        text = text.replace(folder, str(tmp_path))
    (tmp_path / "prometheus.yml").write_text(text)

    def checked() -> str:
        command = [checker, "check", "config", tmp_path / "prometheus.yml"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # On the standby the files are missing.
    assert "cluster.yml" in checked()
    write_targets(found["active"], tmp_path / "run")
    for name in ("cluster.yml", "alertmanager.yml"):
        shutil.copy(tmp_path / "run" / name, tmp_path)
    assert "cluster.yml" not in checked()


def tasks_of(role: str, first: str, last: str) -> list[dict[str, Any]]:
    """The tasks of a role from one to another."""
    tasks = yaml.safe_load((ANSIBLE / f"roles/{role}/tasks/main.yml").read_text())
    names = [task["name"] for task in tasks]
    return tasks[names.index(first) : names.index(last) + 1]


def test_a_new_node_whose_certificate_the_head_has_not_made_is_reported(
    playbook: Playbook, tmp_path: Path
) -> None:
    names = (
        "See whether the head has made the node's certificate",
        "Fetch the node's certificate from the head",
    )
    tasks = tasks_of("node_exporter", *names)
    contents = "node_exporter_certificates.results | map(attribute='content') | map('b64decode') | list"
    play = {"hosts": "n1", "gather_facts": False, "tasks": [*tasks, show(contents)]}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    known = json.dumps({"carme_monitoring_directory": str(tmp_path), "carme_head": "head-1"})
    options = ("-i", inventory(tmp_path, 1), "--limit", "n1", "-e", known, tmp_path / "play.yml")
    done = playbook(*options)
    text = " ".join(done.stdout.split())
    assert done.returncode == 2 and "head-1 has no certificate for the exporter of n1 yet" in text, text
    assert "--limit 'head-1,n1'" in text and "output has been hidden" not in text
    (tmp_path / "node-n1").mkdir()
    for name in ("tls.pem", "ca.crt"):
        (tmp_path / "node-n1" / name).write_text(name)
    assert shown(playbook(*options)) == {"n1": [["tls.pem", "ca.crt"]]}


@pytest.mark.parametrize(
    ("host", "settings", "passes"),
    [
        ("n1", {}, True),
        ("n2", {}, True),
        ("slurm", {}, False),
        ("slurm", {"node_exporter_address": "10.1.0.2"}, True),
        ("slurm", {"slurm_node_address": "10.1.0.2"}, True),
        ("slurm", {"precheck_node_address": "10.1.0.2"}, True),
    ],
)
def test_a_node_without_an_address_is_reported_before_anything_is_changed(
    playbook: Playbook, tmp_path: Path, host: str, settings: dict[str, str], passes: bool
) -> None:
    """The host of Slurm has addresses, but no default route."""
    (task,) = tasks_of("precheck", *["Stop where no address of a node is known"] * 2)
    play = {"hosts": host, "gather_facts": False, "tasks": [task]}
    (tmp_path / "play.yml").write_text(json.dumps([facts(), play]))
    hosts = inventory(tmp_path, 1, compute=["n1", "n2", "slurm"])
    known = json.dumps({"precheck_node_address": "", **settings})
    done = playbook("-i", hosts, "-e", known, tmp_path / "play.yml")
    assert (done.returncode == 0) == passes, done.stdout
    assert passes or "Set node_exporter_address for it in the inventory" in " ".join(done.stdout.split())


@pytest.fixture
def limited_run(playbook: Playbook, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Has a run for one host learn what it needs of those that are left out, and shows values.

    Args:
        host: The one that the run is for.
        values: What is shown, an expression of Jinja.
        words: Further words of the command.
        groups: As for `inventory`.
        hosts: What the inventory has of hosts besides.
    """

    def run(
        host: str, values: str, *words: str, groups: dict[str, Any] | None = None, **hosts: Any
    ) -> subprocess.CompletedProcess[str]:
        path = inventory(tmp_path, 1, **(groups or {}))
        described = json.loads(path.read_text())
        described["all"]["hosts"] |= hosts
        path.write_text(json.dumps(described))
        left_out = {"name": "precheck", "tasks_from": "left_out"}
        tasks = [
            {"ansible.builtin.import_role": left_out, "tags": ["always"]},
            show(values) | {"tags": ["always"]},
        ]
        plays: list[dict[str, Any]] = [{"hosts": host, "gather_facts": False, "tasks": tasks}]
        plays[0]["roles"] = [{"role": "broker", "when": False}]
        (tmp_path / "play.yml").write_text(json.dumps(plays))
        known = json.dumps({"carme_head_address": "10.1.0.10", **SITE})
        return playbook("-i", path, "-e", known, "--limit", host, *words, tmp_path / "play.yml")

    return run


def away() -> dict[str, Any]:
    """The variables of a host that does not answer."""
    return {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": free_port()}


LimitedRun = Callable[..., subprocess.CompletedProcess[str]]


def test_a_run_for_the_head_alone_knows_where_slurm_and_exporters_are(limited_run: LimitedRun) -> None:
    """The broker may reach nothing else."""
    found = "[broker_addresses, hostvars['slurm'].ansible_facts.all_ipv4_addresses, precheck_left_out]"
    ((addresses, slurms, queried),) = shown(limited_run("head-1", found, groups=SLURM))["head-1"]
    assert slurms and set(slurms) <= set(addresses)
    assert set(queried) == {"slurm", "n1", "n2"}
    # Prometheus reads the exporters, and is no part of this run.
    words = ("--skip-tags", "monitoring")
    watched = SLURM | {"monitoring": ["head-1"]}
    assert shown(limited_run("head-1", "precheck_left_out", *words, groups=watched)) == {
        "head-1": [["slurm"]]
    }
    # The portal needs no addresses, nor does a broker that has been given some.
    words = ("--tags", "portal")
    assert shown(limited_run("head-1", "precheck_left_out", *words, groups=SLURM)) == {"head-1": [[]]}
    given = {"head-1": {"broker_addresses": ["10.1.0.2"]}}
    words = ("--tags", "broker")
    assert shown(limited_run("head-1", "precheck_left_out", *words, groups=SLURM, **given)) == {
        "head-1": [[]]
    }


def test_a_controller_that_does_not_answer_is_named(limited_run: LimitedRun) -> None:
    """Without its addresses the broker would lose Slurm."""
    done = limited_run("head-1", "precheck_left_out", groups=SLURM, slurm=away())
    text = " ".join(done.stdout.split())
    assert done.returncode == 2 and "--limit leaves slurm out, and it cannot be reached" in text, text
    assert "Set broker_addresses for the head in the inventory" in text


def test_a_run_for_a_node_alone_knows_the_addresses_of_the_head(limited_run: LimitedRun) -> None:
    """Its exporter allows all of them. A head that is away stops nothing: the inventory has its address."""
    found = "hostvars['head-1'].ansible_facts.all_ipv4_addresses | default([])"
    ((addresses,),) = shown(limited_run("n1", found)).values()
    assert addresses
    assert shown(limited_run("n1", found, **{"head-1": away()})) == {"n1": [[]]}
    assert shown(limited_run("n1", "precheck_left_out", "--tags", "users")) == {"n1": [[]]}
