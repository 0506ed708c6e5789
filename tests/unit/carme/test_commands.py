"""Which part of `carme` has which command: a command line imports that part alone."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from carme import cli
from carme.cli.main import _completed_command
from carme.cli.parsing import COMMANDS, parser

#: What `carme COMMAND --help` has imported.
IMPORTED = """
import sys
from carme.cli.parsing import parser
parser(sys.argv[1])
print(*sys.modules)
"""


def commands(root: argparse.ArgumentParser) -> tuple[str, ...]:
    (found,) = [action for action in root._actions if isinstance(action, argparse._SubParsersAction)]
    return tuple(found.choices)


@pytest.mark.parametrize("part", COMMANDS)
def test_a_part_adds_the_commands_that_the_table_has(part: str) -> None:
    for command in COMMANDS[part]:
        assert commands(parser(command)) == COMMANDS[part]


@pytest.mark.parametrize("first", ["", "--version", "nothing"])
def test_where_no_command_is_first_all_are_known(first: str) -> None:
    every = tuple(command for part in COMMANDS.values() for command in part)
    assert commands(parser(first)) == every and len(set(every)) == len(every)


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        ("net", {"asyncio", "pydantic", "carme.config", "carme.cli.jobs"}),
        ("scale", {"asyncio", "pydantic", "carme.config", "carme.cli.jobs"}),
        ("jobs", {"asyncio", "cryptography", "carme.cli.shell", "carme.slurm", "carme.storage"}),
    ],
)
def test_a_command_imports_no_part_of_another_one(command: str, unneeded: set[str]) -> None:
    folder = Path(cli.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, command],
        env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = set(done.stdout.split())
    assert "carme.cli.parsing" in imported and not unneeded & imported


@pytest.mark.parametrize(
    ("line", "point", "command"),
    [
        ("carme sessions st", 17, "sessions"),
        ("carme data ", 11, "data"),
        ("carme data", 10, ""),  # or datasets
        ("carme ses", 9, ""),
        ("carme s jobs", 7, ""),
        ("carme ", 6, ""),
    ],
)
def test_a_shell_completes_words_of_a_command_whose_name_is_whole(
    line: str, point: int, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(point))
    assert _completed_command() == command
