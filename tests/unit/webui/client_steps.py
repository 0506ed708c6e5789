"""A client of the portal, a computer from which it is used, and who runs what it submits."""

import json
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

import carme
from carme.cli import main
from carme.client import Login
from carme.jobs import JobState, contents
from carme_webui.accounts.models import User
from carme_webui.api.models import SCOPES, Token
from carme_webui.jobs.models import Job

from .fake_broker import NOW, FakeBroker


@pytest.fixture
def token(transactional_db: None) -> str:
    alice = User.objects.create_user("alice", password="x")
    return Token.make(alice, "t", list(SCOPES), timezone.now() + timedelta(days=1))[1]


@pytest.fixture
def client(live_server: Any, token: str) -> Iterator[carme.Client]:
    with carme.Client(live_server.url, token) as found:
        yield found


@pytest.fixture
def run(broker: FakeBroker, tmp_path: Path) -> Callable[..., int]:
    """Runs a submitted job or task here with its own command and files, and reports its end as Slurm does."""

    def run(job_id: int, task: int | None = None, **more: str) -> int:
        request, folder = broker.wanted[job_id], tmp_path / f"{job_id}-{task}"
        (folder / "files").mkdir(parents=True)
        for name, text in request.files.items():
            (folder / "files" / name).write_bytes(contents.to_bytes(text))
        environment = {"CARME_JOB_FOLDER": str(folder), "PATH": "/usr/bin:/bin", **more}
        if task is not None:
            environment["SLURM_ARRAY_TASK_ID"] = str(task)
        done = subprocess.run(request.command, env=environment, cwd="/", capture_output=True, check=False)
        number = job_id if task is None else 1000 * job_id + task
        broker.logs[number] = done.stdout + done.stderr
        if (folder / "result").exists():
            broker.results[number] = (folder / "result").read_bytes()
        state = JobState.COMPLETED if done.returncode == 0 else JobState.FAILED
        over = broker.queue[job_id].model_copy(
            update={"id": number, "state": state, "ended": NOW, "exit_code": done.returncode}
        )
        if task is not None:
            over = over.model_copy(update={"task": task, "tasks": ""})
        broker.put(over)
        Job.store([over])
        return done.returncode

    return run


@pytest.fixture
def elsewhere(
    live_server: Any, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[..., Any]:
    """A computer that is not the cluster's, signed in; runs a command and gives its JSON."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("carme.cli.portal.is_remote", lambda: True)
    Login().write(live_server.url, token)

    def command(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return command


@pytest.fixture
def home(broker: FakeBroker) -> Path:
    broker.home.mkdir()
    return broker.home
