"""The second factor without a browser: what a password alone opens, and how a lost factor is taken off."""

import base64
import json
import time
from types import SimpleNamespace

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal import auth
from django.core.management import CommandError, call_command

from carme_webui.accounts.identity import register_hub
from carme_webui.accounts.models import User

from .conftest import PASSWORD, Browser
from .test_login import authorize, sign_in

SECURITY = "/profile/security/"
CODE = "/profile/security/authenticate/"


@pytest.fixture(autouse=True)
def _one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the codes stands still, so that none runs out between two lines of a test."""
    now = time.time()
    monkeypatch.setattr(auth, "time", SimpleNamespace(time=lambda: now))


def code_of(secret: str) -> str:
    """What an app with this key shows now."""
    return auth.format_hotp_value(auth.hotp_value(secret, next(auth.yield_hotp_counters_from_time())))


def wrong_code_of(secret: str) -> str:
    """A code that it does not show."""
    return "000000" if code_of(secret) != "000000" else "000001"


def turn_on(browser: Browser) -> tuple[str, list[str]]:
    """Set up an app as a user does; its key, and the recovery codes."""
    page = f"{SECURITY}totp/activate/"
    answer = browser.get(page)
    if answer.status_code == 302:  # confirm that it is you
        assert answer["Location"].startswith("/accounts/reauthenticate/")
        answer = browser.send(answer["Location"], answer["Location"], password=PASSWORD)
        assert answer.status_code == 302 and answer["Location"] == page
        answer = browser.get(page)
    html = answer.content.decode()
    secret = html.split('id="secret"')[1].split('value="')[1].split('"')[0]
    token = html.split('name="csrfmiddlewaretoken" value="')[1].split('"')[0]
    answer = browser.send_with(token, page, code=code_of(secret))
    assert (answer.status_code, answer["Location"]) == (302, f"{SECURITY}recovery-codes/")
    html = browser.get(answer["Location"]).content.decode()
    return secret, html.split("<pre")[1].split(">", 1)[1].split("</pre>")[0].split()


def test_a_password_alone_opens_nothing_any_more(browser: Browser, anonymous: Browser) -> None:
    secret, _codes = turn_on(browser)
    answer = sign_in(anonymous, next="/jobs/")
    assert (answer.status_code, answer["Location"].partition("?")[0]) == (302, CODE)
    assert anonymous.get("/jobs/").status_code == 302, "no page is open yet"
    assert "Incorrect code" in anonymous.send(CODE, CODE, code=wrong_code_of(secret)).content.decode()
    assert anonymous.get("/jobs/").status_code == 302
    answer = anonymous.send(CODE, CODE, code=code_of(secret))
    assert (answer.status_code, answer["Location"]) == (302, "/jobs/")
    assert anonymous.get("/jobs/").status_code == 200


@pytest.mark.usefixtures("frozen_clock")  # a used code is stored for as long as it is valid
def test_a_code_counts_once(browser: Browser, anonymous: Browser) -> None:
    secret, _codes = turn_on(browser)
    sign_in(anonymous)
    later = code_of(secret)
    assert anonymous.send(CODE, CODE, code=later).status_code == 302
    second = Browser()
    sign_in(second)
    assert "Incorrect code" in second.send(CODE, CODE, code=later).content.decode()


def test_guessing_codes_is_stopped(browser: Browser, anonymous: Browser) -> None:
    secret, _codes = turn_on(browser)
    sign_in(anonymous)
    answers = [anonymous.send(CODE, CODE, code=wrong_code_of(secret)) for _ in range(6)]
    assert "Too many" in answers[-1].content.decode()
    # The right code does not help anyone who guesses on.
    assert "Too many" in anonymous.send(CODE, CODE, code=code_of(secret)).content.decode()


def test_a_recovery_code_opens_once(browser: Browser, anonymous: Browser) -> None:
    _secret, codes = turn_on(browser)
    assert len(codes) == len(set(codes)) == 10
    sign_in(anonymous)
    assert anonymous.send(CODE, CODE, code=codes[0]).status_code == 302
    assert anonymous.get("/").status_code == 200
    second = Browser()
    sign_in(second)
    assert second.send(CODE, CODE, code=codes[0]).status_code == 200
    assert second.get("/").status_code == 302


def test_the_notebooks_login_requests_it_as_well(browser: Browser, anonymous: Browser) -> None:
    register_hub()
    secret, _codes = turn_on(browser)
    wanted = authorize(anonymous)["Location"]
    anonymous.send(
        wanted, "/accounts/login/", login="alice", password=PASSWORD, next=wanted.split("next=")[1]
    )
    assert authorize(anonymous)["Location"].startswith("/accounts/login/"), "no code for the hub before it"
    assert anonymous.send(CODE, CODE, code=code_of(secret)).status_code == 302
    answer = authorize(anonymous)
    assert answer["Location"].startswith("https://carme.example:8443/jupyter/hub/oauth_callback?code=")


def test_what_is_secret_is_not_readable_in_the_database(browser: Browser) -> None:
    secret, codes = turn_on(browser)
    stored = json.dumps(list(Authenticator.objects.values_list("data", flat=True)))
    assert secret not in stored and not any(code in stored for code in codes)
    raw = base64.b32decode(secret + "=" * (-len(secret) % 8))
    assert raw.hex() not in stored


def test_nothing_is_changed_without_the_password(browser: Browser) -> None:
    for page in ("totp/activate/", "webauthn/add/"):
        answer = browser.get(SECURITY + page)
        assert answer["Location"].startswith("/accounts/reauthenticate/?next=")


def test_anothers_keys_cannot_be_reached(browser: Browser, bob: User) -> None:
    turn_on(browser)
    key = Authenticator.objects.create(user=bob, type="webauthn", data={"name": "bob's", "credential": {}})
    for what in ("remove", "edit"):
        assert browser.get(f"{SECURITY}webauthn/keys/{key.pk}/{what}/").status_code == 404


@pytest.mark.parametrize("credential", ["", "{}", "[]", "null", '"x"', '{"id": 1}', "{", "1e999"])
def test_a_broken_passkey_gets_a_sentence(anonymous: Browser, alice: User, credential: str) -> None:
    anonymous.get(f"{SECURITY}webauthn/login/", headers={"accept": "application/json"})
    answer = anonymous.send("/accounts/login/", f"{SECURITY}webauthn/login/", credential=credential)
    assert (answer.status_code, answer["Location"]) == (302, "/accounts/login/")
    assert anonymous.get("/").status_code == 302


def test_a_lost_factor_is_taken_off(browser: Browser, anonymous: Browser, alice: User, capsys) -> None:
    turn_on(browser)
    call_command("remove_second_factor", "alice", "--json")
    assert json.loads(capsys.readouterr().out) == {"user": "alice", "removed": 2}
    call_command("remove_second_factor", "alice", "--json")
    assert json.loads(capsys.readouterr().out)["removed"] == 0
    assert sign_in(anonymous)["Location"] == "/"
    with pytest.raises(CommandError, match="no account 'nobody'"):
        call_command("remove_second_factor", "nobody")


def test_the_profile_says_whether_there_is_one(browser: Browser) -> None:
    assert "No second factor" in browser.get("/profile/").content.decode()
    turn_on(browser)
    assert "Protected by a second factor" in browser.get("/profile/").content.decode()
