"""Ansible as the tests need it: no host is reached, nothing outside a temporary folder is written."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from patience import HANG

ANSIBLE = Path(__file__).resolve().parents[3] / "ansible"

Playbook = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def playbook(tmp_path_factory: pytest.TempPathFactory) -> Playbook:
    """Runs `ansible-playbook` with the tree's own configuration and a home of its own."""
    home = tmp_path_factory.mktemp("home")

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "HOME": str(home),
            "ANSIBLE_HOME": str(home / "ansible"),
            "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
            "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "LC_ALL": "C.UTF-8",
        }
        command = [sys.executable, "-m", "ansible", "playbook", *map(str, arguments)]
        return subprocess.run(
            command, cwd=ANSIBLE, env=environment, capture_output=True, text=True, check=False, timeout=HANG
        )

    return run
