"""A shell completes the command line of `carme`, by the files that the role of the hosts writes."""

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

ASK = r"""
. "$1"
COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9
_python_argcomplete carme "${2##* }" ""
printf '%s\n' "${COMPREPLY[@]% }"
"""
LINES = [
    ("carme ses", {"session", "sessions"}),
    ("carme sessions st", {"start", "stop"}),
    ("carme submit --ima", {"--image"}),
]
#: A package that is only unpacked (see ./test) has modules and functions elsewhere.
ZSHRC = """
{unpacked}
fpath=($ZDOTDIR/site-functions $fpath)
autoload -Uz compinit && compinit -u -d $ZDOTDIR/dump
PS1='READY> '
"""


def written(folder: Path, name: str, *options: str) -> Path:
    """The completions as the role of the hosts writes them."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    script = "import argcomplete.scripts.register_python_argcomplete as r; r.main()"
    command = [sys.executable, "-c", script, *options, "carme"]
    path.write_bytes(subprocess.check_output(command))
    return path


def environment(folder: Path, code: str = "program()") -> dict[str, str]:
    """Of a shell that finds `carme`."""
    program = folder / "bin/carme"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport os, sys\nfrom carme.cli import program\n{code}\n")
    program.chmod(0o755)
    return {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(folder),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
    }


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(("line", "expected"), LINES)
def test_bash_completes(tmp_path: Path, line: str, expected: set[str]) -> None:
    (tmp_path / "ask").write_text(ASK)
    command = ["bash", "--norc", tmp_path / "ask", written(tmp_path, "completion.bash"), line]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed; ./test unit fetches it")
@pytest.mark.parametrize(("line", "expected"), LINES)
def test_fish_completes(tmp_path: Path, line: str, expected: set[str]) -> None:
    fish = Path(shutil.which("fish") or "")
    libraries = ":".join(map(str, fish.parents[1].glob("lib/*-linux-gnu")))
    ask = f"source {written(tmp_path, 'carme.fish', '--shell', 'fish')}; complete -C {line!r}"
    variables = environment(tmp_path) | {"LD_LIBRARY_PATH": libraries}
    done = subprocess.run(
        [fish, "--no-config", "-c", ask], env=variables, capture_output=True, text=True, check=True
    )
    assert {shown.split("\t")[0].strip() for shown in done.stdout.splitlines()} == expected


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed; ./test unit fetches it")
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("carme sub\t--ima\tbase", ["submit", "--image", "base"]),
        ("carme sessions sto\ts1", ["sessions", "stop", "s1"]),
    ],
)
def test_zsh_completes(tmp_path: Path, typed: str, words: list[str]) -> None:
    """As at a terminal: what a tab has completed is what the command is called with."""
    written(tmp_path, "site-functions/_carme")
    (tmp_path / ".zshrc").write_text(ZSHRC.format(unpacked=unpacked_zsh()))
    code = "program() if '_ARGCOMPLETE' in os.environ else print('CALLED', sys.argv[1:])"
    variables = environment(tmp_path, code) | {"ZDOTDIR": str(tmp_path)}
    shown = at_terminal(["zsh", "-d", "-i"], variables, "READY> ", typed, "CALLED [")
    assert f"CALLED {words}" in shown, shown


def unpacked_zsh() -> str:
    """Where zsh finds its own parts; empty where it is installed."""
    top = Path(shutil.which("zsh") or "").parents[1]
    modules = list(top.glob("usr/lib/*/zsh/[0-9]*"))
    functions = [path for path in top.glob("usr/share/zsh/functions/**") if path.is_dir()]
    if top == Path("/") or not modules:
        return ""
    return f"module_path=({modules[0]}) fpath=({' '.join(map(str, functions))})"


def at_terminal(command: list[str], variables: dict[str, str], prompt: str, typed: str, until: str) -> str:
    """What a terminal shows when a line is typed at the prompt, up to the line with `until`."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        command, env=variables, stdin=end, stdout=end, stderr=end, start_new_session=True
    )
    os.close(end)
    shown, waited = "", prompt
    try:
        while select.select([terminal], [], [], HANG)[0]:
            try:
                shown += os.read(terminal, 1 << 16).decode(errors="replace")
            except OSError:  # the shell has ended
                break
            if waited == prompt and prompt in shown:
                os.write(terminal, f"{typed}\n".encode())
                waited = until
            elif until in shown and "\n" in shown[shown.index(until) :]:
                break
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            os.close(terminal)
    return shown
