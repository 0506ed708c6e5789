"""`man carme`: made from the commands themselves, and read by `man`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from carme.cli.manual import pages
from carme.cli.parsing import parser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("man")
    # As the role of the hosts does, and the base image.
    command = [sys.executable, "-m", "carme.cli.manual", found / "man1"]
    source = Path(__file__).parents[3] / "containers/runtime/src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(source)])}
    subprocess.run([*command, "carme_runtime.launcher.command:parser"], env=environment, check=True)
    return found


def _shown(folder: Path, name: str) -> str:
    """Without what overstrikes."""
    man = shutil.which("man")
    if man is None:
        text = (folder / f"man1/{name}.1").read_text()
        return re.sub(r"\\f[BR]|\\&", "", text).replace(r"\-", "-")
    environment = {"PATH": os.environ["PATH"], "MANPATH": str(folder), "MANWIDTH": "200", "LANG": "C.UTF-8"}
    done = subprocess.run(
        [man, "--warnings", "-P", "cat", name], env=environment, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return re.sub(".\b|\x1b\\[[0-9;]*m", "", done.stdout)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("carme", ["Start a job", "carme-submit"]),
        ("carme-submit", ["--gpu-type", "carme submit train.sh --gpus 2 --time 2h", "0-99%4"]),
        ("carme-session", ["carme session shell", "--node"]),
        ("carme-sessions", ["carme session shell"]),
        ("carme-run", ["--devices-per-node", "carme-run [options] script.py"]),
    ],
)
def test_man_shows_them(folder: Path, name: str, words: list[str]) -> None:
    shown = _shown(folder, name)
    assert [word for word in words if word not in shown] == []


def test_each_command_has_a_page(folder: Path) -> None:
    written = pages(parser())
    assert {f"{name}.1" for name in [*written, "carme-run"]} == {
        path.name for path in (folder / "man1").iterdir()
    }
    assert all(page.startswith((".TH", ".so")) for page in written.values()) and len(written) > 20
