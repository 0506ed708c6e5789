"""Install what the tests import, into the environment that runs this file.

The parts themselves are imported from the checkout (see `pythonpath` in pyproject.toml), so only their
dependencies are installed: read from each part's own pyproject.toml, so that no list is kept twice.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = {"carme", "carme-spawner", "carme-webui", "carme-monitoring", "carme-runtime"}


def project_name(requirement: str) -> str:
    """The bare, normalised name of a requirement such as ``carme[validation]>=0.1``."""
    name = requirement
    for separator in "[<>=!~; ":
        name = name.split(separator)[0]
    return name.strip().lower().replace("_", "-")


def requirements() -> list[str]:
    """All requirements of all parts, with their extras, except the parts themselves."""
    wanted: list[str] = []
    for file in sorted([*ROOT.glob("*/pyproject.toml"), *ROOT.glob("containers/*/pyproject.toml")]):
        project = tomllib.loads(file.read_text())["project"]
        wanted += project.get("dependencies", [])
        for extra in project.get("optional-dependencies", {}).values():
            wanted += extra
    return sorted({item for item in wanted if project_name(item) not in OURS})


if __name__ == "__main__":
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--requirement"]
    raise SystemExit(subprocess.call([*command, str(ROOT / "tests/requirements.txt"), *requirements()]))
