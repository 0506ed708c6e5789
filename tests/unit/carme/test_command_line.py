"""The options of the commands, and how a command that failed says so."""

import ast
from collections import defaultdict

import pytest

import figures
from carme.command_line import run_command
from carme.errors import CarmeError

PARTS = ("carme/src", "containers/runtime/src", "monitoring/src", "spawner/src", "webui/src")
#: Options that mean something else with another command: where each is declared.
OF_ONE_COMMAND = {
    "carme/src": {
        "--all": "cli/personal cli/portal cli/sessions",
        "--folder": "cli/images cli/images sandbox/supervisor",
        "--gpus": "attacks/__main__ carme/command_line cli/validate sandbox/__main__",
        "--hash": "cli/data cli/data",
        "--into": "backup/main cli/datasets",
        "--job": "staging/janitor storage/beeond",
        "--json": "carme/command_line cli/data",
        "--nodes": "carme/command_line cli/admin cli/data cli/validate sandbox/__main__ storage/beeond",
        "--project": "cli/admin cli/images cli/portal cli/start",
        "--reason": "cli/admin cli/admin cli/predictions",
        "--since": "cli/admin sandbox/supervisor",
        "--text": "cli/admin cli/admin",
        "--time": "carme/command_line cli/personal",
        "--title": "carme/command_line cli/admin cli/admin cli/datasets cli/personal cli/personal",
        "--until": "cli/admin cli/admin",
        "--version": "backup/main cli/parsing heads/main",
        "--wait": "cli/images cli/portal_sessions",
    },
    "containers/runtime/src": {
        "--batch": "carme_runtime/options carme_runtime/options",
        "--input": "carme_runtime/options onnx/command onnx/command",
        "--json": "carme_runtime/options launcher/arguments",
        "--memory": "onnx/command petri/command",
        "--network": "carme_runtime/options scaling/start",
        "--nodes": "fabric/command launcher/arguments",
        "--output": "carme_runtime/options launcher/arguments onnx/command",
        "--spill": "launcher/arguments petri/command",
        "--svg": "carme_runtime/options onnx/command",
        "--unencrypted": "fabric/command launcher/arguments",
        "--version": "fabric/command launcher/arguments",
        "--workers": "onnx/command petri/command",
    },
}


def declared(part: str) -> dict[str, list[tuple[str, str]]]:
    """Where each option is declared: the file, as `FOLDER/MODULE`, and the help."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in sorted((figures.ROOT / part).rglob("*.py")):
        source = file.read_text()
        # Most files have none, and it takes long to parse them.
        for node in ast.walk(ast.parse(source)) if "add_argument" in source else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                help = next((ast.unparse(word.value) for word in node.keywords if word.arg == "help"), "")
                for name in node.args:
                    option = str(name.value) if isinstance(name, ast.Constant) else ""
                    if option.startswith("--"):
                        found[option].append((f"{file.parent.name}/{file.stem}", help))
    return found


@pytest.mark.parametrize("part", PARTS)
def test_options_that_several_commands_share_are_declared_once(part: str) -> None:
    found = declared(part)
    several = {
        name: " ".join(sorted(file for file, _help in places))
        for name, places in found.items()
        if len(places) > 1
    }
    assert several == OF_ONE_COMMAND.get(part, {}), "Declare what means the same in one place."
    for name in several:
        texts = [help for _file, help in found[name] if help]
        assert len(texts) == len({*texts}), (name, found[name])


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
