"""`carme session` against a running broker."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from carme.cli import main
from carme.cli.output import length
from carme.cli.sessions import estimate_text
from carme.sessions import Mark, QueueEstimate, ServerStatus, SessionNote, Step

from .conftest import carme

STARTED = 1795181600
JOB: dict[str, Any] = {
    "A": 7, "j": "session-s1", "u": "ada", "P": "gpu", "T": "RUNNING", "D": 1, "C": 1, "m": "1M",
    "l": "1:00:00", "N": "n1", "V": STARTED - 60, "S": STARTED,
    "k": f"carme/1 kind=session image=torch key={'0' * 32}",
}  # fmt: skip
WAITING = JOB | {"A": 8, "j": "session-s2", "T": "PENDING", "r": "Priority", "N": "", "S": "N/A"}


@pytest.fixture
def file(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same on a computer without a screen, where no browser can open."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    return file


@pytest.fixture
async def sessions(site: Any, file: Path) -> Any:
    """One session that is ready and one that waits."""
    await site.queue([JOB, WAITING])
    site.act("hub", trusted=True)
    at = datetime.fromtimestamp(STARTED, UTC) + timedelta(seconds=2.5)
    note = SessionNote(server=ServerStatus.READY, marks=(Mark(step=Step.LISTENING, at=at),))
    await site.client.note(7, "ada", note)
    site.act("ada")
    return site


async def test_both_names_are_one_group(site: Any, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for group in ("session", "sessions"):
        with pytest.raises(SystemExit):
            main([group, "--help"])
        texts.append(capsys.readouterr().out.replace("carme sessions", "carme session"))
    assert texts[0] == texts[1]
    assert all(f"    {action} " in texts[0] for action in ("start", "list", "show", "open", "extend", "stop"))


async def test_an_empty_list_names_the_portal(
    site: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await carme("session", "list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "You have no sessions now.", "Start one at https://carme.example.org/",
    ]  # fmt: skip
    assert await carme("session", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


async def test_sessions_are_listed_with_their_states(
    sessions: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await carme("session", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["SESSION", "s2", "s1"]
    assert "Waiting in the queue" in lines[1] and "higher priority" in lines[1]
    assert "Ready" in lines[2]
    assert await carme("session", "list", "--json") == 0
    assert [session["state"] for session in json.loads(capsys.readouterr().out)] == ["queued", "ready"]


async def test_show_prints_state_times_and_estimate(
    sessions: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await carme("session", "show", "s1") == 0
    output = capsys.readouterr().out
    assert output.startswith("Session s1 (job 7): Ready\n")
    assert "nodes:     n1" in output
    rows = [line.split()[-2:] for line in output.splitlines() if "  +" in line]
    assert rows == [["+60.00", "s"], ["+2.50", "s"]]
    assert await carme("session", "show", "s2") == 0
    output = capsys.readouterr().out
    assert "higher priority" in output and "place 1 of 1; Slurm has no plan" in output
    assert await carme("session", "show", "s1", "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["marks"][0] == {"step": "submitted", "at": "2026-11-20T13:32:20Z"}


async def test_open_prints_the_address_and_starts_a_browser_where_there_is_a_display(
    sessions: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    url = "https://carme.example.org/jupyter/user/ada/s1/lab"
    assert await carme("session", "open", "s1") == 0
    assert (capsys.readouterr().out, opened) == (f"{url}\n", [])
    monkeypatch.setenv("DISPLAY", ":0")
    assert await carme("session", "open", "s1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"url": url, "opened": True}
    assert opened == [url]
    assert await carme("session", "open", "s1", "--app", "vscode") == 1
    assert "has no app 'vscode'; it has: lab. Name one" in capsys.readouterr().err
    assert await carme("session", "open", "s2") == 1
    assert "The session s2 is not ready: waiting in the queue." in capsys.readouterr().err


async def test_stop_cancels_the_job_once(sessions: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert await carme("session", "stop", "s1") == 0
    assert "The session s1 is being stopped." in capsys.readouterr().out
    assert [job["T"] for job in sessions.slurm.jobs] == ["CANCELLED", "PENDING"]
    while (await sessions.client.session("s1")).ending is None:
        await sessions.client.events((await sessions.client.events()).cursor, wait=0.2)
    assert await carme("session", "stop", "s1") == 0
    assert "is over already: stopped." in capsys.readouterr().out
    assert await carme("session", "list", "--all", "--json") == 0
    assert [session["ending"] for session in json.loads(capsys.readouterr().out)] == [None, "stopped"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["show", "s9"],
            "There is no session 's9' of ada. See 'carme session list' for those",
        ),
        (["extend", "s1", "soon"], "'soon' is not a length of time."),
        (["stop", "x" * 65], "'name' must have at most 64 characters"),
        (["stop", ""], "'name' must not be empty"),
    ],
)
async def test_a_refusal_is_one_sentence(
    sessions: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert await carme("session", *arguments) == 1
    assert sentence in capsys.readouterr().err


def test_a_start_estimate_names_place_range_and_accuracy() -> None:
    start = datetime.now().astimezone().replace(hour=14, minute=10, second=0, microsecond=0)
    estimate = QueueEstimate(place=2, waiting=5, reason="", earliest=start, latest=start.replace(minute=40))
    assert estimate_text(estimate) == "place 2 of 5; expected to start between 14:10 and 14:40"
    judged = estimate.model_copy(update={"correct": 8, "judged": 10})
    assert estimate_text(judged).endswith("14:40; 8 of the last 10 such estimates were right")
    later = estimate.model_copy(update={"latest": start + timedelta(days=1)})
    assert f"and {(start + timedelta(days=1)):%Y-%m-%d %H:%M}" in estimate_text(later)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 min 0 s"), (75, "1 min 15 s"), (720, "12 min"), (3720, "1 h 2 min"), (90_000, "1 d 1 h")],
)
def test_a_length_of_time_has_at_most_two_units(seconds: int, text: str) -> None:
    assert length(timedelta(seconds=seconds)) == text
