"""German for the sentences that Carme says outside of the portal's own texts: all that users meet has one."""

import ast
import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

import carme.translation
from carme.cli import main
from carme.errors import InvalidRequest
from carme.jobs.endings import ending_sentence
from carme.jobs.explanations import PENDING_REASONS, suspended, waiting_for
from carme.jobs.states import JobState
from carme.jobs.status import Job
from carme.launch.exits import Exit
from carme.sessions.states import Ending
from carme.slurm import refusals
from carme.translation import follow, translated

ROOT = Path(__file__).parents[3]
#: What users meet on the start form, at jobs, bookings and staging.
MODULES = (
    *("carme/src/carme/jobs/checks.py", "carme/src/carme/jobs/times.py", "carme/src/carme/jobs/scripts.py"),
    *(
        "carme/src/carme/jobs/stages.py",
        "carme/src/carme/bookings/policy.py",
        "carme/src/carme/bookings/clock.py",
    ),
    *("carme/src/carme/images/catalogue.py", "webui/src/carme_webui/sessions/actions.py"),
    "webui/src/carme_webui/projects/rules.py",
    "carme/src/carme/scaling/predictions.py",
)
#: Values that are part of the grammar, by the expression that makes them.
VALUES = {
    "of_type": ["", " of type a100"],
    "whose": ["You have", "The project 'x' has"],
    "whose has": ["you", "you have"],
    "kind": ["with 4 GPUs of type a100"],
}
TABLE: dict[str, str] = json.loads(Path(carme.translation.__file__).with_name("de.json").read_text("utf-8"))


def sentences(node: ast.AST) -> Iterator[str]:
    """What an expression may say, with values filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from sentences(node.body)
        yield from sentences(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append([str(part.value)])
            elif isinstance(part, ast.FormattedValue):
                parts.append([*sentences(part.value)] or VALUES.get(ast.unparse(part.value), ["'7'"]))
        for one in itertools.product(*parts):
            yield "".join(one)


def said_in(path: Path) -> Iterator[str]:
    """Every sentence of a module's errors."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "InvalidRequest":
                yield from itertools.chain.from_iterable(map(sentences, node.args[:2]))
            elif node.func.id == "refuse":  # of projects' rules
                yield from (f"{one}." for one in sentences(node.args[1]))
                yield from (f"{one}, or choose another project." for one in sentences(node.args[2]))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("message", "remedy"):
            yield from sentences(node.value)


@pytest.mark.parametrize("module", MODULES)
def test_all_that_users_meet_has_a_german_sentence(module: str) -> None:
    found = [
        one
        for one in said_in(ROOT / module)
        if one not in ("{sentence}.", "'7'.", "'7', or choose another project.")
    ]
    assert found
    # What the budget says is put together of two words that belong together.
    missing = [one for one in found if translated(one, "de") == one and "'7' '7' left" not in one]
    assert not missing


def test_the_budget_of_bookings_is_reported() -> None:
    for whose in ("you may book in 28 days you have", "the project 'x' may book in 28 days it has"):
        text = f"The booking costs 8 GPU-hours; of the 10 that {whose} 2.5 left."
        assert "sind 2.5 übrig" in translated(text, "de")


def test_values_are_translated_and_names_are_not() -> None:
    assert translated("Ask for 1 to 4.", "de") == "Verlangen Sie 1 bis 4."
    message = translated("A booking lasts at most 12 hours, not 1 day 2 hours 5 minutes.", "de-AT")
    assert message == "Eine Buchung dauert höchstens 12 Stunden, nicht 1 Tag 2 Stunden 5 Minuten."
    message = translated("There is no partition 'job and session'; there are: a, b and c.", "de")
    assert message == "Es gibt keine Partition 'job and session'; es gibt: a, b und c."
    assert translated("'minutes' must be at least 1, not 0.", "de").startswith("'minutes' muss mindestens 1")
    for text in ("", "Something that nobody has translated.", "x" * 5000):
        assert translated(text, "de") == text
    assert translated("Ask for 1 to 4.", "fr") == "Ask for 1 to 4."


@pytest.mark.parametrize("detail", ["", "4 of 4 used"])
def test_why_a_job_waits(detail: str) -> None:
    limits = [
        f"{holder}{scope}{thing}"
        for holder in ("QOS", "Assoc")
        for scope in ("Grp", "Max", "Min")
        for thing in (
            "GRES",
            "Cpu",
            "Memory",
            "Node",
            "Jobs",
            "Submit",
            "Wall",
            "License",
            "GRESMinutes",
            "New",
        )
    ]
    for reason in (*PENDING_REASONS, *limits, "SomethingNew"):
        text = waiting_for(reason, "" if reason == "SomethingNew" else detail)
        message = translated(text, "de")
        assert message != text and (detail in message or reason == "SomethingNew"), text


def test_what_is_missing_for_a_job() -> None:
    for detail in (
        "2 GPUs must become free on n1, in use by your job 12 and 3 jobs of others until 14:53 at the latest",
        "1 GPU and 4 processors must become free on n1 and n2, in use by 1 job of others",
        "3000 MiB of memory must become free on n1",
        "down or drained: n1, n2",
        "4 GPUs must become free on n1, kept for the reservation maint until 14:53 at the latest",
        "4 GPUs must become free on n1, kept for the reservation maint from 13:00 on until 14:53 "
        "at the latest",
        "4 GPUs must become free on n1, kept for the reservations carme-b and maint until 14:53 "
        "at the latest",
        "4 GPUs must become free on n1, in use by your job 7 and kept for the reservation maint from "
        "13:00 on until 14:53 at the latest",
        "4 GPUs must become free on n1, in use by your job 7 and 2 jobs of others and kept for the "
        "reservations carme-b and maint until 14:53 at the latest",
    ):
        message = translated(waiting_for("Resources", detail), "de")
        assert not {"must", "use", "jobs", "next", "down", "memory", "kept", "on", "and"} & set(
            message.split()
        ), message
    for detail in (
        "kept for the reservation maint until 14:53: n1 and n2",
        "kept for the reservation carme-b from 13:00 on until 14:53: n1 and n2 and down or drained: n3, n4",
    ):
        message = translated(waiting_for("ReqNodeNotAvail, UnavailableNodes:n1", detail), "de")
        assert not {"kept", "on", "until", "from", "reserved", "down", "and"} & set(message.split()), message
        assert "14:53" in message
    for by_slurm, left in ((True, 90), (False, None)):
        for session in (True, False):
            message = translated(suspended(session, by_slurm, left), "de")
            assert "angehalten" in message and "minute" not in message, message


def ended(kind: str, **values: object) -> Job:
    known = {
        "id": 7,
        "kind": kind,
        "name": "x",
        "user": "a",
        "account": "b",
        "partition": "gpu",
        "state": "FAILED",
    }
    known |= {"nodes": 1, "node_list": "n1", "gpus": 0, "cpus": 1, "memory_mb": 512, "minutes_limit": 90}
    return Job.model_validate(known | values)


@pytest.mark.parametrize("kind", ["session", "batch"])
def test_how_jobs_and_sessions_ended(kind: str) -> None:
    cases = [ended(kind), ended(kind, nodes=2, memory_mb=1024), ended(kind, minutes_limit=None, memory_mb=0)]
    cases += [ended(kind, exit_code=int(code)) for code in Exit]
    cases += [
        ended(kind, exit_code=3),
        ended(kind, signal=9),
        ended(kind, failed_node="n1"),
        ended(kind, image="torch"),
    ]
    cases += [
        ended(kind, state=state) for state in (JobState.DEADLINE, JobState.LAUNCH_FAILED, JobState.CANCELLED)
    ]
    cases += [ended(kind, state=JobState.CANCELLED, cancelled_by=who) for who in ("root", "slurm")]
    cases += [ended(kind, peak_memory_mb=10), ended(kind, peak_memory_mb=512)]
    for job in cases:
        for ending in Ending:
            text = ending_sentence(job, ending)
            assert translated(text, "de") != text, (ending, text)
    unknown = ended(kind, state=JobState.CANCELLED).explanation
    assert translated(unknown, "de") != unknown


def test_what_slurm_refuses() -> None:
    for pattern, _field, message, remedy in refusals._REFUSALS:
        assert translated(remedy, "de") != remedy, pattern
        assert translated(f"{message} (Slurm: nothing)", "de").endswith(" (Slurm: nothing)"), pattern
        assert translated(message, "de") != message


def test_templates_have_the_same_values() -> None:
    def places(text: str) -> set[str]:
        return {
            name for _text, name, _spec, _conversion in string.Formatter().parse(text) if name is not None
        }

    for english, german in TABLE.items():
        assert places(german) <= places(english), english
        assert german.strip() == german and german, english


def test_errors_are_reported_in_the_language_that_is_followed() -> None:
    error = InvalidRequest("A booking cannot begin in the past.", "The earliest start now is 9:00.")
    try:
        follow(lambda: "de")
        assert (
            str(error)
            == "Eine Buchung kann nicht in der Vergangenheit beginnen. Der früheste Beginn ist jetzt 9:00."
        )
        assert error.message == "A booking cannot begin in the past."  # what travels stays English
    finally:
        follow(lambda: None)
    assert str(error).startswith("A booking cannot")


def test_commands_follow_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    words = ["presets", "save", "x", "--image", "torch", "--time", "soon"]
    monkeypatch.setenv("CARME_URL", "https://carme.invalid")
    monkeypatch.setenv("CARME_TOKEN", "x")
    try:
        for language, message in (
            ("de_DE.UTF-8", "ist keine Zeitdauer"),
            ("C.UTF-8", "is not a length of time"),
        ):
            monkeypatch.setenv("LANG", language)
            assert main(words) == 1 and message in capsys.readouterr().err
    finally:
        follow(lambda: None)
