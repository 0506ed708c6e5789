"""`carme scale`."""

import json
import sys
from pathlib import Path

import pytest

from carme.cli import main
from carme.translation import translated
from carme_runtime import scaling
from carme_runtime.graph import Timing


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


def test_what_is_wrong_is_one_sentence(
    result: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["scale", str(result.with_name("none.json"))]) == 1
    assert "cannot be read (No such file or directory)." in capsys.readouterr().err
    assert main(["scale", str(result), "--network", "fast"]) == 1
    assert capsys.readouterr().err.startswith("carme: The network 'fast' cannot be read. Write its rate")
    monkeypatch.setitem(sys.modules, "carme_runtime.scaling.command", None)
    assert main(["scale", str(result)]) == 1
    sentence = capsys.readouterr().err
    assert "The training runtime is not installed here." in sentence
    assert translated("The training runtime is not installed here.", "de").startswith("Die Laufzeit")
