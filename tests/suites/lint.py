"""Checks that take long, of what has changed since it passed them."""

from __future__ import annotations

import json
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from suites.environments import tests_environment
from suites.running import ROOT, Output
from suites.unchanged import Passed, key_of_files, keys_of_modules

__all__ = ["ansible_lint", "pyright"]

#: What ansible-lint checks, below the folder `ansible`.
PLAYBOOKS = ("site.yml", "validate.yml", "remove.yml", "beegfs.yml", "roles")


def pyright(output: Output, python: Path) -> int:
    """Check the types of modules; the exit code.

    A module that has passed, and all that it imports of the tree, is left out as long as it is the same.

    Args:
        output: Where pyright prints.
        python: The interpreter of the tests' environment.
    """
    command = ("pyright", "--pythonpath", python, "--level", "error")
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    about = json.dumps([tests_environment().name, options]).encode()
    included = _modules(options["include"])
    modules = included | _modules(options["extraPaths"])
    keys = keys_of_modules(ROOT, modules, options["extraPaths"], about)
    checked = [file for file in sorted(included) if not _is_left_out(file, options["exclude"])]
    passed = Passed("pyright")
    recent = passed.recent()
    outdated = [file for file in checked if keys[file] not in recent]
    if not _announce(output, "modules", len(outdated), len(checked)):
        return 0
    # All: those that it finds itself.
    named = outdated if len(outdated) < len(checked) else []
    code = output.call(*command, *(file.relative_to(ROOT) for file in named))
    if not code:
        passed.add(keys[file] for file in outdated)
    return code


def _modules(folders: list[str]) -> set[Path]:
    """The modules below these folders."""
    found = {file for folder in folders for file in (ROOT / folder).rglob("*.py*")}
    return {file for file in found if file.suffix in (".py", ".pyi")}


def _is_left_out(file: Path, patterns: list[str]) -> bool:
    """Whether pyright's `exclude` names a file, or a folder that it is in."""
    name = file.relative_to(ROOT).as_posix()
    return any(fnmatch(name, f"{pattern}{end}") for pattern in patterns for end in ("", "/*"))


def ansible_lint(output: Output) -> int:
    """Check playbooks and roles; the exit code. What has passed is left out as long as it is the same.

    Args:
        output: Where ansible-lint prints.
    """
    folder = ROOT / "ansible"
    files = [
        file
        for file in folder.rglob("*")
        if file.is_file() and file.relative_to(folder).parts[0] != "demo" and file.suffix != ".pyc"
    ]
    key = key_of_files(folder, files, json.dumps([tests_environment().name, PLAYBOOKS]).encode())
    passed = Passed("ansible-lint")
    is_outdated = key not in passed.recent()
    if not _announce(output, "files", len(files) if is_outdated else 0, len(files)):
        return 0
    code = output.call("ansible-lint", "--offline", "-q", *PLAYBOOKS, folder=folder)
    if not code:
        passed.add([key])
    return code


def _announce(output: Output, kind: str, outdated: int, count: int) -> bool:
    """Print how much is checked if that is not all; return whether anything is."""
    if outdated < count:
        text = f"{outdated} of {count} {kind} are checked: the others passed within a day and are the same."
        output.write(f"{text} ./test --all checks all.\n".encode())
    return outdated > 0
