"""Install what the tests import, into the environment that runs this file.

The parts themselves are imported from the checkout (see `pythonpath` in pyproject.toml), so only their
dependencies are installed: read from each part's own pyproject.toml, so that no list is kept twice. Their
versions are those of constraints.txt, so that a release of somebody else's cannot fail a run.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tests/constraints.txt"
HEADER = """\
# The versions that the suites passed with. To renew them: install without this file, run ./test, then
# run `python tests/install_requirements.py --freeze` in that environment.
"""
OWN_PROJECTS = {"carme", "carme-spawner", "carme-webui", "carme-monitoring", "carme-runtime"}


def project_name(requirement: str) -> str:
    """The bare, normalised name of a requirement such as ``carme[validation]>=0.1``."""
    name = requirement
    for separator in "[<>=!~; ":
        name = name.split(separator)[0]
    return name.strip().lower().replace("_", "-")


def requirements(parts: list[str]) -> list[str]:
    """All requirements of these parts (none: of all), with their extras, except the parts themselves."""
    wanted: list[str] = []
    files = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("containers/*/pyproject.toml")]
    for file in sorted(file for file in files if not parts or file.parent.name in parts):
        project = tomllib.loads(file.read_text())["project"]
        wanted += project.get("dependencies", [])
        for extra in project.get("optional-dependencies", {}).values():
            wanted += extra
    return sorted({item for item in wanted if project_name(item) not in OWN_PROJECTS})


def install(parts: list[str], constrained: bool) -> int:
    """Install the requirements of these parts, or of all and of the tests; the exit code of pip."""
    # Python compiles what is imported, at its first import: most of these packages' files never are.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
    command = [*pip, *requirements(parts)]
    command += [] if parts else ["--requirement", str(ROOT / "tests/requirements.txt")]
    return subprocess.call([*command, "--constraint", str(CONSTRAINTS)] if constrained else command)


def freeze() -> None:
    """Write down the versions of this environment, which all suites have passed with."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "freeze"], check=True, capture_output=True, text=True
    )
    CONSTRAINTS.write_text(HEADER + listed.stdout)


def main() -> int:
    """Install the versions that are written down; where they cannot be had, what the requirements allow.

    Arguments: the folders of the parts whose requirements are installed; none: of all parts, and the tests'.
    """
    parts = sys.argv[1:]
    if parts == ["--freeze"]:
        freeze()
        return 0
    if not install(parts, constrained=True):
        return 0
    print(f"Versions of {CONSTRAINTS.name} cannot be had; installing others.", file=sys.stderr)
    return install(parts, constrained=False)


if __name__ == "__main__":
    raise SystemExit(main())
