"""What `carme compare` can measure, and what a user writes for each contestant."""

import json

import pytest

from carme_runtime.compare import command
from carme_runtime.compare.contestants import CONTESTANTS, count_user_lines
from carme_runtime.compare.images import DATA
from carme_runtime.compare.networks import NETWORKS
from carme_runtime.launcher.command import main as carme_run


def test_what_is_there_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*CONTESTANTS, *NETWORKS, *DATA))
    assert command.main(["--list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in shown["contestants"]] == list(CONTESTANTS)


def test_lines_that_a_user_writes_are_counted() -> None:
    text = "import x\n# user: begin\nx.init()\n\n# why\nmark('forward')\nx.step()\n# user: end\nx.other()\n"
    assert count_user_lines(text) == 2
    assert all(5 <= each.user_lines() <= 40 for each in CONTESTANTS.values())


def test_messages_name_the_command_as_it_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["carme-run", "compare", "--rounds", "0"])
    with pytest.raises(SystemExit) as ended:
        carme_run()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("carme-run compare: --rounds 0 is not possible.")
    monkeypatch.setattr("sys.argv", ["carme-run", "compare", "--rounds", "many"])
    with pytest.raises(SystemExit):
        carme_run()
    assert "usage: carme-run compare [-h]" in capsys.readouterr().err
