"""Ansible as the tests need it: no host is reached, nothing outside a temporary folder is written."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patience import HANG

ANSIBLE = Path(__file__).resolve().parents[3] / "ansible"

Playbook = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def playbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playbook]:
    """Runs `ansible-playbook` with the tree's own configuration and a home of its own."""
    home = tmp_path_factory.mktemp("home")
    own = {
        "HOME": str(home),
        "ANSIBLE_HOME": str(home / "ansible"),
        "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        "LC_ALL": "C.UTF-8",
    }
    command = [sys.executable, Path(__file__).with_name("playbook_server.py")]
    server = subprocess.Popen(
        command, env=os.environ | own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin and server.stdout
    output, errors = home / "output", home / "errors"

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        assert server.stdin and server.stdout
        for file in (output, errors):
            file.write_bytes(b"")
        words = [str(word) for word in arguments]
        request = {"arguments": words, "environment": os.environ | own, "folder": str(ANSIBLE)}
        print(
            json.dumps(request | {"output": str(output), "errors": str(errors)}),
            file=server.stdin,
            flush=True,
        )
        if not select.select([server.stdout], [], [], HANG)[0]:
            raise subprocess.TimeoutExpired(words, HANG, output.read_text(), errors.read_text())
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())

    try:
        yield run
    finally:
        server.stdin.close()
        server.wait(HANG)
