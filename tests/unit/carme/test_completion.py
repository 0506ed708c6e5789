"""A shell completes the command line of `carme`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ASK = r"""
. "$1"
COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9
_python_argcomplete carme "${2##* }" ""
printf '%s\n' "${COMPREPLY[@]% }"
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("carme ses", {"session", "sessions"}),
        ("carme sessions st", {"start", "stop"}),
        ("carme submit --ima", {"--image"}),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, expected: set[str]) -> None:
    (tmp_path / "ask").write_text(ASK)
    # As the role of the hosts does, and the base image.
    made = "import argcomplete; print(argcomplete.shellcode(['carme']))"
    (tmp_path / "completion.bash").write_bytes(subprocess.check_output([sys.executable, "-c", made]))
    program = tmp_path / "bin/carme"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom carme.cli import program\nprogram()\n")
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "--norc", tmp_path / "ask", tmp_path / "completion.bash", line],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) == expected
