"""`carme scale` and `carme compare`, which the training runtime does where it is installed."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from carme.cli import main
from carme.cli.parsing import parser
from carme.translation import follow
from carme_runtime import scaling
from carme_runtime.compare.command import parser as compare_parser
from carme_runtime.graph import Timing
from carme_runtime.scaling.command import parser as scale_parser

SENTENCE = "The training runtime is not installed here."


@pytest.fixture
def result(tmp_path: Path) -> Path:
    gradients = (scaling.Gradient("layer", 1 << 20, (1.0,)),)
    scaling.save(
        scaling.Profile("Model", "cpu", 64, (Timing(64, 10.0, 20.0),), 1.0, gradients),
        tmp_path / "scale.json",
    )
    return tmp_path / "scale.json"


def test_a_result_is_shown(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(result), "--upto", "4", "--svg", str(result.with_suffix(".svg"))]) == 0
    assert "Weak scaling: each rank has a batch of 64." in capsys.readouterr().out
    assert result.with_suffix(".svg").read_text().startswith("<svg")
    assert main(["scale", str(result), "--upto", "4", "--json"]) == 0
    assert [point["ranks"] for point in json.loads(capsys.readouterr().out)["strong"]] == [1, 2, 4]


def test_what_can_be_compared_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--list", "--json"]) == 0
    assert {"contestants", "networks", "data"} == set(json.loads(capsys.readouterr().out))


def test_an_error_is_one_sentence(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(result.with_name("none.json"))]) == 1
    assert "cannot be read (No such file or directory)." in capsys.readouterr().err
    assert main(["scale", str(result), "--network", "fast"]) == 1
    assert capsys.readouterr().err.startswith("carme: The network 'fast' cannot be read. Write its rate")
    assert main(["compare", "--ranks", "none"]) == 1
    assert capsys.readouterr().err.startswith("carme: --ranks none cannot be read. Give numbers")


def described(of: argparse.ArgumentParser) -> str:
    """What the help says below the usage."""
    return of.format_help().partition("\n\n")[2].partition("positional arguments:")[2]


def of_carme(name: str) -> argparse.ArgumentParser:
    (commands,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    return commands.choices[name]


@pytest.mark.parametrize(("name", "own"), [("scale", scale_parser), ("compare", compare_parser)])
def test_the_options_are_those_of_the_runtime(
    name: str, own: Callable[[], argparse.ArgumentParser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert described(of_carme(name)) == described(own()) != ""


@pytest.mark.parametrize("name", ["scale", "compare"])
@pytest.mark.parametrize("words", [[], ["--help"], ["x.json", "--rounds", "3"], ["--diff", "a", "--", "b"]])
def test_without_the_runtime_each_call_says_so(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("options", "scaling.command", "compare.command"):
        monkeypatch.setitem(sys.modules, f"carme_runtime.{module}", None)
    assert main([name, *words]) == 1
    remedy = f"Use carme {name} in a session or job, or install carme-runtime with pip."
    assert capsys.readouterr().err == f"carme: {SENTENCE} {remedy}\n"
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    try:
        assert main([name, *words]) == 1
    finally:
        follow(lambda: None)
    german = f"ist hier nicht installiert. Verwenden Sie carme {name} in einer Sitzung"
    assert german in capsys.readouterr().err
