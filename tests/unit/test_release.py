"""A release is what is committed, of one version that the changelog names."""

import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from carme.cli.main import main as carme
from patience import HANG

ROOT = Path(__file__).resolve().parents[2]
RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / "release"), run_name="release")


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", root, *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A committed tree with the files that a release reads."""
    root = tmp_path / "tree"
    for name in (*(f"{part}/pyproject.toml" for part in RELEASE["PARTS"]), *RELEASE["MODULES"]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "docs").mkdir()
    (root / "docs/page.md").write_text("# A page\n")
    version = RELEASE["version_of"](ROOT)
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version} (2026-11-25)\n")
    subprocess.run(["git", "init", "-q", root], check=True)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "a")
    return root


def run(root: Path, *arguments: str) -> int:
    return RELEASE["main"]([*arguments], root)


def test_all_parts_and_the_command_have_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        carme(["--version"])
    assert capsys.readouterr().out == f"carme {RELEASE['version_of'](ROOT)}\n"


def test_the_source_tree_has_the_documentation_and_a_checksum(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert run(tree, "--source-only", str(folder)) == 0
    version = RELEASE["version_of"](ROOT)
    archive = folder / f"carme-{version}.tar.gz"
    with tarfile.open(archive) as opened:
        assert {f"carme-{version}/docs/page.md", f"carme-{version}/carme/pyproject.toml"} <= set(
            opened.getnames()
        )
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert (folder / "SHA256SUMS").read_text() == f"{digest}  {archive.name}\n"


def shown(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True, text=True).stdout


def test_the_released_commit_has_the_tag_of_its_version(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "a")
        monkeypatch.setenv(f"{name}_EMAIL", "a@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    version = RELEASE["version_of"](ROOT)
    assert run(tree, "--source-only", str(tmp_path / "untagged")) == 0
    assert shown(tree, "tag") == ""
    for folder in ("first", "again"):
        assert run(tree, "--source-only", "--tag", str(tmp_path / folder)) == 0
    assert shown(tree, "describe", "--exact-match") == f"v{version}\n"
    (tree / "docs/page.md").write_text("# Another page\n")
    git(tree, "commit", "-q", "-a", "-m", "b")
    assert run(tree, "--source-only", "--tag", str(tmp_path / "later")) == 1
    assert f"The tag v{version} is that of another commit" in capsys.readouterr().err
    assert not (tmp_path / "later").exists()


@pytest.fixture
def documented(tree: Path) -> Path:
    """A tree with the site's own configuration, hook and theme, and two pages that link each other."""
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tree / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md, page.md]\n")
    hook = (ROOT / "docs/site_pages.py").read_text()
    (tree / "docs/site_pages.py").write_text(
        re.sub(r"(?s)(?<=ELSEWHERE = )\{.*?\n\}", '{"README.md": "index.md"}', hook)
    )
    (tree / "README.md").write_text("# Start\n\nSee [the page](docs/page.md#part).\n")
    (tree / "docs/page.md").write_text("# A page\n\n## Part\n\nA sentence of the page.\n")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "docs")
    return tree


def test_the_built_documentation_lies_beside_the_wheels(documented: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert run(documented, "--documentation-only", str(folder)) == 0
    name = f"carme-documentation-{RELEASE['version_of'](ROOT)}"
    archive = folder / f"{name}.tar.gz"
    with tarfile.open(archive) as opened:
        pages = {page: opened.extractfile(f"{name}/{page}.html") for page in ("index", "page")}
        found = {page: file.read().decode() for page, file in pages.items() if file}
    assert "A sentence of the page." in found["page"] and 'href="page.html#part"' in found["index"]
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert (folder / "SHA256SUMS").read_text() == f"{digest}  {archive.name}\n"


def test_documentation_with_a_broken_link_is_no_release(
    documented: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (documented / "docs/page.md").write_text("# A page\n\n[Nothing](#nothing)\n")
    git(documented, "commit", "-q", "-a", "-m", "broken")
    assert run(documented, "--documentation-only", str(tmp_path / "out")) == 1
    assert "mkdocs" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_the_documentation_needs_mkdocs_material(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(tree, "--documentation-only", str(tmp_path / "out")) == 1
    assert "There is no mkdocs-material" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_wheels_of_all_parts_are_built(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    real = subprocess.run

    def note(arguments: list[Any], **more: Any) -> Any:
        if "wheel" not in arguments:
            return real(arguments, **more)
        ran.append([str(word) for word in arguments])
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(subprocess, "run", note)
    assert run(tree, "--wheels-only", str(tmp_path / "out")) == 0
    assert [word for word in ran[0] if word.startswith(str(tree))] == [
        str(tree / part) for part in RELEASE["PARTS"]
    ]


def test_the_collection_has_all_that_its_playbooks_read(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("ANSIBLE_HOME", str(tmp_path / "home"))
    shutil.copytree(ROOT / "ansible", tree / "ansible", ignore=shutil.ignore_patterns("demo"))
    for name in ("LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    (pack, *_) = yaml.safe_load((ROOT / "ansible/roles/images/tasks/build.yml").read_text())
    argv = pack["ansible.builtin.command"]["argv"]
    packed = [*argv[argv.index("{{ carme_archives }}") + 1 :], *RELEASE["PARTS"]]
    listed = ["git", "-C", ROOT, "ls-files", "-z", "--", "docs", *packed]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "b")
    folder, collections = tmp_path / "out", tmp_path / "collections"
    assert run(tree, "--collection-only", str(folder)) == 0
    version = RELEASE["version_of"](ROOT)

    def ansible(program: str, *arguments: str | Path) -> None:
        environment = os.environ | {"ANSIBLE_COLLECTIONS_PATH": str(collections), "LC_ALL": "C.UTF-8"}
        command = [sys.executable, "-m", "ansible", program, *map(str, arguments)]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=HANG)

    archive = folder / f"carme-carme-{version}.tar.gz"
    ansible("galaxy", "collection", "install", "--offline", archive, "-p", collections)
    installed = collections / "ansible_collections/carme/carme"
    assert "containers/images/build" in names
    assert [name for name in names if not os.path.lexists(installed / name)] == []
    monkeypatch.setenv("ANSIBLE_CONFIG", str(installed / "ansible.cfg"))
    playbooks = [f"carme.carme.{name}" for name in ("site", "validate", "remove", "beegfs")]
    ansible("playbook", *playbooks, "--syntax-check")
    assert not (installed / "ansible").exists()


def test_a_collection_needs_ansible_galaxy(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    git_program = shutil.which("git")
    assert git_program is not None
    (programs / "git").symlink_to(git_program)
    monkeypatch.setenv("PATH", str(programs))
    for which in (["--collection-only"], []):
        assert run(tree, *which, str(tmp_path / "out")) == 1
        assert "There is no ansible-galaxy" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["version", "changelog", "uncommitted", "not empty"])
def test_what_would_be_no_release_is_refused(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    folder = tmp_path / "out"
    if wrong == "version":
        file = tree / "webui/pyproject.toml"
        before = RELEASE["version_of"](ROOT)
        file.write_text(file.read_text().replace(f'"{before}"', '"9.9"', 1))
    elif wrong == "changelog":
        (tree / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    elif wrong == "uncommitted":
        (tree / "new").write_text("")
    else:
        folder.mkdir()
        (folder / "old.whl").write_text("")
    assert run(tree, "--source-only", str(folder)) == 1
    words = {
        "version": "different versions: carme ",
        "changelog": "has no section '## ",
        "uncommitted": "Not committed: new",
        "not empty": "is not empty",
    }
    assert words[wrong] in capsys.readouterr().err
