"""The options of the commands, and how a command that failed says so."""

import ast
from collections import defaultdict

import pytest

import figures
from carme.command_line import run_command
from carme.errors import CarmeError

PARTS = ("carme/src", "containers/runtime/src", "monitoring/src", "spawner/src")
#: Options whose meaning is another one with another command.
OF_ONE_COMMAND = {
    "carme/src": {
        *("--all", "--folder", "--gpus", "--hash", "--into", "--job", "--json", "--nodes"),
        *("--project", "--reason", "--since", "--text", "--time", "--title", "--until", "--version"),
        *("--wait",),
    },
    "containers/runtime/src": {
        *("--batch", "--input", "--json", "--memory", "--network", "--nodes", "--output", "--spill"),
        *("--svg", "--version", "--workers"),
    },
}


def declared(part: str) -> dict[str, list[str]]:
    """Where each option is declared: `FILE:LINE HELP`."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted((figures.ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                help = next((ast.unparse(word.value) for word in node.keywords if word.arg == "help"), "")
                for name in node.args:
                    option = str(name.value) if isinstance(name, ast.Constant) else ""
                    if option.startswith("--"):
                        found[option].append(f"{file}:{node.lineno} {help}")
    return found


@pytest.mark.parametrize("part", PARTS)
def test_options_that_several_commands_share_are_declared_once(part: str) -> None:
    found = declared(part)
    several = {name for name, places in found.items() if len(places) > 1}
    assert several == OF_ONE_COMMAND.get(part, set()), "Declare what means the same in one place."
    for name in several:
        texts = [place.partition(" ")[2] for place in found[name] if not place.endswith(" ")]
        assert len(texts) == len({*texts}), (name, found[name])


@pytest.mark.parametrize("name", ["--image", "--stage", "--results"])
def test_options_of_jobs_sessions_and_bookings_are_declared_once(name: str) -> None:
    assert len(declared("carme/src")[name]) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CarmeError("It is full.", "Delete something."), "carme-x: It is full. Delete something.\n"),
        (PermissionError(13, "Permission denied", "/etc/x"), "carme-x: /etc/x: Permission denied.\n"),
    ],
)
def test_a_command_that_failed_says_why(
    error: Exception, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> int:
        raise error

    assert run_command("carme-x", fails) == 1
    assert capsys.readouterr().err == text
    assert run_command("carme-x", lambda: 3) == 3
