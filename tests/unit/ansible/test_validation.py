"""`validate.yml` of some hosts alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import ANSIBLE, Playbook

HEAD, NODE = "portal.example.org", "gpu-01.example.org"


@pytest.fixture
def options(tmp_path: Path) -> tuple[str | Path, ...]:
    """Options that check this node alone: images are in a temporary folder, and no unit is expected."""
    for name in ("base.sif", "base.json"):
        (tmp_path / name).touch(0o644)
    local: dict[str, Any] = {"ansible_connection": "local", "ansible_become": False}
    hosts = {
        # Where nobody answers: what needs the head must not be tried.
        "head": {"hosts": {HEAD: {"ansible_connection": "ssh", "ansible_host": "192.0.2.1"}}},
        "compute": {"hosts": {NODE: None, "gpu-02.example.org": None}},
        "all": {"vars": local},
    }
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    known = {"carme_images_directory": str(tmp_path), "carme_default_image": "base", "validation_units": []}
    words = ("-i", tmp_path / "hosts.json", "-e", json.dumps(known), "--limit", NODE)
    return (*words, ANSIBLE / "validate.yml")


def test_a_node_is_checked_without_the_head(
    playbook: Playbook, options: tuple[str | Path, ...], tmp_path: Path
) -> None:
    done = playbook(*options)
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, text
    assert "The hosts checked are well: " in text and "The site is well" not in text
    assert f"--limit leaves out: gpu-02.example.org, {HEAD}." in text
    assert f"Without {HEAD} no session was started" in text

    (tmp_path / "base.sif").unlink()
    done = playbook(*options)
    assert done.returncode == 2, done.stdout
    text = " ".join(done.stdout.split())
    assert "base.sif is missing" in text and "journey" not in text


def test_what_was_skipped_has_not_passed(playbook: Playbook, options: tuple[str | Path, ...]) -> None:
    checks = [{"name": "nodes", "ok": True}, {"name": "gpus", "ok": True, "skipped": True}]
    verdict = {"validation_verdict": {"ok": True, "checks": checks}}
    done = playbook(*options, "-e", json.dumps(verdict))
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, text
    assert "are well: 1 checks passed. Skipped: gpus; validation.json says why. --limit" in text
