"""Markup in every text that somebody else may have chosen, and in every field of every form: shown as text.

It needs no browser, only the life that all pages show something of.
"""

import json
from http import HTTPStatus
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from django.apps import apps
from django.db import models

from carme.jobs import Node
from carme_webui.accounts.models import User
from carme_webui.administration.models import AuditEntry
from carme_webui.jobs.models import Job
from carme_webui.profile.models import Notice

from ..conftest import Browser
from ..fake_broker import FakeBroker, make_job
from .test_accessibility import FURTHER, NOT_SEEN, concrete, routes

pytestmark = pytest.mark.django_db(transaction=True)

MARK = "<img src=x onerror=alert(1)>'\"</script>"
RAW = ("<img src=x", "</script>'", '"</script>')
#: All names that forms of the portal have.
NAMES = """
    title text name image app partition gpu_type gpus_per_node nodes hours minutes account reservation
    stage results script script_path arguments array workdir user answer reason do message project
    role until label scopes days requirements definition base folder description source path kind
    length date time users language theme page mail start end start_date start_time end_date
    end_time node email slot old_password new_password1 new_password2 password code limit gpus jobs
    gpu_hours partitions cpus_per_node memory_mb_per_node
"""
FIELDS = dict.fromkeys(NAMES.split(), MARK) | {"next": "//evil.example/"}
#: What the pages' addresses and the portal's own decisions hang on.
UNCHANGED = {
    *("name", "username", "password", "digest", "start", "state", "kind", "key", "user", "link", "cause"),
    *("ending", "stage_name", "session_name", "session_image", "mailing", "language", "theme", "email"),
    "cursor",
}


def _of_the_portal() -> list[type[models.Model]]:
    return [
        model
        for model in apps.get_models()
        if model.__module__.startswith("carme_webui.") and model is not User
    ]


@pytest.fixture
def markup_data(sample_data: None, broker: FakeBroker, alice: User, root: User) -> None:
    """A life in which all texts are markup, which the browser must show as text."""
    Notice.objects.create(user=alice, text="x")
    AuditEntry.objects.create(by=root, text="x")
    message = {"state": "PENDING", "explanation": MARK, "node_list": MARK, "reason": MARK, "account": MARK}
    Job.store([broker.put(make_job(9, kind="batch", **message | {"name": MARK, "image": "torch"}))])
    for model in _of_the_portal():
        texts = {
            field.name: MARK[: field.max_length or None]
            for field in model._meta.concrete_fields
            if isinstance(field, models.CharField | models.TextField)
            and not (field.unique or field.choices or field.name in UNCHANGED)
        }
        if texts:
            model._default_manager.update(**texts)
        for row in model._default_manager.all():
            for name, value in (
                ("packages", {MARK: MARK}),
                ("entry_points", {"lab": MARK}),
                ("users", [MARK]),
            ):
                if hasattr(row, name) and isinstance(getattr(row, name), dict | list):
                    model._default_manager.filter(pk=row.pk).update(**{name: value})
            if isinstance(options := getattr(row, "options", None), dict):
                model._default_manager.filter(pk=row.pk).update(options=options | {"title": MARK})
    broker.logs[7] = MARK.encode()
    broker.cluster = broker.cluster.model_copy(
        update={
            "nodes": [*broker.cluster.nodes, Node(name="n9", cpus=1, memory_mb=1, state="DOWN", reason=MARK)]
        }
    )
    (broker.home / MARK.replace("/", "")).write_text(MARK)
    (broker.home / f"{MARK.replace('/', '')} folder").mkdir()


def _wrong(answer: Any) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if answer.status_code >= 500:
        return str(answer.status_code)
    if answer.streaming or "html" not in answer.headers.get("Content-Type", ""):
        return ""
    text = answer.content.decode()
    # The pages' own scripts end with the same word.
    return next((f"{raw} in {text[max(0, text.index(raw) - 60) :][:160]}" for raw in RAW if raw in text), "")


def _signed_in(user: User) -> Browser:
    browser = Browser()
    browser.force_login(user)
    return browser


def test_every_text_is_shown_as_text(
    markup_data: None, alice: User, bob: User, root: User, broker: FakeBroker
) -> None:
    seen, wrong = 0, {}
    addresses = [concrete(route) for route in routes() if route not in NOT_SEEN]
    addresses += [path.format(home=broker.home) for path in FURTHER] + ["jobs/9/", "jobs/9/recipe/"]
    for who in (bob, alice, root):
        browser = _signed_in(who)
        for address in addresses:
            if (
                "impersonation/end" in address
                or address.startswith("accounts/logout")
                or address == "updates/"
            ):
                continue
            answer = browser.get(f"/{address}")
            if message := _wrong(answer):
                wrong[f"{who} {address}"] = message
            if not answer.streaming:
                seen += b"&lt;img src=x onerror" in answer.content
    assert not wrong, json.dumps(wrong, indent=1)
    assert seen > 40, "the texts were on the pages"


def _after(browser: Browser, who: User, address: str, to: str) -> dict[str, str]:
    """What is wrong with the page that a form redirected to."""
    if urlsplit(to).scheme or urlsplit(to).netloc or to.startswith("//"):
        return {f"{who} {address}": f"leads to {to}"}
    message = _wrong(browser.get(urljoin(f"/{address}", to)))
    return {f"{who} {address} and after it": message} if message else {}


def test_what_every_form_is_sent_comes_back_as_text(
    sample_data: None, bob: User, alice: User, root: User, broker: FakeBroker
) -> None:
    wrong: dict[str, str] = {}
    for who in (bob, alice, root):
        browser = _signed_in(who)
        token = browser.token("/jobs/submit/")
        for address in (concrete(route) for route in routes()):
            if address.startswith(("accounts/", "identity/")) or "impersonation/end" in address:
                continue  # signs out
            answer = browser.send_with(token, f"/{address}", **FIELDS)
            if message := _wrong(answer):
                wrong[f"{who} {address}"] = message
            if answer.status_code == HTTPStatus.FOUND:
                wrong |= _after(browser, who, address, answer["Location"])
    assert not wrong, json.dumps(wrong, indent=1)
