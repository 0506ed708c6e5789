"""Commands and nets start without modules that few runs need: each start imports what is named there."""

import subprocess
import sys

import pytest

from .conftest import clean_environment

IMPORTED = "import sys, {module}; print(*sorted({unneeded} & set(sys.modules)))"


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("carme_runtime.launcher.command", {"carme_runtime.traces.page", "ctypes", "importlib.metadata"}),
        ("carme_runtime.petri", {"carme_runtime.out_of_core.plan", "http.client", "xml.etree.ElementTree"}),
    ],
)
def test_what_few_runs_need_is_not_imported(module: str, unneeded: set[str]) -> None:
    program = IMPORTED.format(module=module, unneeded=unneeded)
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
