"""Two users at work on the same node of the demo cluster: one attacks, and each attack is a test.

The attacks themselves are `carme.validation.attacks`, which `validate.yml` runs on a site. The report lies
in `artifacts/security/`.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from carme.validation.attacks import ATTACKS, markdown
from demo_site import DemoSite

REPORT = Path(__file__).resolve().parents[2] / "artifacts/security"
NAMES = {f"{attack.area}: {attack.name}": attack for attack in ATTACKS}


@pytest.fixture(scope="session")
def report() -> dict[str, Any]:
    """The report of all attacks: of the site's own check if it ran earlier in this run of the suites."""
    file = Path(os.environ.get("CARME_RESULTS", "")) / "attacks.json"
    found = json.loads(file.read_text() if file.is_file() else attacked(DemoSite()))
    REPORT.mkdir(parents=True, exist_ok=True)
    (REPORT / "two_users.json").write_text(json.dumps(found, indent=2) + "\n")
    (REPORT / "two_users.md").write_text(markdown(found))
    return found


def attacked(demo: DemoSite) -> str:
    """The report of attacks that are made now."""
    demo.end_all_jobs()
    try:
        done = demo.run(
            "head",
            *("/opt/carme/venv/bin/python", "-m", "carme.validation.attacks"),
            *("--victim", "user1", "--attacker", "user2", "--image", "base"),
            *("--certificate", "/etc/carme/tls/site.pem"),
            data=f"{demo.passwords['user1']}\n{demo.passwords['user2']}\n",
            timeout=800,
            check=False,
        )
    finally:
        demo.end_all_jobs()
    print(done.stderr)
    if done.returncode not in (0, 1):
        # The run ends: without a report no test of this file can pass.
        pytest.exit(f"The attacks could not be made: {done.stderr[-5000:]}", returncode=1)
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_attack_is_stopped(report: dict[str, Any], name: str) -> None:
    attacks = {attack["name"]: attack for attack in report["attacks"]}
    if NAMES[name].needs_metrics and name not in attacks:
        pytest.skip("this demo has no Prometheus; ./demo up --monitoring installs it")
    attack = attacks[name]
    assert attack["stopped"], f"The attacker {attack['what']}: {attack['how']}"
    assert attack["ok"], f"The same does not work for a user who may do it: {attack['control']}"


def test_both_users_were_on_the_same_node(report: dict[str, Any]) -> None:
    assert report["fixture"]["node"] in ("n1", "n2")
    assert len(report["fixture"]["victims_gpus"]) == 1
