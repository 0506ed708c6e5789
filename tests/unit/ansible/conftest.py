"""Ansible as the tests need it: no host is reached, nothing outside a temporary folder is written."""

import base64
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import HANG

ANSIBLE = Path(__file__).resolve().parents[3] / "ansible"

Playbook = Callable[..., subprocess.CompletedProcess[str]]

#: Facts that setup would gather of a host; that takes longer than the tasks of most roles.
FACTS = {"default_ipv4": {"address": "10.1.0.5"}, "all_ipv4_addresses": ["10.1.0.5"]}
#: What a check of the role carme has refused, where a rescue comes after it.
REFUSALS = "ansible_failed_result.results | map(attribute='msg', default='') | select | list"


def show(values: str) -> dict[str, Any]:
    """A task that shows values to the test.

    No module runs for it, as one would to write them to a file: that takes two programs of Python.

    Args:
        values: An expression of Jinja.
    """
    shown = f"shown:{{{{ inventory_hostname }}}}:{{{{ {values} | to_json | b64encode }}}}"
    return {"ansible.builtin.debug": {"msg": shown}}


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, list[Any]]:
    """What the tasks of a run have shown, by host and in their order; the run must have succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[Any]] = {}
    for host, text in re.findall(r"shown:([^:\s]+):([A-Za-z0-9+/=]+)", done.stdout):
        found.setdefault(host, []).append(json.loads(base64.b64decode(text)))
    return found


class Playbooks:
    """Runs `ansible-playbook` with the tree's own configuration, by `playbook_server.py`.

    Args:
        home: A folder for what it writes.
    """

    def __init__(self, home: Path) -> None:
        self._own = {
            "HOME": str(home),
            "ANSIBLE_HOME": str(home / "ansible"),
            "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
            "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "LC_ALL": "C.UTF-8",
        }
        self._output, self._errors = home / "output", home / "errors"
        self._server: subprocess.Popen[str] | None = None

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run it with these arguments."""
        for file in (self._output, self._errors):
            file.write_bytes(b"")
        words = [str(word) for word in arguments]
        try:
            code = self._code({"arguments": words, "folder": str(ANSIBLE)})
        except BaseException:
            self._kill()
            raise
        return subprocess.CompletedProcess(words, code, self._output.read_text(), self._errors.read_text())

    def _code(self, request: dict[str, object]) -> int:
        server = self._server = self._server or self._begin()
        assert server.stdin and server.stdout
        request |= {"environment": os.environ | self._own}
        request |= {"output": str(self._output), "errors": str(self._errors)}
        print(json.dumps(request), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], HANG)[0]:
            raise subprocess.TimeoutExpired("ansible-playbook", HANG, self._output.read_text())
        return int(server.stdout.readline())

    def _begin(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, Path(__file__).with_name("playbook_server.py")],
            env=os.environ | self._own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def _kill(self) -> None:
        """End the server together with a run that hangs."""
        if self._server:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None

    def end(self) -> None:
        """End the server."""
        if self._server:
            assert self._server.stdin
            self._server.stdin.close()
            self._server.wait(HANG)


@pytest.fixture(scope="session")
def playbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playbook]:
    """Runs `ansible-playbook` with the tree's own configuration and a home of its own."""
    playbooks = Playbooks(tmp_path_factory.mktemp("home"))
    yield playbooks.run
    playbooks.end()
