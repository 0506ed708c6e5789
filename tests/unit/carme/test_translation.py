"""German for the sentences of Carme outside of the portal's own texts: each that users read has one."""

import ast
import importlib.util
import json
import pickle
import string
from pathlib import Path
from types import ModuleType

import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import read_mo

from carme.broker.protocol import Failure
from carme.cli import main
from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.jobs import JobRequest, minutes_text
from carme.jobs.explanations import PENDING_REASONS, suspended, waiting_for
from carme.jobs.outcome import ending_of, ending_sentence, without_log
from carme.jobs.states import JobState
from carme.jobs.status import Job
from carme.launch.exits import Exit
from carme.sessions import SessionNote
from carme.sessions.states import Ending
from carme.slurm import refusals
from carme.slurm.refusals import refusal
from carme.translation import Message, follow, joined, message, plural, translated
from carme.translation.markup import message_in, with_message
from carme.wording import decimal, listing, memory, number, size

ROOT = Path(__file__).parents[3]
#: Programs of administrators, job logs and the sandbox speak English alone.
ENGLISH = (
    *("backup", "config", "heads", "launch", "sandbox", "storage", "validation", "slurm/library"),
    *("images/building.py", "images/copies.py", "carme_spawner/hub_config.py", "cli/validate.py"),
    # For Prometheus' clients; for administrators.
    *("metrics/scope.py", "carme_webui/settings.py"),
)


@pytest.fixture(scope="module")
def catalogue() -> ModuleType:
    """The program that keeps the catalogue."""
    spec = importlib.util.spec_from_file_location("carme_catalogue", ROOT / "carme/catalogue.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_sentence_has_its_german(catalogue: ModuleType) -> None:
    known = catalogue.known()
    assert catalogue.unsettled(known) == []
    present = {entry.id for entry in known if entry.id}
    assert present == set(catalogue.templates()), "run carme/catalogue.py, which says how to go on"
    with (catalogue.LOCALE / "carme.mo").open("rb") as stream:
        assert _texts(read_mo(stream)) == _texts(known), "run carme/catalogue.py"


def _texts(catalogue: Catalog) -> set[str]:
    """All entries, which each format orders and types in its way."""
    both = ((entry.id, entry.string) for entry in catalogue if entry.id)
    return {
        repr([list(text) if isinstance(text, list | tuple) else text for text in texts]) for texts in both
    }


def test_templates_have_the_same_values(catalogue: ModuleType) -> None:
    def places(text: str) -> set[str | None]:
        return {name for _text, name, _spec, _conversion in string.Formatter().parse(text)} - {None}

    for entry in catalogue.known():
        if not entry.id:
            continue
        english, german = (each if isinstance(each, tuple) else (each,) for each in (entry.id, entry.string))
        for text in german:
            assert places(text) <= places(english[-1]), english
            assert text.strip(" ") or not english[0].strip(" "), english


def _places(text: str) -> set[str]:
    return {name.partition(".")[0] for _text, name, _spec, _how in string.Formatter().parse(text) if name}


def test_templates_are_given_their_values(catalogue: ModuleType) -> None:
    wrong = []
    for folder, marks in catalogue.SOURCES.items():
        for path in (ROOT / folder).rglob("*.py"):
            for mark, node in catalogue.calls_of(path, marks):
                given = {keyword.arg for keyword in node.keywords} | (
                    {"count"} if mark == "plural" else set()
                )
                texts = [keyword.value for keyword in node.args if isinstance(keyword, ast.Constant)]
                texts = [text for text in texts if isinstance(text, str)]
                if mark in ("noop", "number") or not texts or None in given or not given:
                    continue
                if set().union(*map(_places, texts)) | {"count"} != given | {"count"}:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {texts} {given}")
    assert wrong == []


def _is_english(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix()
    return any(f"/{part}/" in name or name.endswith(f"/{part}") for part in ENGLISH)


def _unmarked(catalogue: ModuleType, path: Path) -> list[str]:
    """The sentences of errors that a module writes out without a mark."""
    found = []
    errors = {
        *("CarmeError", "InvalidRequest", "Denied", "NotFound", "SlurmError", "BrokerUnavailable"),
        *("BrokerTimeout", "ConfigError", "FileError", "Unreachable", "JobFailed", "HubError"),
        *("HubSilent", "HubUnavailable", "_refused", "_unreachable"),  # two make such errors
    }
    for _, node in catalogue.calls_of(path, tuple(errors)):
        for argument in node.args[:2]:
            choices = (argument.body, argument.orelse) if isinstance(argument, ast.IfExp) else (argument,)
            for choice in choices:
                while isinstance(choice, ast.Call) and isinstance(choice.func, ast.Attribute):
                    choice = choice.func.value  # f"...".strip()
                if isinstance(choice, ast.JoinedStr) or (isinstance(choice, ast.Constant) and choice.value):
                    found.append(f"{path.relative_to(ROOT)}:{choice.lineno}: {ast.unparse(choice)}")
    return found


def test_errors_are_made_of_templates(catalogue: ModuleType) -> None:
    paths = [
        path for part in ("carme/src", "spawner/src", "webui/src") for path in (ROOT / part).rglob("*.py")
    ]
    paths = [path for path in sorted(paths) if not _is_english(path)]
    assert [place for path in paths for place in _unmarked(catalogue, path)] == []


def test_values_are_translated_and_names_are_not() -> None:
    text = message(
        "A booking lasts at most {longest_minutes}, not {minutes}.",
        longest_minutes=minutes_text(720),
        minutes=minutes_text(1565),
    )
    assert text == "A booking lasts at most 12 hours, not 1 day 2 hours 5 minutes."
    german = "Eine Buchung dauert höchstens 12 Stunden, nicht 1 Tag 2 Stunden 5 Minuten."
    assert translated(text, "de-AT") == german
    text = message(
        "There is no partition {name!r}; there are: {known}.", name="job and session", known=listing("abc")
    )
    assert translated(text, "de") == "Es gibt keine Partition 'job and session'; es gibt: a, b und c."
    assert translated(listing([number(1, "GPU"), number(4, "processor")]), "de") == "1 GPU und 4 Prozessoren"
    for untranslated in ("", "Something that is not a message.", "You stopped this job."):
        assert translated(untranslated, "de") == untranslated
    assert translated(text, "fr") == translated(text, "") == str(text)
    unknown = message("A sentence of {name} that no catalogue has.", name="ada")
    assert translated(unknown, "de") == "A sentence of ada that no catalogue has."


def test_messages_travel_with_their_templates() -> None:
    error = NotFound(
        message("There is no account {name!r} on this host.", name="ada"),
        joined([message("Choose one of these."), "By hand."]),
        field="user",
    )
    sent = Failure.of(error).model_dump_json()
    assert json.loads(sent)["message"] == "There is no account 'ada' on this host."  # for other readers
    for received in (Failure.model_validate_json(sent).error(), pickle.loads(pickle.dumps(error))):
        assert type(received) is NotFound and str(received) == str(error)
        assert translated(received.message, "de") == "Auf diesem Rechner gibt es kein Konto 'ada'."
        assert translated(received.remedy, "de").endswith(" By hand.") != received.remedy
    plain = Failure.model_validate({"message": "Of an earlier version.", "kind": "not-found"}).error()
    assert translated(plain.message, "de") == "Of an earlier version."
    note = SessionNote(message=message("You stopped this session."))
    again = SessionNote.model_validate_json(note.model_dump_json(exclude_defaults=True))
    assert again == note and translated(again.message, "de") != note.message
    assert "messages" not in SessionNote(message="By hand.").model_dump_json(), "earlier versions refuse it"
    assert "messages" in SessionNote.model_json_schema(mode="serialization")["properties"]
    count = plural("{count} job of others", "{count} jobs of others", 2)
    assert Message.of_parts(json.loads(json.dumps(count.parts()))) == "2 jobs of others"


def test_many_sentences_in_a_row_travel_as_one() -> None:
    row = joined([message("You stopped this session."), *(f"{number}." for number in range(2000))])
    again = Message.of_parts(json.loads(json.dumps(row.parts() if isinstance(row, Message) else None)))
    assert (
        again is not None
        and again == row
        and row.startswith("You stopped this session. 0. 1. 2.")
        and row.endswith(" 1999.")
    )
    assert again.in_language("de").startswith("Sie haben diese Sitzung beendet. 0. 1.")


def test_what_cannot_be_filled_in_stays_english() -> None:
    template, german = "Slurm does not answer: {program} had not ended after {timeout:.0f} seconds.", "de"
    for timeout in (None, "long", 5):
        values = {"program": "squeue", "timeout": timeout}
        found = Message.of_parts({"text": "As it was.", "template": template, "values": values})
        assert found is not None and (found.in_language(german) == "As it was.") is (timeout != 5)
    header = {"text": "Nothing.", "template": "", "values": {}}
    assert Message.of_parts(header) is None
    assert translated(message(""), german) == ""


def test_messages_are_found_in_the_hubs_pages() -> None:
    text = joined([message("There is no account {name!r} on this host.", name="<b>'"), "By hand."])
    assert message_in(with_message(text)) == text
    assert translated(message_in(with_message(text)) or "", "de").startswith("Auf diesem Rechner")
    assert "<b>" not in with_message(text) and with_message("<b>") == "&lt;b&gt;"
    for markup in ("", "<p>", '<span data-message="">', '<span data-message="[1]">', with_message("plain")):
        assert message_in(markup) is None


@pytest.mark.parametrize(
    "parts",
    [
        {"text": "x", "template": "{name:>1000000000}", "values": {"name": "y"}},
        {"text": "x", "template": "{name.__class__}", "values": {"name": "y"}},
        {"text": "x", "template": "There is no {name!r}.", "values": {"file": "y"}},
        {"text": "x", "template": "{count} node", "plural": "{count} nodes", "values": {"count": "many"}},
    ],
)
def test_templates_that_no_catalogue_has_are_not_filled_in(parts: dict[str, object]) -> None:
    found = Message.of_parts(parts)
    assert found is not None and translated(found, "de") in ("x", "many Knoten")


def test_an_invalid_message_is_refused() -> None:
    deep: dict[str, object] = {"text": "x", "template": "{first}", "values": {}}
    for _turn in range(5000):
        deep = {"text": "x", "template": "{first}", "values": {"first": deep}}
    for parts in (None, "text", {}, {"text": 1, "template": "x", "values": {}}, deep):
        assert Message.of_parts(parts) is None
    assert Message.of_parts({"text": "x", "template": "x", "values": {"a": [1]}}) is None


@pytest.mark.parametrize("detail", ["", "4 of 4 used"])
def test_every_reason_of_a_waiting_job_has_its_german(detail: str) -> None:
    limits = [
        f"{holder}{scope}{resource}"
        for holder in ("QOS", "Assoc")
        for scope in ("Grp", "Max", "Min")
        for resource in (
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


def test_suspensions_have_their_german() -> None:
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
def test_every_ending_has_its_german(kind: str) -> None:
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


def test_the_end_of_a_log_follows_the_sentence() -> None:
    _ending, sentence = ending_of(ended("batch", exit_code=3), None, was_ready=True, log="Killed\n")
    assert sentence.endswith(" The end of its log says:\nKilled")
    assert translated(sentence, "de").endswith("Ende des Protokolls:\nKilled")
    for text in (sentence, str(sentence)):
        assert (
            without_log(text)
            == "The job ended with exit code 3; check the log and fix the problem, then submit it again."
        )
    assert translated(without_log(sentence), "de").startswith("Der Job endete mit dem Code 3; ")
    for row in (joined([message("Choose one of these."), sentence]), joined(["Ended.", sentence, "Bye."])):
        assert "Killed" in row and "Killed" not in without_log(row)
        assert "log says" not in without_log(row) and "exit code 3" in without_log(row)
        assert "Der Job endete mit dem Code 3; " in translated(without_log(row), "de")


def test_refusals_of_slurm_have_their_german() -> None:
    for pattern, _field, text, remedy in refusals._REFUSALS:
        assert translated(remedy, "de") != remedy, pattern
        assert translated(text, "de") != text
    error = refusal("sbatch", "sbatch: error: Access/permission denied")
    assert translated(error.message, "de").endswith(" (Slurm: Access/permission denied)")
    assert not translated(error.message, "de").startswith("Slurm denied")


def test_errors_are_reported_in_the_language_that_is_followed() -> None:
    error = InvalidRequest(
        message("A booking cannot begin in the past."),
        message("The earliest start now is {earliest}.", earliest="9:00"),
    )
    german = "Eine Buchung kann nicht in der Vergangenheit beginnen. Der früheste Beginn ist jetzt 9:00."
    try:
        follow(lambda: "de")
        assert str(error) == german
        assert error.message == "A booking cannot begin in the past."  # what travels stays English
        assert str(CarmeError("Plain.", "Text.")) == "Plain. Text."
    finally:
        follow(lambda: None)
    assert str(error).startswith("A booking cannot")
    assert translated(error.text, "de") == german  # what is stored


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


def test_requests_are_refused_in_german_too() -> None:
    for wrong, german in (
        ({"name": "x" * 70}, "'name' muss aus 1 bis 64 Buchstaben"),
        ({"stage": ["mnist"]}, "'stage[0]' muss eine Tabelle sein, nicht 'mnist'."),
        ({"array": "9-1"}, "'array' hat einen Bereich '9-1'; Bereiche gehen aufwärts"),
        ({"minutes": 0}, "'minutes' muss mindestens 1 sein, nicht 0."),
        ({"kind": "session"}, "Die Anfrage für eine Sitzung muss ein Abbild nennen."),
        ({"nosuch": 1}, "Eine Anfrage hat kein Feld 'nosuch'."),
    ):
        values = {"name": "x", "kind": "batch", "command": ["true"], "minutes": 5} | wrong
        with pytest.raises(InvalidRequest) as caught:
            JobRequest.read(values)
        assert translated(caught.value.message, "de").startswith(german)


def test_numbers_have_the_decimal_mark_of_the_language() -> None:
    shown = {
        message("{used:.1f} of {most:.1f} GiB", used=20.0, most=31.5): "20,0 von 31,5 GiB",
        message("{gpus} ({kind})", gpus=number(2, "GPU"), kind="a.100"): "2 GPUs (a.100)",
        memory(4000): "3,9 GiB",
        memory(1 << 20): "1 TiB",
        size(1.25 * 2**20): "1,2 MiB",
        decimal(0.52): "0,5",
        decimal(1e7): "10000000",
    }
    assert {text: translated(text, "de") for text in shown} == shown
    assert [str(text) for text in shown][2:] == ["3.9 GiB", "1 TiB", "1.2 MiB", "0.5", "10000000"]
