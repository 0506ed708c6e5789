"""The broker's Python gets the pyslurm that the inventory names, and starts anew for it alone."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pip
import pytest
import yaml

TASKS = Path(__file__).resolve().parents[3] / "ansible/roles/broker/tasks/pyslurm.yml"
NAME = "pyslurm-24.11.0-py3-none-any.whl"
Playbook = Callable[..., subprocess.CompletedProcess[str]]


def wheel(folder: Path, text: str) -> Path:
    """A wheel as pip takes it, whose one module holds `text`."""
    about = "pyslurm-24.11.0.dist-info"
    files = {
        "pyslurm.py": text,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: pyslurm\nVersion: 24.11.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).decode().rstrip("=")
        record += f"{name},sha256={digest},{len(content)}\n"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        for name, content in {**files, f"{about}/RECORD": f"{record}{about}/RECORD,,\n"}.items():
            archive.writestr(name, content)
    return folder / NAME


@pytest.fixture
def run(playbook: Playbook, tmp_path: Path) -> Callable[..., tuple[bool, str]]:
    """Runs the role's tasks on an environment: whether the broker has to start anew, and its module."""
    venv, parts = tmp_path / "venv", tmp_path / "parts"
    parts.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    # A copy of this environment: to install pip takes longer than these tests.
    (packages,) = venv.glob("lib/python*/site-packages")
    own = Path(pip.__file__).parent
    for part in (own, *own.parent.glob("pip-*.dist-info")):
        shutil.copytree(part, packages / part.name)
    text = TASKS.read_text().replace("/opt/carme/parts", str(parts))
    (tmp_path / "tasks.yml").write_text(re.sub(r"^ +(owner|group): root\n", "", text, flags=re.MULTILINE))
    play: list[dict[str, Any]] = [
        {
            "hosts": "portal",
            "gather_facts": False,
            "tasks": [
                {"ansible.builtin.include_tasks": str(tmp_path / "tasks.yml")},
                {
                    "ansible.builtin.copy": {
                        "dest": str(tmp_path / "found"),
                        "content": "{{ {'changed': broker_pyslurm_changed} | to_json }}",
                    }
                },
            ],
        }
    ]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))

    def run(requirement: object) -> tuple[bool, str]:
        known = {"broker_pyslurm": str(requirement), "carme_venv": str(venv), "carme_with_umask": []}
        words = ["-i", "portal,", "-c", "local", "-e", json.dumps(known)]
        done = playbook(*words, tmp_path / "play.yml")
        assert done.returncode == 0, done.stdout + done.stderr
        code = (
            "import importlib.util; found = importlib.util.find_spec('pyslurm'); "
            "print(open(found.origin).read() if found else '')"
        )
        shown = subprocess.run([venv / "bin/python", "-c", code], capture_output=True, text=True, check=True)
        return json.loads((tmp_path / "found").read_text())["changed"], shown.stdout.strip()

    return run


def test_a_wheel_is_installed_once_and_another_build_of_it_again(
    run: Callable[..., tuple[bool, str]], tmp_path: Path
) -> None:
    assert run("") == (False, "")
    file = wheel(tmp_path / "wheels", "# first build")
    assert run(file) == (True, "# first build")
    assert run(file) == (False, "# first build")
    wheel(tmp_path / "wheels", "# other build")
    assert run(file) == (True, "# other build")
    # A requirement of pip, which what is there fulfils.
    assert run("pyslurm==24.11.*") == (False, "# other build")
    assert run("") == (True, "")
    assert run("") == (False, "")


def test_a_build_that_was_copied_but_not_installed_is_installed_by_the_next_run(
    run: Callable[..., tuple[bool, str]], tmp_path: Path
) -> None:
    file = wheel(tmp_path / "wheels", "# first build")
    run(file)
    wheel(tmp_path / "wheels", "# other build")
    # What a run leaves that ends after the copy.
    shutil.copy(file, tmp_path / "parts" / NAME)
    assert run(file) == (True, "# other build")
    assert run(file) == (False, "# other build")
