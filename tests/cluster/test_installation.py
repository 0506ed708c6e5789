"""The installed site: a second deployment changes nothing, and the site's own check says that all is well."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from demo_site import DemoSite, wait_until

ANSIBLE = ["env", "-C", "/opt/carme/src/ansible", "ansible-playbook"]
INVENTORY = ["-i", "inventories/demo", "-i", "/opt/carme/inventory/hosts.yml"]
VARIABLES = ["-e", "@/opt/carme/inventory/settings.json"]


@pytest.fixture(scope="module")
def second_deployment(demo: DemoSite) -> Iterator[Future[subprocess.CompletedProcess[str]]]:
    """It runs beside the site's check: it changes nothing, so neither of them notices the other."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(
            demo.run, "head", *ANSIBLE, *INVENTORY, *VARIABLES, "site.yml", check=False, timeout=900
        )


@pytest.mark.alone
def test_the_site_check_passes(
    demo: DemoSite, second_deployment: Future[subprocess.CompletedProcess[str]]
) -> None:
    done = demo.run("head", *ANSIBLE, *INVENTORY, *VARIABLES, "validate.yml", timeout=600, check=False)
    verdict = json.loads(demo.run("head", "cat", "/var/log/carme/validation.json").stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    assert verdict["ok"] is True
    assert all(check["ok"] for check in verdict["checks"])
    # It ran the attacks of one user on another: the suite that checks each attack need not run them again.
    attacks = demo.run("head", "cat", "/var/log/carme/security.json").stdout
    assert json.loads(attacks)["ok"] is True
    if results := os.environ.get("CARME_RESULTS"):
        (Path(results) / "attacks.json").write_text(attacks)


@pytest.mark.alone
def test_a_second_deployment_changes_nothing(
    demo: DemoSite, second_deployment: Future[subprocess.CompletedProcess[str]]
) -> None:
    done = second_deployment.result()
    assert done.returncode == 0, done.stdout[-4000:]
    recap = re.findall(
        r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", done.stdout, re.M
    )
    assert len(recap) == 1 + demo.settings.nodes
    for host, ok, changed, unreachable, failed in recap:
        assert int(ok) > 0
        assert (changed, unreachable, failed) == ("0", "0", "0"), f"{host}: {done.stdout[-6000:]}"


def test_gpus_are_constrained_to_the_job(demo: DemoSite) -> None:
    script = "for i in 0 1 2 3; do (: < /dev/nvidia$i) 2>&1; done; true"
    done = demo.run("head", "srun", "--gres=gpu:2", "--time=1", "sh", "-c", script, user="user1")
    message = done.stdout.lower()
    # An allotted device opens as far as the missing driver lets it (ENXIO); another's is forbidden (EPERM).
    assert message.count("no such device or address") == 2
    assert message.count("operation not permitted") == 2


def test_accounting_knows_users_gpus(demo: DemoSite) -> None:
    demo.run("head", "srun", "--gres=gpu:1", "--time=1", "true", user="user1")
    requested = ("sacct", "-X", "-n", "-P", "-u", "user1", "-o", "user,alloctres")
    wait_until("the accounting knows it", lambda: "gres/gpu=1" in demo.run("head", *requested).stdout)


def test_secrets_are_closed_to_users(demo: DemoSite) -> None:
    for path in ("/etc/carme/secrets", "/etc/munge/munge.key", "/var/log/carme/audit.jsonl"):
        done = demo.run("head", "sh", "-c", f"cat {path}/* {path}", user="user1", check=False)
        assert done.stdout == ""
    assert demo.run("head", "cat", "/etc/carme/carme.toml", user="user1").returncode == 0
