"""Which sessions can be entered; what happens inside is tested with real agents, in the runtime's tests."""

import os
import ssl
from pathlib import Path
from typing import Any

import pytest

from carme.cli.main import main
from carme.cli.shell import folder_of, visit
from carme.errors import CarmeError
from carme.jobs import Job, JobState
from carme.jobs.certificate import make_certificate

WHERE = '{"host": "127.0.0.1", "port": 1}'


def job(**values: Any) -> Job:
    known: dict[str, Any] = {"id": 7, "key": "ab" * 16, "kind": "session", "image": "torch", "name": "s"}
    known |= {"user": "ada", "account": "", "partition": "gpu", "state": JobState.RUNNING, "nodes": 1}
    known |= {"gpus": 0, "gpu_type": None, "cpus": 1, "memory_mb": 1, "minutes_limit": 1, "submitted": None}
    return Job.model_validate(known | values)


def test_a_running_session_is_entered_by_its_private_folder() -> None:
    folder = folder_of(job(), "s1")
    assert folder.parts[-5:] == (".local", "share", "carme", "jobs", "ab" * 16)


@pytest.mark.parametrize("values", [{"state": JobState.PENDING}, {"state": JobState.FAILED}, {"key": None}])
def test_a_session_that_is_not_running_cannot_be_entered(values: dict[str, Any]) -> None:
    with pytest.raises(CarmeError, match="The session s1 is not running: its job 7 is"):
        folder_of(job(**values), "s1")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "fabric.json: No such file or directory"),
        ({"fabric.json": WHERE, "fabric.key": "k" * 64}, "fabric.pem: No such file"),
        ({"fabric.json": "{}"}, "a file is damaged"),
        ({"fabric.json": "not JSON"}, "a file is damaged"),
        ({"fabric.json": WHERE, "fabric.key": "k" * 64, "fabric.pem": "nothing"}, "fabric.pem: "),
    ],
)
def test_a_folder_without_a_usable_agent_address_is_an_error(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CarmeError, match=words):
        visit(tmp_path, 0, [])


def test_an_agent_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "fabric.json").write_text(WHERE)
    (tmp_path / "fabric.key").write_text("k" * 64)
    (tmp_path / "fabric.pem").write_text(make_certificate())
    with pytest.raises(CarmeError, match=r"The job's agent at 127.0.0.1 port 1 does not answer: "):
        visit(tmp_path, 0, [])


def test_the_command_line_names_its_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARME_CONFIG", os.devnull)
    with pytest.raises(SystemExit):
        main(["session", "shell", "--help"])
    assert "carme session shell [--node N] NAME [-- COMMAND [ARGS ...]]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["session", "shell"])
    assert "NAME" in capsys.readouterr().err


def test_each_job_gets_another_certificate(tmp_path: Path) -> None:
    first, second = make_certificate(), make_certificate()
    assert first != second
    (tmp_path / "one.pem").write_text(first)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(tmp_path / "one.pem")
    context.load_verify_locations(tmp_path / "one.pem")
    assert context.cert_store_stats()["x509_ca"] == 0  # it can vouch for nothing but itself
