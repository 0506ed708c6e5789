"""Lint leaves out what has passed only as long as all that decides about it is the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from suites import lint, unchanged

#: Ways in which `pack/a.py` may import `pack/b.py`.
IMPORTS = [
    "import pack.b",
    "import os, pack.b as c",
    "from pack import b",
    "from pack import c, b",
    "from pack.b import x",
    "from pack import *",
    "from . import b",
    "from .b import x",
    "from ..pack.b import x",
    "import os; import pack.b",
    "from pack import \\\n    b",
    "from pack import (  # it is odd (really)\n    c,  # (c)\n    b,\n)",
    "if True:\n    from pack import b",
    "try: import b\nexcept ImportError: pass",
]
CONFIGURATION = """[tool.pyright]
include = ["src"]
extraPaths = ["src"]
exclude = ["**/.*", "src/native"]
{more}
"""


class Printed:
    """Where a check prints; it notes commands in place of running them.

    Args:
        code: How they end.
    """

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.commands: list[list[str]] = []
        self.text = ""

    def call(self, *command: str | Path, folder: Path | None = None) -> int:
        self.commands.append([str(word) for word in command])
        return self.code

    def write(self, text: bytes) -> None:
        self.text += text.decode()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree in which `main` imports `pack/a.py`, which imports `pack/b.py`; results are saved beside it."""
    top = tmp_path / "tree"
    files = {
        "pyproject.toml": CONFIGURATION.format(more=""),
        "src/main.py": "from pack.a import y\n",
        "src/alone.py": "",
        "src/pack/__init__.py": "",
        "src/pack/a.py": "from pack import b\n",
        "src/pack/b.py": "",
        "src/pack/c.py": "",
        "src/native/d.py": "",
        "ansible/site.yml": "- hosts: all\n",
        "ansible/demo/x.py": "",
    }
    for name, content in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(content)
    monkeypatch.setattr(lint, "ROOT", top)
    monkeypatch.setattr(unchanged, "CACHE", tmp_path / "cache")
    monkeypatch.delenv(unchanged.ALL, raising=False)
    return top


def keys(tree: Path, about: bytes = b"") -> dict[str, str]:
    found = unchanged.keys_of_modules(tree, (tree / "src").rglob("*.py"), ["src"], about)
    return {file.relative_to(tree / "src").as_posix(): key for file, key in found.items()}


def changed(tree: Path, change: Callable[[], object]) -> set[str]:
    """The modules whose keys are others after a change."""
    before = keys(tree)
    change()
    after = keys(tree)
    return {name for name in after if before.get(name) != after[name]}


@pytest.mark.parametrize("source", IMPORTS)
def test_what_imports_a_changed_module_has_changed(tree: Path, source: str) -> None:
    (tree / "src/pack/a.py").write_text(f"{source}\n")
    found = changed(tree, lambda: (tree / "src/pack/b.py").write_text("x = 1\n"))
    assert found == {"pack/b.py", "pack/a.py", "main.py"}


def test_a_package_belongs_to_what_is_imported_from_it(tree: Path) -> None:
    found = changed(tree, lambda: (tree / "src/pack/__init__.py").write_text("x = 1\n"))
    assert found == {"pack/__init__.py", "pack/a.py", "main.py"}


def test_a_file_that_an_import_may_mean_now_counts(tree: Path) -> None:
    (tree / "src/alone.py").write_text("import json\n")
    assert changed(tree, lambda: (tree / "src/json.py").write_text("")) == {"json.py", "alone.py"}


def test_keys_depend_on_versions_and_on_names(tree: Path) -> None:
    assert not set(keys(tree, b"1").values()) & set(keys(tree, b"2").values())
    file = tree / "src/alone.py"
    assert changed(tree, lambda: file.rename(file.with_name("renamed.py"))) == {"renamed.py"}


def test_modules_that_import_each_other_end(tree: Path) -> None:
    (tree / "src/pack/b.py").write_text("from pack import a\n")
    found = changed(tree, lambda: (tree / "src/pack/a.py").write_text("from pack import b\nx = 1\n"))
    assert found == {"pack/a.py", "pack/b.py", "main.py"}


def types(code: int = 0) -> list[list[str]]:
    """Runs the check of types; the modules that it named, for each command."""
    printed = Printed(code)
    found: Any = printed
    assert lint.pyright(found, Path("python")) == (code if printed.commands else 0)
    return [[word for word in command if word.endswith(".py")] for command in printed.commands]


def test_types_are_checked_where_something_has_changed(tree: Path) -> None:
    assert types() == [[]], "all of them, as pyright finds them"
    assert types() == []
    (tree / "src/pack/b.py").write_text("x = 1\n")
    changed = ["src/main.py", "src/pack/a.py", "src/pack/b.py"]
    assert [sorted(names) for names in types(code=1)] == [changed]
    assert [sorted(names) for names in types()] == [changed], "what failed is checked again"
    assert types() == []
    (tree / "pyproject.toml").write_text(CONFIGURATION.format(more='pythonVersion = "3.11"'))
    assert types() == [[]]


def test_a_module_that_pyright_leaves_out_is_not_named(tree: Path) -> None:
    types()
    (tree / "src/alone.py").write_text("x = 1\n")
    assert types() == [["src/alone.py"]]


def test_all_is_checked_on_request(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types()
    monkeypatch.setenv(unchanged.ALL, "yes")
    assert types() == [[]]
    monkeypatch.delenv(unchanged.ALL)
    assert types() == [], "what that has shown counts later"


def test_results_count_for_a_day(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types()
    monkeypatch.setattr(unchanged, "SECONDS", 0)
    assert types() == [[]]


@pytest.mark.parametrize("content", ["", "[]", '{"a": "b"}', "\0"])
def test_a_file_of_results_that_is_broken_counts_for_none(tree: Path, content: str) -> None:
    types()
    (file,) = (unchanged.CACHE / "passed").iterdir()
    file.write_text(content)
    assert types() == [[]]
    assert types() == []
    assert json.loads(file.read_text())


def test_playbooks_are_checked_when_they_have_changed(tree: Path) -> None:
    def check(code: int = 0) -> int:
        printed = Printed(code)
        found: Any = printed
        assert lint.ansible_lint(found) == (code if printed.commands else 0)
        assert printed.commands or "0 of 1 files are checked" in printed.text
        return len(printed.commands)

    assert [check(code=2), check(), check()] == [1, 1, 0]
    (tree / "ansible/demo/x.py").write_text("x = 1\n")
    assert check() == 0
    (tree / "ansible/.ansible-lint").write_text("---\n")
    assert check() == 1
