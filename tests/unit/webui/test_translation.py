"""German: every text of the portal has a translation, the compiled file is current, and pages use it."""

import gettext
import importlib.util
import json
import re
from datetime import UTC, datetime
from gettext import GNUTranslations
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from django.utils import translation

import carme_webui
from carme_webui.accounts.models import User
from carme_webui.clocks import span_words
from carme_webui.jobs.models import Job
from carme_webui.profile.models import Notice
from carme_webui.profile.notices import notify
from carme_webui.sentences import SentenceField

from .conftest import Browser, Program
from .fake_broker import FakeBroker, make_job
from .session_steps import FORM

LOCALE = Path(carme_webui.__file__).parent / "locale/de/LC_MESSAGES"
PLACES = re.compile(r"%\(\w+\)(?:\.\d+)?[sdrf]|%[sdr]")


@pytest.fixture(scope="module")
def catalogue() -> ModuleType:
    """The program that keeps the catalogue."""
    path = Path(__file__).parents[3] / "webui/catalogue.py"
    spec = importlib.util.spec_from_file_location("catalogue", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_text_has_a_german_one(catalogue: ModuleType) -> None:
    with (LOCALE / "django.mo").open("rb") as stream:
        german = gettext.GNUTranslations(stream)
    texts = catalogue.texts()
    assert len(texts) > 700
    missing = []
    for text in texts:
        if isinstance(text, str):
            message = [german.gettext(text)]
        else:
            message = [german.ngettext(text[0], text[1], count) for count in (1, 2)]
        known = german._catalog  # type: ignore[attr-defined]
        if (text if isinstance(text, str) else (text[0], 0)) not in known:
            missing.append(text)
        english = text if isinstance(text, str) else text[1]
        assert all(sorted(PLACES.findall(form)) == sorted(PLACES.findall(english)) for form in message), text
    assert not missing, "run webui/catalogue.py, which says how to go on"


def test_the_compiled_file_is_that_of_the_readable_one() -> None:
    with (LOCALE / "django.po").open("rb") as stream:
        readable = read_po(stream, locale="de")
    compiled = BytesIO()
    write_mo(compiled, readable)
    compiled.seek(0)
    with (LOCALE / "django.mo").open("rb") as stream:
        assert _texts(compiled) == _texts(stream), "run webui/catalogue.py"


def test_no_template_has_words_that_are_not_marked() -> None:
    for path in (LOCALE.parents[2] / "templates").rglob("*.html"):
        text = re.sub(r"{%\s*blocktranslate.*?endblocktranslate\s*%}", "", path.read_text(), flags=re.S)
        text = re.sub(r"<script.*?</script>", "", text, flags=re.S)
        # A tag's own quotation marks may hold tags of templates.
        text = re.sub(r"<[^>]*>", " ", re.sub(r"{%.*?%}|{{.*?}}|{#.*?#}", "", text, flags=re.S), flags=re.S)
        words = set(re.findall(r"(?<!&)\b[A-Za-z]{2,}", text))
        assert words <= {"MiB", "UTC", "class", "entrance"}, path


PAGES = (
    "/",
    "/jobs/",
    "/bookings/",
    "/projects/",
    "/profile/",
    "/maintenance/",
    "/announcements/",
    "/tokens/",
)


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_german_where_the_browser_requests_it(
    browser: Browser, broker: FakeBroker, page: str
) -> None:
    german = browser.get(page, headers={"accept-language": "de-DE,de;q=0.9,en;q=0.5"})
    text = german.content.decode()
    assert '<html lang="de">' in text and "Zum Inhalt springen" in text and "Abmelden" in text
    assert german["Content-Language"] == "de" and "Accept-Language" in german["Vary"]
    french = browser.get(page, headers={"accept-language": "fr"}).content.decode()
    assert '<html lang="en">' in french and "Skip to the content" in french


def test_a_users_choice_comes_before_the_browsers_and_reaches_mails(browser: Browser, alice: User) -> None:
    alice.language = "de"
    alice.save()
    text = browser.get("/profile/", headers={"accept-language": "en"}).content.decode()
    assert "Sprache, Aussehen und Zeitzone" in text
    notify(alice, lambda: translation.gettext("Saved."))
    assert Notice.objects.get().text == "Gespeichert."
    assert translation.get_language() == "en"


def test_the_page_for_signing_in_is_german_too(anonymous: Browser) -> None:
    text = anonymous.get("/accounts/login/", headers={"accept-language": "de"}).content.decode()
    assert "Anmelden" in text and "Mit einem Passkey anmelden" in text


def test_times_are_written_in_the_language() -> None:
    start, end = datetime(2026, 11, 2, 13, 30, tzinfo=UTC), datetime(2026, 11, 2, 15, 30, tzinfo=UTC)
    assert span_words(start, end) == "Mon 2 Nov, 13:30 to 15:30"
    with translation.override("de"):
        assert span_words(start, end) == "Mo 2. Nov, 13:30 bis 15:30"
        assert span_words(start, end.replace(day=3)) == "Mo 2. Nov, 13:30 bis Di 3. Nov, 15:30"


def test_what_carme_refuses_is_german_on_pages_and_in_the_api(
    browser: Browser, program: Program, broker: FakeBroker
) -> None:
    german = {"accept-language": "de"}
    form = {**FORM, "csrfmiddlewaretoken": browser.token("/"), "minutes": "601"}
    page = browser.post("/sessions/start/", form, headers={"origin": "https://carme.example:8443", **german})
    assert page.status_code == 422 and "dauert höchstens 10 Stunden, nicht" in page.content.decode()
    sent = json.dumps({"image": "torch", "minutes": 60, "nodes": 9})
    answer = program.post("/api/v1/sessions", sent, content_type="application/json", headers=german)
    assert answer.json()["detail"].endswith("Verlangen Sie 1 bis 2.")
    english = program.post("/api/v1/sessions", sent, content_type="application/json")
    assert english.json()["detail"].endswith("Ask for 1 to 2.")


def test_why_a_job_waits_is_german_on_its_page(browser: Browser, broker: FakeBroker) -> None:
    Job.store([broker.put(make_job(7, state="PENDING", reason="Priority", kind="batch"))])
    for page in ("/jobs/", "/jobs/7/"):
        german = browser.get(page, headers={"accept-language": "de"}).content.decode()
        assert "Andere Jobs mit höherem Rang warten vor diesem" in german
        assert "Other jobs with a higher priority" in browser.get(page).content.decode()


def _texts(compiled: IO[bytes]) -> dict[str | tuple[str, int], str]:
    """The texts of a compiled catalogue, without its header, which names the version of the compiler."""
    texts = dict(GNUTranslations(compiled)._catalog)  # type: ignore[attr-defined]
    assert texts.pop("")
    return texts


def test_a_stored_sentence_that_cannot_be_filled_in_is_shown_in_english() -> None:
    field = SentenceField()
    assert field.from_db_value('{"message": {"text": "As it was.", "template": ""}}') == "As it was."
    for stored in ('{"message": 1}', '{"message": {"text": 1}}', '{"message": no'):
        assert field.from_db_value(stored) == stored
