"""The templates in a real Zabbix server with PostgreSQL: values of the real exporters arrive, triggers fire
and recover.

The node exporter is a process of its own with the simulated GPU library; the cluster exporter reports a
made-up site, served by its own code.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import simulated_gpus
from free_ports import free_port
from prometheus_client import CollectorRegistry
from real_zabbix import ROOT, Zabbix, zabbix

from carme.broker.overview import Overview
from carme.jobs import Cluster, Node, Partition
from carme_monitoring import zabbix as templates
from carme_monitoring.cluster.collector import ClusterCollector
from carme_monitoring.cluster.health import Answer
from carme_monitoring.serving import MetricsServer
from demo_site import wait_until
from patience import HANG

REPOSITORY = Path(__file__).resolve().parents[2]
USUAL = "used=4096 total=40960 power=200 energy=5000 temp=60 tensor=40"
PATIENCE = 2 * HANG

pytestmark = pytest.mark.skipif(
    not (ROOT / "usr/sbin/zabbix_server").exists(),
    reason="Zabbix is not installed; ./test monitoring fetches it",
)


@pytest.fixture(autouse=True)
def no_job_left() -> None:
    """Do nothing: these tests do not use the demo cluster, unlike the others of this folder."""


class Gpus:
    """What the node exporter sees."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def show(self, *lines: str) -> None:
        text = "".join(f"gpu uuid=GPU-{n} minor={n} {USUAL} {line}\n" for n, line in enumerate(lines))
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.rename(self.file)


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Gpus:
    found = Gpus(tmp_path_factory.mktemp("gpus") / "gpus")
    found.show("util=70", "util=0")
    return found


@pytest.fixture(scope="module")
def node(gpus: Gpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a node exporter."""
    folder, port = tmp_path_factory.mktemp("exporter"), free_port()
    library = simulated_gpus.build(folder)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{REPOSITORY / 'monitoring/src'}:{REPOSITORY / 'carme/src'}",
        "LD_LIBRARY_PATH": str(library.parent),
        "SIMULATED_NVML": str(gpus.file),
    }
    options = ["--listen", f"127.0.0.1:{port}", "--gpu-retry", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "carme_monitoring.node.exporter", *options], env=environment
    )
    yield f"http://127.0.0.1:{port}/metrics"
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster exporter of a site with two nodes."""
    now = datetime.now(UTC)
    nodes = [
        Node(name=name, cpus=8, memory_mb=1000, gpus={"a100": 4}, available=name == "n1")
        for name in ("n1", "n2")
    ]
    seen = Cluster(taken=now, partitions=[Partition(name="gpu", node_names=["n1", "n2"])], nodes=nodes)
    registry = CollectorRegistry()
    view = Overview(answered=now, cluster=seen)
    registry.register(ClusterCollector(lambda: view, lambda: {"portal": Answer(True, 0.1)}))
    port = free_port()
    server = MetricsServer(f"127.0.0.1:{port}", registry, None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{port}/metrics"
    server.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zabbix]:
    """A Zabbix that has imported the templates."""
    with zabbix() as running:
        file = tmp_path_factory.mktemp("template") / "carme.json"
        assert templates.main(file)
        every = {"createMissing": True, "updateExisting": True}
        parts = "template_groups host_groups templates items discoveryRules triggers graphs"
        rules = dict.fromkeys(parts.split(), every)
        # Twice: a site that updates imports what it has.
        for _ in range(2):
            assert running.ask("configuration.import", format="json", rules=rules, source=file.read_text())
        yield running


def add(server: Zabbix, template: str, url: str, name: str = "") -> str:
    """A host with this template; its number."""
    groups = server.ask("hostgroup.get", filter={"name": ["Carme nodes"]})
    found = server.ask("template.get", filter={"host": [template]})
    macros = [{"macro": "{$CARME.URL}", "value": url}, {"macro": "{$CARME.INTERVAL}", "value": "5s"}]
    return server.ask(
        "host.create",
        host=name or f"test {template}",
        groups=[{"groupid": groups[0]["groupid"]}],
        templates=[{"templateid": found[0]["templateid"]}],
        macros=macros,
    )["hostids"][0]


def values(server: Zabbix, host: str) -> dict[str, float]:
    """The last values of the host's items that have one."""
    items = server.ask("item.get", hostids=host, output=["key_", "lastvalue", "lastclock", "state", "error"])
    return {
        item["key_"]: float(item["lastvalue"])
        for item in items
        if item["lastclock"] != "0" and item["lastvalue"]
    }


def problems(server: Zabbix, host: str) -> set[str]:
    return {problem["name"] for problem in server.ask("problem.get", hostids=host)}


def test_values_of_a_node_arrive_and_a_lost_gpu_is_a_problem_until_it_is_back(
    server: Zabbix, node: str, gpus: Gpus, tmp_path: Path
) -> None:
    host = add(server, templates.NODE, node)

    def seen() -> dict[str, float] | None:
        found = values(server, host)
        wanted = {"carme.answers", "carme.gpu.utilization[GPU-0]", "carme.gpu.power[GPU-1]"}
        return found if wanted <= found.keys() else None

    found: Any = wait_until("values arrive in Zabbix", seen, timeout=PATIENCE)
    assert found["carme.gpu.utilization[GPU-0]"] == pytest.approx(70)
    assert found["carme.gpu.utilization[GPU-1]"] == 0
    assert found["carme.gpu.power[GPU-1]"] == 200
    assert found["carme.gpu.up[GPU-0]"] == 1
    names = {graph["name"]: graph["graphid"] for graph in server.ask("graph.get", hostids=host)}
    assert {"GPU 0: use", "GPU 1: use", "Memory of jobs"} <= names.keys()

    lost = "GPU 1 of test Carme node does not answer any more"
    assert lost not in problems(server, host)
    gpus.show("util=70", "util=0 lost=1")
    wait_until("the lost GPU is a problem", lambda: lost in problems(server, host), timeout=PATIENCE)
    gpus.show("util=70", "util=0")
    wait_until("the problem is over", lambda: lost not in problems(server, host), timeout=PATIENCE)
    for load in (20, 95, 60, 85):
        gpus.show(f"util={load}", "util=0")
        time.sleep(12)  # two or three values of each
    pictures = REPOSITORY / "artifacts/monitoring"
    pictures.mkdir(parents=True, exist_ok=True)
    server.picture(names["GPU 0: use"], pictures / "zabbix.png")


def test_errors_of_a_gpu_are_problems_from_the_first_on_and_a_reset_is_none(
    server: Zabbix, node: str, gpus: Gpus
) -> None:
    host = add(server, templates.NODE, node, "one with errors")
    ecc, xid = "carme.gpu.ecc[GPU-1]", "carme.gpu.xid[GPU-1]"

    def known(key: str, value: float) -> None:
        reported = f"{key} is {value:g}"
        wait_until(reported, lambda: values(server, host).get(key) == value, timeout=PATIENCE)

    def reported() -> set[str]:
        """All problems there ever were: those of a moment are over when somebody looks."""
        return {event["name"] for event in server.ask("event.get", hostids=host, value=1)}

    gpus.show("util=70", "util=0 ecc2=5")
    known(ecc, 5)
    known(xid, 0)
    gpus.show("util=70", "util=0 ecc2=0")
    known(ecc, 0)
    assert not {name for name in reported() if "memory errors" in name or "driver reports" in name}
    gpus.show("util=70", "util=0 ecc2=1 xid=48")
    for name in ("GPU 1 of {} has memory errors", "The driver reports errors of GPU 1 of {}"):
        problem = name.format("one with errors")
        wait_until(problem, lambda problem=problem: problem in reported(), timeout=PATIENCE)
    gpus.show("util=70", "util=0")


def test_a_server_that_was_away_goes_on_and_invents_nothing(server: Zabbix, node: str, gpus: Gpus) -> None:
    host = add(server, templates.NODE, node, "one that waits")
    key, lost = "carme.gpu.utilization[GPU-0]", "GPU 1 of one that waits does not answer any more"
    gpus.show("util=30", "util=0")
    wait_until(
        "a value arrives", lambda: values(server, host).get(key) == pytest.approx(30), timeout=PATIENCE
    )

    server.stop_server()
    away = time.time()
    gpus.show("util=90", "util=0 lost=1")
    time.sleep(15)  # three values that no item requests
    back = time.time()
    server.start_server()

    wait_until(
        "values arrive again", lambda: values(server, host).get(key) == pytest.approx(90), timeout=PATIENCE
    )
    wait_until("what is wrong is a problem", lambda: lost in problems(server, host), timeout=PATIENCE)
    item = server.ask("item.get", hostids=host, filter={"key_": key}, output=["itemid"])[0]["itemid"]
    shown = server.ask("history.get", history=0, itemids=item, output=["clock", "value"], sortfield="clock")
    known = [(int(entry["clock"]), round(float(entry["value"]))) for entry in shown]
    assert 30 in {value for clock, value in known if clock <= away}
    assert not [entry for entry in known if away + 1 < entry[0] < back - 1]
    assert {value for clock, value in known if clock > back} == {90}
    gpus.show("util=70", "util=0")
    wait_until("the problem is over", lambda: lost not in problems(server, host), timeout=PATIENCE)


def test_nodes_and_services_of_the_cluster_are_discovered(server: Zabbix, cluster: str) -> None:
    host = add(server, templates.CLUSTER, cluster)

    def seen() -> bool:
        return {"carme.node[n1]", "carme.node[n2]", "carme.service[portal]"} <= values(server, host).keys()

    wait_until("nodes are discovered", seen, timeout=PATIENCE)
    found = values(server, host)
    assert (found["carme.node[n1]"], found["carme.node[n2]"], found["carme.gpus"]) == (1, 0, 8)

    def hosts() -> set[str]:
        return {host["host"] for host in server.ask("host.get", filter={"host": ["carme-n1", "carme-n2"]})}

    wait_until("each node has a host", lambda: hosts() == {"carme-n1", "carme-n2"}, timeout=PATIENCE)
    linked = server.ask(
        "host.get",
        filter={"host": "carme-n1"},
        selectParentTemplates=["host"],
        selectMacros=["macro", "value"],
    )
    assert [template["host"] for template in linked[0]["parentTemplates"]] == [templates.NODE]
