"""Both inventories make a complete site: what the roles write from them is what its readers accept."""

import grp
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from real_prometheus import promtool
from sites import own_24_11

import carme.config
from carme_monitoring.certificates import Entry, make

from .conftest import ANSIBLE, REFUSALS, Playbook, show, shown

TEMPLATES = {
    "carme.toml": "base/templates/carme.toml.j2",
    "slurm.conf": "slurm_common/templates/slurm.conf.j2",
    "gres.conf": "slurm_common/templates/gres.conf.j2",
    "authority.json": "monitoring_authority/templates/table.json.j2",
    "prometheus.yml": "prometheus/templates/prometheus.yml.j2",
    "alertmanager.yml": "prometheus/templates/alertmanager.yml.j2",
    "carme-nodes.json": "prometheus/templates/nodes.json.j2",
    "exempt.yml": "prometheus/templates/exempt.yml.j2",
    "web.yml": "prometheus/templates/web.yml.j2",
    "carme.conf": "reverse_proxy/templates/carme.conf.j2",
}
# Runs only the checks of the role carme, then shows what the templates give: nothing is written to the host.
RENDER = {
    "hosts": "head",
    "connection": "local",
    "gather_facts": False,
    "vars": {"ansible_become": False},
    "roles": [
        "carme",
        *({"role": r, "when": False} for r in ("slurm_common", "reverse_proxy", "prometheus")),
    ],
    "tasks": [
        show("texts")
        | {
            "vars": {
                "ansible_facts": {"os_family": "Debian"},
                "texts": {
                    name: f"{{{{ lookup('template', roles ~ '/{path}') }}}}"
                    for name, path in TEMPLATES.items()
                },
            }
        }
    ],
}
#: What a task of the role reverse_proxy has found.
REGISTERED = {"reverse_proxy_ipv6": {"stat": {"exists": True}}}
ACME = "https://acme.example.org/directory"
NO_NAME: dict[str, object] = {
    "reverse_proxy_acme_directory": ACME,
    "reverse_proxy_certificate": "",
    "carme_site_url": "https://10.1.0.10",
}
DEMO_HOSTS = {
    "head": {"hosts": {"head": {"ansible_connection": "local"}}},
    "compute": {"hosts": {"n1": {}, "n2": {}}},
}
DEMO_SETTINGS = {
    "demo_gpus_per_node": 4,
    "site_url": "https://localhost:8443",
    "demo_users": [{"name": "user1", "password": "secret", "uid": 2001, "admin": False}],
    "carme_head_address": "10.77.0.2",
}


@dataclass
class Rendered:
    """The rendered templates."""

    folder: Path

    def lines(self, name: str) -> list[str]:
        return [line for line in (self.folder / name).read_text().splitlines() if line and line[0] != "#"]

    def settings(self) -> dict[str, str]:
        """The lines KEY=value of slurm.conf that are not about nodes or partitions."""
        pairs = [line.split("=", 1) for line in self.lines("slurm.conf") if " " not in line.split("=", 1)[0]]
        return {key: value for key, value in pairs if key not in ("NodeName", "PartitionName")}


def demo_arguments(folder: Path) -> list[str]:
    hosts, settings = folder / "hosts.yml", folder / "settings.json"
    hosts.write_text(json.dumps(DEMO_HOSTS))
    settings.write_text(json.dumps(DEMO_SETTINGS))
    return ["-i", "inventories/demo", "-i", str(hosts), "-e", f"@{settings}"]


def render(
    playbook: Playbook, folder: Path, arguments: list[str], address: str = "node_exporter_address=10.1.0.11"
) -> Rendered:
    play = folder / "render.yml"
    play.write_text(json.dumps([RENDER]))
    facts = ("-e", f"roles={ANSIBLE / 'roles'}", "-e", address, "-e", json.dumps(REGISTERED))
    ((texts,),) = shown(playbook(*arguments, *facts, play)).values()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return Rendered(folder)


@pytest.fixture(scope="module")
def example(playbook: Playbook, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(playbook, tmp_path_factory.mktemp("example"), ["-i", "inventories/example"])


@pytest.fixture(scope="module")
def demo(playbook: Playbook, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    folder = tmp_path_factory.mktemp("demo")
    return render(playbook, folder, demo_arguments(folder))


def test_the_example_makes_a_site_configuration_that_carme_accepts(example: Rendered) -> None:
    settings = carme.config.load(example.folder / "carme.toml")
    assert settings.site.url == "https://carme.example.org"
    assert settings.slurm.cluster == "example"
    assert settings.sessions.maximum_minutes == 2880
    assert settings.portal.database == "postgresql:///carme-portal"
    assert settings.site.time_zone == "Europe/Berlin"
    assert settings.monitoring.policy.alerts and not settings.monitoring.policy.stop
    assert settings.booking_policy("gpu").longest_minutes == 720
    assert (settings.booking_policy("cpu").share_percent, settings.session_policy("gpu").idle_minutes) == (
        25,
        240,
    )


def test_the_demo_makes_a_site_configuration_that_carme_accepts(demo: Rendered) -> None:
    settings = carme.config.load(demo.folder / "carme.toml")
    assert settings.site.url == "https://localhost:8443"
    assert settings.hub.listen == "https://10.77.0.2:8081"
    assert list(settings.broker.services) == ["carme-hub", "carme-portal"]


def test_the_site_with_login_hosts_is_complete(playbook: Playbook, tmp_path: Path) -> None:
    own_24_11.write_inventory(tmp_path / "inventory", dict.fromkeys(own_24_11.USERS, "secret"))
    known = json.dumps({"carme_head_address": "10.82.0.2", "ansible_become": False})
    rendered = render(playbook, tmp_path, ["-i", str(tmp_path / "inventory"), "-e", known])
    settings = carme.config.load(rendered.folder / "carme.toml")
    assert settings.portal.database == "postgresql:///carme-portal"
    assert settings.oidc.issuer == own_24_11.ISSUER
    nodes = [line.split()[0] for line in rendered.lines("slurm.conf") if line.startswith("NodeName=")]
    assert nodes == [f"NodeName={name}" for name in own_24_11.NODES]
    commands = yaml.safe_load((tmp_path / "inventory/hosts.yml").read_text())["slurm_client"]["hosts"]
    assert set(own_24_11.LOGIN) < set(commands)


def test_the_example_describes_its_nodes_to_slurm(example: Rendered) -> None:
    nodes = [line for line in example.lines("slurm.conf") if line.startswith("NodeName=")]
    assert len(nodes) == 10
    assert "NodeName=gpu01.example.org CPUs=128 RealMemory=1000000 Gres=gpu:a100:4 Sockets=2" in nodes[0]
    assert "Gres=gpu:h200:8" in nodes[-1]
    assert example.settings()["AccountingStorageTRES"] == "gres/gpu,gres/gpu:a100,gres/gpu:h200"
    partitions = [line for line in example.lines("slurm.conf") if line.startswith("PartitionName=")]
    assert [("Default=YES" in line, "MaxTime=60 " in line) for line in partitions] == [
        (True, False),
        (False, True),
    ]
    assert len(example.lines("gres.conf")) == 8 * 4 + 2 * 8


@pytest.mark.parametrize("site", ["example", "demo"])
def test_slurm_fences_jobs_and_keeps_accounts(site: str, request: pytest.FixtureRequest) -> None:
    settings = request.getfixturevalue(site).settings()
    assert settings["ProctrackType"] == "proctrack/cgroup"
    assert settings["JobContainerType"] == "job_container/tmpfs"
    assert settings["PrologFlags"] == "Contain"
    assert "associations" in settings["AccountingStorageEnforce"]
    assert "job_comment" in settings["AccountingStoreFlags"]


def test_the_demo_may_replace_a_setting_of_slurm_and_add_one(demo: Rendered) -> None:
    settings = demo.settings()
    assert settings["TaskPlugin"] == "task/cgroup"
    assert settings["SlurmdTimeout"] == "30"
    assert len([line for line in demo.lines("slurm.conf") if line.startswith("TaskPlugin=")]) == 1


@pytest.mark.parametrize(("site", "count"), [("example", 10), ("demo", 2)])
def test_every_compute_node_has_a_certificate_of_its_own(
    site: str, count: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    table: list[Entry] = json.loads((request.getfixturevalue(site).folder / "authority.json").read_text())
    nodes = [entry for entry in table if entry["name"].startswith("node-")]
    assert len(nodes) == count
    assert all(entry.get("hosts", [])[-1] == "10.1.0.11" and "client" not in entry for entry in nodes)
    group = grp.getgrgid(os.getgid()).gr_name
    for entry in table:
        entry["group"] = group
    result = make(tmp_path / "monitoring", table)
    assert set(result) == {"authority", *(entry["name"] for entry in table)}


def test_the_broker_finds_exporters_by_the_names_that_slurm_has_and_at_their_port(
    playbook: Playbook, example: Rendered, tmp_path: Path
) -> None:
    values = {"carme_node_name": "{{ inventory_hostname_short }}", "carme_node_exporter_port": 9777}
    short = render(playbook, tmp_path, ["-i", "inventories/example", "-e", json.dumps(values)])

    def table(rendered: Rendered) -> list[Entry]:
        entries: list[Entry] = json.loads((rendered.folder / "authority.json").read_text())
        nodes = [entry for entry in entries if entry["name"].startswith("node-")]
        return [{**entry, "group": grp.getgrgid(os.getgid()).gr_name} for entry in nodes]

    assert short.lines("slurm.conf")[-3].startswith("NodeName=gpu10 ")
    assert table(short)[-1].get("hosts") == ["gpu10.example.org", "gpu10", "10.1.0.11"]
    # A site that gives its nodes other names gets new certificates by its next run.
    make(tmp_path / "monitoring", table(example))
    assert set(make(tmp_path / "monitoring", table(short))) == {entry["name"] for entry in table(short)}
    assert make(tmp_path / "monitoring", table(short)) == []
    assert carme.config.load(short.folder / "carme.toml").monitoring.exporter_port == 9777
    assert carme.config.load(example.folder / "carme.toml").monitoring.exporter_port == 9750
    assert "exporter_port" not in (example.folder / "carme.toml").read_text()


def test_exporters_are_read_where_slurm_reaches_the_nodes(playbook: Playbook, tmp_path: Path) -> None:
    found = render(playbook, tmp_path, ["-i", "inventories/example"], "precheck_node_address=10.1.0.12")
    entries: list[Entry] = json.loads((found.folder / "authority.json").read_text())
    assert entries[0].get("hosts") == ["gpu01.example.org", "10.1.0.12"]
    nodes = json.loads((found.folder / "carme-nodes.json").read_text())
    assert [node["targets"] for node in nodes] == [["10.1.0.12:9750"]] * len(nodes)


@pytest.mark.parametrize("site", ["example", "demo"])
def test_prometheus_accepts_its_configuration(
    site: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rendered = request.getfixturevalue(site)
    text = (rendered.folder / "prometheus.yml").read_text()
    assert {job["job_name"] for job in yaml.safe_load(text)["scrape_configs"]} == {
        "carme-nodes",
        "carme-cluster",
        "prometheus",
    }
    nodes = json.loads((rendered.folder / "carme-nodes.json").read_text())
    assert nodes[0]["targets"] == ["10.1.0.11:9750"]
    alerts = yaml.safe_load((rendered.folder / "alertmanager.yml").read_text())
    wanted = {alerts["route"]["receiver"], *(route["receiver"] for route in alerts["route"]["routes"])}
    assert wanted <= {receiver["name"] for receiver in alerts["receivers"]}
    checker = promtool()
    # Use files of this test instead of those that it names on the head.
    place = tmp_path / "monitoring"
    group = grp.getgrgid(os.getgid()).gr_name
    make(place, [{"name": "prometheus", "group": group, "hosts": ["127.0.0.1"], "client": True}])
    (tmp_path / "carme-rules").mkdir()
    for file in (ANSIBLE / "roles/prometheus/files/rules").glob("*.yml"):
        shutil.copy(file, tmp_path / "carme-rules")
    shutil.copy(rendered.folder / "exempt.yml", tmp_path / "carme-rules")
    shutil.copy(rendered.folder / "carme-nodes.json", tmp_path)
    for what, name in (("config", "prometheus.yml"), ("web-config", "web.yml")):
        text = (rendered.folder / name).read_text()
        text = text.replace("/etc/carme/monitoring", str(place)).replace("/etc/prometheus", str(tmp_path))
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            [checker, "check", what, tmp_path / name], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_reverse_proxy_overwrites_what_clients_say_about_themselves(demo: Rendered) -> None:
    text = (demo.folder / "carme.conf").read_text()
    assert "listen 8443 ssl" in text
    assert "proxy_set_header X-Forwarded-For $remote_addr;" in text
    assert "$proxy_add_x_forwarded_for" not in text


@pytest.mark.parametrize("inventory", ["demo", "example"])
def test_the_playbooks_are_well_formed(playbook: Playbook, tmp_path: Path, inventory: str) -> None:
    arguments = demo_arguments(tmp_path) if inventory == "demo" else ["-i", "inventories/example"]
    done = playbook("--syntax-check", *arguments, "site.yml", "validate.yml")
    assert done.returncode == 0, done.stderr
    assert "Could not match" not in done.stderr


WRONG: list[tuple[dict[str, object], str]] = [
    ({"carme_site_url": "http://carme.example.org/"}, "must be https://HOST or https://HOST:PORT"),
    ({"carme_users": [{"name": "ada"}, {"name": "ada"}]}, "names an account twice"),
    ({"carme_users": [{"name": "root", "uid": 0}]}, "uids below carme_minimum_uid (1000)"),
    ({"reverse_proxy_acme_directory": ACME}, "no reverse_proxy_certificate or reverse_proxy_port"),
    (NO_NAME, "A certificate by ACME needs the https:// address of a server's directory"),
]


def test_a_wrong_inventory_is_refused_with_a_sentence(playbook: Playbook, tmp_path: Path) -> None:
    """All in one run, in which each refusal is caught."""
    checks = [{"ansible.builtin.import_role": {"name": "carme"}}]
    tasks = [{"vars": wrong, "block": checks, "rescue": [show(REFUSALS)]} for wrong, _ in WRONG]
    about = {"hosts": "head", "connection": "local", "gather_facts": False, "tasks": tasks}
    play = tmp_path / "check.yml"
    play.write_text(json.dumps([about]))
    done = playbook("-i", "inventories/example", "-e", "ansible_become=false", play)
    (found,) = shown(done).values()
    for messages, (_, sentence) in zip(found, WRONG, strict=True):
        assert [message for message in messages if sentence in message], messages


@pytest.mark.parametrize(
    ("release", "certificate", "expected"),
    [
        (7, "", {"+storeMgmtdDirectory = {0}/management", "+storeStorageDirectory = {0}/one,{0}/two"}),
        (8, "PEM", {'+auth-file = "{0}/conn.auth"', '+tls-key-file = "{0}/key.pem"'}),
    ],
)
def test_a_check_run_would_set_up_beegfs_by_its_release(
    playbook: Playbook, tmp_path: Path, release: int, certificate: str, expected: set[str]
) -> None:
    # In check mode: BeeGFS itself cannot be here, so its programs are only found.
    for name in ("beegfs-mgmtd", "beegfs-meta", "beegfs-storage"):
        (tmp_path / name).touch()
    secret = "0123456789abcdef" * 2
    variables = {
        "beegfs_release": release,
        "beegfs_secret": secret,
        "beegfs_management_directory": f"{tmp_path}/management",
        "beegfs_metadata_directory": f"{tmp_path}/metadata",
        "beegfs_storage_directories": [f"{tmp_path}/one", f"{tmp_path}/two"],
        "beegfs_tls_certificate": certificate,
        "beegfs_tls_key": certificate and "not to be shown",
        "beegfs_configuration": str(tmp_path),
        "beegfs_programs": str(tmp_path),
        "ansible_connection": "local",
        "ansible_become": False,
    }
    groups = ("beegfs_management", "beegfs_metadata", "beegfs_storage", "head", "compute")
    inventory = {name: {"hosts": {"one": None}} for name in groups} | {"all": {"vars": variables}}
    (tmp_path / "hosts.json").write_text(json.dumps(inventory))
    done = playbook("--check", "--diff", "-i", tmp_path / "hosts.json", "beegfs.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = set(done.stdout.splitlines())
    common = {"+connAuthFile = {0}/conn.auth", "+storeMetaDirectory = {0}/metadata", "+sysMgmtdHost = one"}
    assert {line.format(tmp_path) for line in expected | common} <= lines
    assert secret not in done.stdout and "not to be shown" not in done.stdout
    assert not (tmp_path / "conn.auth").exists()


def test_beegfs_without_a_secret_is_refused(playbook: Playbook, tmp_path: Path) -> None:
    inventory = {"beegfs_management": {"hosts": {"one": {"ansible_connection": "local"}}}}
    (tmp_path / "hosts.json").write_text(json.dumps(inventory))
    done = playbook("--check", "-i", tmp_path / "hosts.json", "beegfs.yml")
    assert done.returncode and "a beegfs_secret of at least 32 characters" in done.stdout
