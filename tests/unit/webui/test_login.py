"""Signing in and out, and being the identity provider."""

import base64
import io
import json
import sys
import time
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
from allauth.core.internal import ratelimit
from celery.exceptions import Retry
from django.conf import settings as django_settings
from django.core.management import CommandError, call_command
from django.core.management.base import BaseCommand

from carme_webui.accounts import login, tasks
from carme_webui.accounts.identity import register_hub
from carme_webui.accounts.models import User
from carme_webui.main import main
from carme_webui.notifier import Notifier
from carme_webui.sessions.hub import HubUnavailable

from .conftest import CLIENT_SECRET, PASSWORD, REDIS, Browser, needs_redis
from .fake_hub import FakeHub

LOGIN = "/accounts/login/"
CALLBACK = "https://carme.example:8443/jupyter/hub/oauth_callback"


def sign_in(browser: Browser, password: str = PASSWORD, **fields: str):
    return browser.send(LOGIN, LOGIN, login="alice", password=password, **fields)


def test_a_page_leads_to_the_login_and_back(anonymous: Browser, alice: User) -> None:
    answer = anonymous.get("/jobs/?state=failed")
    assert answer.status_code == 302
    assert answer["Location"] == "/accounts/login/?next=/jobs/%3Fstate%3Dfailed"
    answer = sign_in(anonymous, next="/jobs/?state=failed")
    assert (answer.status_code, answer["Location"]) == (302, "/jobs/?state=failed")
    assert anonymous.get("/jobs/").status_code == 200


@pytest.mark.parametrize(
    ("referer", "back"),
    [
        ("https://carme.example:8443/?image=torch", "/%3Fimage%3Dtorch"),
        ("https://carme.example:8443/sessions/s1/", "/sessions/s1/"),
        ("https://evil.example/sessions/s1/", "/"),
        ("", "/"),
    ],
)
def test_a_form_that_comes_after_its_login_leads_back_to_its_page(
    browser: Browser, referer: str, back: str
) -> None:
    token = browser.own_token()
    browser.cookies.pop(django_settings.SESSION_COOKIE_NAME)
    answer = browser.post(
        "/sessions/start/",
        {"csrfmiddlewaretoken": token},
        headers={"origin": "https://carme.example:8443", "referer": referer},
    )
    assert (answer.status_code, answer["Location"]) == (302, f"/accounts/login/?next={back}")
    page = browser.get(answer["Location"]).content.decode()
    assert "Your login has expired, so this was not done." in page, "nobody takes it for done"


@pytest.mark.parametrize(
    "target", ["https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:alert(1)"]
)
def test_a_login_never_leads_to_another_site(anonymous: Browser, alice: User, target: str) -> None:
    answer = sign_in(anonymous, next=target)
    assert (answer.status_code, answer["Location"]) == (302, "/")


def test_a_wrong_password_gives_a_sentence_and_no_login(anonymous: Browser, alice: User) -> None:
    answer = sign_in(anonymous, "wrong")
    assert answer.status_code == 200
    assert "not correct" in answer.content.decode()
    assert anonymous.get("/").status_code == 302


def test_a_session_that_somebody_else_began_is_not_the_one_of_the_login(
    anonymous: Browser, alice: User
) -> None:
    """Session fixation: a cookie that was planted before the login opens nothing after it."""
    planted = anonymous.session
    planted["planted"] = "x"
    planted.save()
    name = django_settings.SESSION_COOKIE_NAME
    known = anonymous.cookies[name].value
    invented = Browser()
    invented.cookies[name] = "0" * 32
    for browser, before in ((anonymous, known), (invented, "0" * 32)):
        assert sign_in(browser).status_code == 302
        assert browser.get("/jobs/").status_code == 200
        assert browser.cookies[name].value != before
        attacker = Browser()
        attacker.cookies[name] = before
        assert attacker.get("/jobs/").status_code == 302


def test_guessing_a_password_is_stopped(anonymous: Browser, alice: User) -> None:
    answers = [sign_in(anonymous, f"guess {number}") for number in range(6)]
    assert "Too many failed login attempts" in answers[-1].content.decode()
    # The right password does not help anyone who guesses on.
    assert "Too many failed login attempts" in sign_in(anonymous).content.decode()


def test_there_is_no_sign_up(anonymous: Browser) -> None:
    assert anonymous.get("/accounts/signup/").status_code == 404


def test_signing_out_needs_a_form(browser: Browser) -> None:
    assert browser.get("/accounts/logout/").status_code == 200
    assert browser.get("/").status_code == 200
    signed_out = browser.send("/accounts/logout/", "/accounts/logout/")
    assert signed_out.status_code == 302
    # The cookies of JupyterHub and its servers go as well.
    assert signed_out["Clear-Site-Data"] == '"cookies"'
    assert browser.get("/").status_code == 302


@pytest.mark.parametrize("down", [False, True])
def test_signing_out_notifies_the_hub(
    browser: Browser, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, down: bool
) -> None:
    """Without the worker."""
    left: list[Any] = []
    monkeypatch.setattr(login, "run_soon", lambda task, *arguments: left.append((task.name, *arguments)))
    hub.down = down
    begin = time.time()
    assert browser.send("/accounts/logout/", "/accounts/logout/").status_code == 302
    [(path, body)] = hub.called("DELETE")
    assert path == "carme/logins/alice"
    assert begin <= body["before"] <= time.time()
    task = "carme_webui.accounts.tasks.sign_out_of_hub"
    assert left == ([(task, "alice", body["before"])] if down else [])
    assert browser.get("/").status_code == 302, "also while the hub is away"


@needs_redis
def test_the_worker_notifies_a_hub_that_was_away(
    browser: Browser, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.down = True
    browser.send("/accounts/logout/", "/accounts/logout/")
    with REDIS.client() as client:
        assert "tasks.sign_out_of_hub" in str(client.lrange("carme:celery", 0, -1))
    tried: list[Any] = []
    monkeypatch.setattr(tasks.sign_out_of_hub, "retry", lambda exc: tried.append(exc) or Retry())
    task: Any = tasks.sign_out_of_hub  # Celery fills in the first argument
    with pytest.raises(Retry):
        task("alice", 1.0)
    assert isinstance(tried[0], HubUnavailable), "as the worker runs it"
    hub.down = False
    task("alice", 1.0)
    assert len(tried) == 1 and hub.called("DELETE")[-1] == ("carme/logins/alice", {"before": 1.0})


def test_without_redis_signing_out_reaches_the_hub(
    browser: Browser, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Notifier, "redis_answers", lambda self: False)
    browser.send("/accounts/logout/", "/accounts/logout/")
    assert [path for path, _body in hub.called("DELETE")] == ["carme/logins/alice"]


NEW = "staple battery horse"
CHANGE = "/profile/password/"


def change(browser: Browser, old: str = PASSWORD, new: str = NEW, again: str = NEW):
    return browser.send(CHANGE, CHANGE, old_password=old, new_password1=new, new_password2=again)


def test_a_changed_password_ends_all_other_logins(
    anonymous: Browser, browser: Browser, alice: User, hub: FakeHub, at_once
) -> None:
    sign_in(anonymous)
    assert CHANGE in browser.get("/profile/").content.decode()
    assert change(browser).status_code == 302
    assert "is changed" in browser.get("/profile/").content.decode()
    assert anonymous.get("/").status_code == 302, "who was signed in with the old one is not any more"
    assert [path for path, _body in hub.called("DELETE")] == ["carme/logins/alice"]
    assert "not correct" in sign_in(anonymous).content.decode()
    assert sign_in(anonymous, NEW).status_code == 302


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"old": "wrong"}, "old password was entered incorrectly"),
        ({"again": "something else"}, "two password fields"),
        ({"new": "short", "again": "short"}, "at least 10 characters"),
        ({"new": "password1234", "again": "password1234"}, "too common"),
    ],
)
def test_a_weak_or_wrong_password_is_refused(
    browser: Browser, alice: User, fields: dict[str, str], sentence: str
) -> None:
    answer = change(browser, **fields)
    assert answer.status_code == 422 and sentence in answer.content.decode()
    alice.refresh_from_db()
    assert alice.check_password(PASSWORD)


def test_the_old_password_cannot_be_guessed(
    browser: Browser, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = time.time()  # five within a minute, however long they take
    monkeypatch.setattr(ratelimit, "time", SimpleNamespace(**vars(time) | {"time": lambda: moment}))
    token = browser.token(CHANGE)
    guess = {"old_password": "wrong", "new_password1": NEW, "new_password2": NEW}
    assert [browser.send_with(token, CHANGE, **guess).status_code for _ in range(6)] == [422] * 5 + [429]


def test_a_password_that_is_stored_elsewhere_cannot_be_changed_here(browser: Browser, alice: User) -> None:
    alice.set_unusable_password()
    alice.save()
    browser.force_login(alice)
    assert browser.get(CHANGE).status_code == 404
    assert CHANGE not in browser.get("/profile/").content.decode()


def test_cookies_belong_to_this_origin_alone(anonymous: Browser, alice: User) -> None:
    sign_in(anonymous)
    cookies = {name: cookie for name, cookie in anonymous.cookies.items() if cookie.value}
    assert set(cookies) == {"__Host-carme-session", "__Host-carme-csrf"}
    for cookie in cookies.values():
        assert cookie["secure"] and cookie["httponly"] and cookie["path"] == "/" and not cookie["domain"]


# --- commands --------------------------------------------------------------------------------------------


def add_user(monkeypatch: pytest.MonkeyPatch, capsys, password: str, *arguments: str) -> dict:
    monkeypatch.setattr(sys, "stdin", io.StringIO(password + "\n"))
    call_command("add_user", *arguments, "--json")
    return json.loads(capsys.readouterr().out)


def test_add_user_twice_changes_nothing_the_second_time(db, monkeypatch, capsys) -> None:
    arguments = ("carol", "--email", "carol@carme.example", "--admin")
    assert add_user(monkeypatch, capsys, "secret", *arguments) == {
        "user": "carol", "created": True, "changed": True,
    }  # fmt: skip
    assert not add_user(monkeypatch, capsys, "secret", *arguments)["changed"]
    assert add_user(monkeypatch, capsys, "other", *arguments) == {
        "user": "carol", "created": False, "changed": True,
    }  # fmt: skip
    carol = User.objects.get(username="carol")
    assert carol.check_password("other") and carol.is_superuser and carol.email == "carol@carme.example"


@pytest.mark.parametrize("name", ["Carol", "a b", "x;rm", "../x", "-x", "", "a" * 33, "root\n"])
def test_add_user_refuses_what_is_no_unix_name(db, monkeypatch, capsys, name: str) -> None:
    with pytest.raises(CommandError):
        add_user(monkeypatch, capsys, "secret", "--", name)
    assert not User.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_the_console_script_takes_hyphens(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["carme-portal", "add-user", "carol", "--json"])
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "carme_webui.settings")  # which it sets itself
    monkeypatch.setattr(sys, "stdin", io.StringIO("secret\n"))
    main()
    assert json.loads(capsys.readouterr().out)["created"]
    assert User.objects.get().username == "carol"


@pytest.mark.django_db(transaction=True)
def test_only_the_command_for_that_examines_the_portals_code(monkeypatch) -> None:
    """Each other one would load all pages first."""
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "carme_webui.settings")
    examining: list[str] = []
    monkeypatch.setattr(BaseCommand, "check", lambda self, **_: examining.append(type(self).__module__))
    for command in (["sync-clients"], ["migrate", "--check"], ["check"]):
        monkeypatch.setattr(sys, "argv", ["carme-portal", *command])
        main()
    assert examining == ["django.core.management.commands.check"]


def test_add_user_needs_a_password(db, monkeypatch, capsys) -> None:
    with pytest.raises(CommandError, match="no password on standard input"):
        add_user(monkeypatch, capsys, "", "carol")


def test_sync_clients_twice_changes_nothing_the_second_time(db, capsys) -> None:
    call_command("sync_clients", "--json")
    call_command("sync_clients", "--json")
    first, second = capsys.readouterr().out.splitlines()
    assert (json.loads(first)["changed"], json.loads(second)["changed"]) == (True, False)


# --- the identity provider -------------------------------------------------------------------------------


def authorize(browser: Browser, **fields: str):
    query = {
        "client_id": "jupyterhub",
        "response_type": "code",
        "redirect_uri": CALLBACK,
        "scope": "openid profile",
        "state": "a-state",
    }
    return browser.get("/identity/o/authorize", query | fields)


def exchange(code: str, secret: str = CLIENT_SECRET):
    """The hub's request for a token: plain HTTP on the portal's own address."""
    basic = base64.b64encode(f"jupyterhub:{secret}".encode()).decode()
    fields = {"grant_type": "authorization_code", "code": code, "redirect_uri": CALLBACK}
    hub = Browser()
    hub.defaults = {}
    return hub.post(
        "/identity/o/api/token",
        fields,
        headers={"host": "127.0.0.1:8100", "authorization": f"Basic {basic}"},
    )


def test_jupyterhub_learns_who_signed_in(anonymous: Browser, alice: User, folder) -> None:
    register_hub()
    answer = authorize(anonymous)
    assert answer.status_code == 302 and answer["Location"].startswith("/accounts/login/?next=")
    answer = sign_in(anonymous, next=parse_qs(urlsplit(answer["Location"]).query)["next"][0])
    answer = anonymous.get(answer["Location"])
    assert answer.status_code == 302 and answer["Location"].startswith(CALLBACK + "?")
    back = parse_qs(urlsplit(answer["Location"]).query)
    assert back["state"] == ["a-state"]

    answer = exchange(back["code"][0])
    assert answer.status_code == 200, answer.content
    tokens = answer.json()
    hub = Browser()
    hub.defaults = {}
    answer = hub.get(
        "/identity/o/api/userinfo",
        headers={"host": "127.0.0.1:8100", "authorization": f"Bearer {tokens['access_token']}"},
    )
    assert answer.status_code == 200
    assert answer.json()["preferred_username"] == "alice"

    configuration = anonymous.get("/.well-known/openid-configuration").json()
    assert configuration["issuer"] == "https://carme.example:8443"
    assert configuration["token_endpoint"] == "https://carme.example:8443/identity/o/api/token"
    keys = jwt.PyJWKSet.from_dict(anonymous.get("/.well-known/jwks.json").json())
    claims = jwt.decode(
        tokens["id_token"], keys.keys[0], ["RS256"], audience="jupyterhub", issuer=configuration["issuer"]
    )
    assert claims["sub"] == str(alice.pk)

    assert exchange(back["code"][0]).status_code == 400, "a code counts once"


def test_a_wrong_client_secret_gets_no_token(browser: Browser) -> None:
    register_hub()
    code = parse_qs(urlsplit(authorize(browser)["Location"]).query)["code"][0]
    assert exchange(code, "guess").status_code == 401


@pytest.mark.parametrize(
    "redirect",
    ["https://evil.example/", CALLBACK + "/../x", CALLBACK + "@evil.example", "http://carme.example:8443/"],
)
def test_a_code_goes_nowhere_but_to_the_hub(browser: Browser, redirect: str) -> None:
    register_hub()
    answer = authorize(browser, redirect_uri=redirect)
    assert "Location" not in answer
    assert "Sign-in not possible" in answer.content.decode()


def test_an_unknown_client_is_refused(browser: Browser) -> None:
    register_hub()
    answer = authorize(browser, client_id="<script>alert(1)</script>")
    assert "Sign-in not possible" in answer.content.decode()
    assert "<script>alert" not in answer.content.decode()
