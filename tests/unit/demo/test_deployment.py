"""What is copied to the head, what Ansible gets, and what is shown while it works."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from carme_demo.deployment import FOLDERS, Progress, inventory, source_archive, source_files, variables
from carme_demo.settings import Settings
from carme_demo.stages import Stages

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "part/code.py").write_text("print()\n")
    (tmp_path / "run").write_text("#!/bin/sh\n")
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "link").symlink_to("run")
    (tmp_path / ".gitignore").write_text("__pycache__/\n*.sif\n# comment\n/artifacts/\n")
    for ignored in ("part/__pycache__/code.pyc", "part/big.sif", "artifacts/report"):
        (tmp_path / ignored).parent.mkdir(exist_ok=True)
        (tmp_path / ignored).write_text("x")
    return tmp_path


EXPECTED = [Path(".gitignore"), Path("link"), Path("part/code.py"), Path("run")]


def test_without_git_all_that_is_not_ignored_is_copied(tree: Path) -> None:
    assert source_files(tree) == EXPECTED


def test_with_git_changes_that_are_not_committed_are_copied_and_deleted_files_are_not(tree: Path) -> None:
    def git(*arguments: str) -> None:
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(tree)}
        subprocess.run(["git", "-C", str(tree), *arguments], check=True, capture_output=True, env=environment)

    git("init")
    (tree / "gone").write_text("x")
    git("add", "gone", "run")
    (tree / "gone").unlink()
    assert source_files(tree) == EXPECTED


def test_the_digest_follows_content_and_mode_but_not_time(tree: Path) -> None:
    part = tree / "carme"
    (tree / "part").rename(part)
    for name in ("run", "link"):
        (tree / name).rename(part / name)
    archive, digest = source_archive(tree)
    members = {member.name: member for member in tarfile.TarFile(fileobj=io.BytesIO(archive)).getmembers()}
    assert members["carme/run"].mode == 0o755
    assert members["carme/link"].linkname == "run"
    os.utime(part / "run", (1, 1))
    assert source_archive(tree)[1] == digest
    (part / "run").chmod(0o644)
    changed = source_archive(tree)[1]
    assert changed != digest
    (part / "run").write_text("#!/bin/zsh\n")
    assert source_archive(tree)[1] != changed


def test_what_no_site_is_made_of_is_neither_copied_nor_counted(tree: Path) -> None:
    for name in ("ansible/site.yml", "docs/users/files.md"):
        (tree / name).parent.mkdir(parents=True)
        (tree / name).write_text("x")
    archive, digest = source_archive(tree)
    for name in ("tests/test_x.py", "docs/developers/a.md", "README.md", "carmes/x"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
    assert source_archive(tree) == (archive, digest)
    assert tarfile.TarFile(fileobj=io.BytesIO(archive)).getnames() == [
        "ansible/site.yml",
        "docs/users/files.md",
    ]


def test_all_that_a_site_is_made_of_is_copied() -> None:
    """Parts and images, also where links in them lead."""
    roles = ROOT / "ansible/roles"
    parts = yaml.safe_load((roles / "base/defaults/main.yml").read_text())["base_parts_by_group"].values()
    (pack, *_) = yaml.safe_load((roles / "images/tasks/build.yml").read_text())
    needed = {"ansible", *(part for names in parts for part in names)}
    needed |= set(pack["ansible.builtin.command"]["argv"][4:])
    links = [file for file in map(ROOT.joinpath, source_files(ROOT)) if file.is_symlink()]
    needed |= {link.resolve().relative_to(ROOT).as_posix() for link in links}
    assert needed <= set(FOLDERS)


def test_ansible_reaches_the_head_locally_and_the_nodes_by_address() -> None:
    assert inventory(Settings(nodes=1)) == {
        "head": {"hosts": {"head": {"ansible_host": "10.77.0.2", "ansible_connection": "local"}}},
        "compute": {"hosts": {"n1": {"ansible_host": "10.77.0.11"}}},
    }


def test_ansible_gets_site_users_and_gpus() -> None:
    reported = variables(Settings(gpus=1, port=9443), {"user1": "a", "user2": "b", "admin": "c"})
    assert reported["site_url"] == "https://localhost:9443"
    assert reported["demo_gpus_per_node"] == 1
    assert reported["images_names"] == ["base", "torch"]
    assert reported["images_horovod"] is False
    assert reported["demo_users"] == [
        {"name": "user1", "uid": 2001, "admin": False, "password": "a"},
        {"name": "user2", "uid": 2002, "admin": False, "password": "b"},
        {"name": "admin", "uid": 2003, "admin": True, "password": "c"},
    ]


def play(lines: list[str]) -> tuple[Progress, list[str]]:
    shown = io.StringIO()
    progress = Progress(Stages(shown))
    for line in lines:
        progress.feed(line)
    return progress, [line.strip().split(" ")[0] for line in shown.getvalue().splitlines()]


def test_one_line_is_shown_per_role() -> None:
    progress, shown = play(
        [
            "PLAY [Prepare] ***",
            "TASK [Gathering Facts] ***",
            "ok: [head]",
            "TASK [base : Install] ***",
            "changed: [head]",
            "TASK [base : Configure] ***",
            "TASK [hub : Install] ***",
            "RUNNING HANDLER [hub : Restart] ***",
            "PLAY RECAP ***",
        ]
    )
    assert shown == ["Prepare", "base", "hub"]
    assert progress.failures == []


def test_the_first_failure_is_named_and_an_ignored_one_is_not() -> None:
    progress, _ = play(
        [
            "TASK [base : Try] ***",
            'fatal: [n1]: FAILED! => {"msg": "no"}',
            "...ignoring",
            "TASK [base : Install] ***",
            'failed: [n2] (item=x) => {"msg": "no"}',
        ]
    )
    assert progress.failures == ["base: Install (on n2)"]
