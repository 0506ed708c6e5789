"""The command itself: help without root, mistakes, and their messages."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from carme_demo import command_line, status
from carme_demo.podman import Podman
from carme_demo.settings import Places, Settings
from carme_demo.status import NodeStatus, ServiceStatus, Status
from patience import HANG

DEMO = Path(__file__).resolve().parents[3] / "demo"
COMMANDS = ["up", "hosts", "status", "run", "shell", "logs", "down", "reset"]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(DEMO), *arguments], capture_output=True, text=True, timeout=HANG, check=False)


def test_help_names_every_command() -> None:
    done = call("--help")
    assert done.returncode == 0
    assert all(f"\n    {command}" in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main([command, "--help"])
    assert ended.value.code == 0
    assert f"./demo {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["up", "--nodes", "many"],
        ["up", "extra"],
        ["status", "--yaml"],
        ["shell"],
        ["logs", "-n", "x"],
    ],
)
def test_a_mistyped_command_ends_with_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(arguments)
    assert ended.value.code == 2
    assert "usage: ./demo" in capsys.readouterr().err


def test_without_root_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command_line.main(["status"]) == 1
    assert "needs root. Use: sudo ./demo" in capsys.readouterr().err


def test_a_wrong_name_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert command_line.main(["--name", "../etc", "up"]) == 1
    assert "--name" in capsys.readouterr().err


def test_the_name_is_taken_before_and_after_the_command() -> None:
    parser = command_line.parser()
    assert parser.parse_args(["--name", "second", "down"]).name == "second"
    assert parser.parse_args(["down", "--name", "second"]).name == "second"


def test_status_is_for_people_and_for_programs() -> None:
    status = Status(
        "carme",
        "https://localhost:8443",
        [NodeStatus("n1", "10.77.0.11", True, "idle")],
        [ServiceStatus("head", "carme-hub", "failed")],
        ["carme-hub on head is failed."],
    )
    reported = json.loads(status.as_json())
    assert reported["ready"] is False
    assert reported["nodes"] == [{"name": "n1", "address": "10.77.0.11", "running": True, "slurm": "idle"}]
    assert "not ready" in status.as_text()
    assert "carme-hub on head is failed." in status.as_text()
    assert json.loads(Status("carme", "u").as_json())["ready"] is True


def test_services_that_a_killed_stop_left_stopped_are_started_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """systemd is simulated: it says what runs, and starts what it is given."""
    states = {"carme-broker.service": "inactive", "slurmctld.service": "inactive", "nginx.service": "active"}
    started: list[tuple[str, ...]] = []

    def execute(node: str, *command: str, **_: object) -> SimpleNamespace:
        match command:
            case "systemctl", "list-unit-files", *_:
                text = "".join(f"{name} enabled enabled\n" for name in states) if node == "head" else ""
            case "systemctl", "is-active", *names:
                text = "\n".join(states[name] for name in names)
            case "systemctl", "restart", *names:
                started.append(tuple(names))
                states.update(dict.fromkeys(names, "active"))
                text = ""
            case _:
                text = "n1|idle\nn2|idle\n"
        return SimpleNamespace(stdout=text.encode())

    monkeypatch.setattr(status, "portal", lambda settings: "")
    podman = cast(Podman, SimpleNamespace(execute=execute))
    places = Places("carme", tmp_path, tmp_path)
    places.deployed.parent.mkdir(parents=True, exist_ok=True)
    places.deployed.touch()
    seen = status.wait(podman, places, Settings(nodes=2), {"head", "n1", "n2"}, HANG)
    assert seen.ready
    assert started == [("carme-broker.service", "slurmctld.service")]
    assert [each.state for each in seen.services] == ["active"] * 3


def test_the_package_needs_nothing_beyond_the_standard_library() -> None:
    package = Path(command_line.__file__).parent
    for file in package.glob("*.py"):
        for line in file.read_text().splitlines():
            if line.startswith(("import ", "from ")) and not line.startswith("from ."):
                assert line.split()[1].split(".")[0].rstrip(",") in sys.stdlib_module_names, (
                    f"{file.name}: {line}"
                )


@pytest.mark.parametrize(("name", "subnet"), [("carme", "10.77.0.0/24"), ("second", "192.0.2.0/24")])
def test_a_reset_without_settings_leaves_the_network_of_another_demo(
    name: str, subnet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []
    monkeypatch.setattr(
        command_line.cleanup, "sweep", lambda podman, containers, subnet: swept.append(subnet)
    )
    places = Places(name, tmp_path / "lib", tmp_path / "run")
    places.cache.mkdir(parents=True)
    assert command_line.Demo(places, command_line.Stages()).reset(everything=False) == 0
    assert swept == [subnet]
    assert places.cache.exists()
