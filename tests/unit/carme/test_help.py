"""Messages lead to the section of the users' guides that says more."""

import importlib.util
import pickle
import sys
from pathlib import Path

import pytest

from carme.cli import main
from carme.errors import CarmeError, InvalidRequest
from carme.help import SECTIONS, help_path
from carme.translation import joined, message, plural

ROOT = Path(__file__).parents[3]
NO_GPUS = "The nodes of partition {partition_name!r} have no GPUs; {requested} were requested."


def no_gpus() -> InvalidRequest:
    return InvalidRequest(
        message(NO_GPUS, partition_name="cpu", requested="2 GPUs"), message("Ask for 0 GPUs."), field="gpus"
    )


def test_every_message_is_one_that_the_code_makes_and_has_one_section() -> None:
    spec = importlib.util.spec_from_file_location("carme_catalogue", ROOT / "carme/catalogue.py")
    assert spec is not None and spec.loader is not None
    catalogue = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(catalogue)
    known = {each if isinstance(each, str) else each[0] for each in catalogue.templates()}
    listed = [template for templates in SECTIONS.values() for template in templates]
    assert [template for template in listed if template not in known] == []
    assert len(listed) == len(set(listed)) > 25


def test_a_message_is_known_wherever_it_stands() -> None:
    error = no_gpus()
    assert error.help == help_path(error.text) == "/help/sessions/#start"
    within = message("{sentence} The end of its log says:\n{lines}", sentence=error.message, lines="a")
    assert help_path(joined(["First.", within])) == "/help/sessions/#start"
    many = plural(
        "{taken} is not free for the whole time, {when}.",
        "{taken} are not free for the whole time, {when}.",
        2,
        taken="n1 and n2",
        when="now",
    )
    assert help_path(many) == "/help/bookings/#book"
    assert help_path(str(NO_GPUS)) == help_path(message("Try again.")) == CarmeError("a", "b").help == ""


def test_an_error_keeps_the_page_that_another_program_named() -> None:
    error = pickle.loads(pickle.dumps(InvalidRequest("No.", help="https://a.example/help/data/")))
    assert error.help == "https://a.example/help/data/"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`carme status` fails, on a computer without a site's configuration and without a token."""

    def refuse(arguments: list[str]) -> int:
        raise no_gpus()

    monkeypatch.setattr(sys.modules["carme.cli.main"], "_run", refuse)
    monkeypatch.setenv("CARME_CONFIG", str(tmp_path / "carme.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("CARME_URL", "CARME_TOKEN", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)


def test_a_command_names_the_address_of_the_sites_portal(
    refused: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "carme.toml").write_text('[site]\nurl = "https://a.example"\n[slurm]\ncluster = "c"\n')
    assert main(["status"]) == 1
    sentence = "carme: The nodes of partition 'cpu' have no GPUs; 2 GPUs were requested. Ask for 0 GPUs.\n"
    assert capsys.readouterr().err == f"{sentence}More: https://a.example/help/sessions/#start\n"
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert main(["status"]) == 1
    assert capsys.readouterr().err.endswith("\nMehr: https://a.example/help/sessions/#start\n")


def test_a_command_names_the_portal_that_a_token_is_for_or_nothing(
    refused: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 1
    assert "More" not in capsys.readouterr().err
    monkeypatch.setenv("CARME_URL", "https://b.example")
    monkeypatch.setenv("CARME_TOKEN", "a-token")
    assert main(["status"]) == 1
    assert capsys.readouterr().err.endswith("\nMore: https://b.example/help/sessions/#start\n")
