"""Signing in at an outside OpenID Connect provider, which is a small real one on loopback."""

import pwd
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from django.conf import settings as django_settings
from simulated_provider import CLIENT, SECRET, Provider

from carme.config.settings import OidcSettings
from carme_webui.accounts.models import User

from .conftest import Browser

BEGIN = "/accounts/outside/"
BACK = "https://carme.example:8443/accounts/outside/back/"


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    found = Provider(BACK)
    yield found
    found.stop()


@pytest.fixture
def provider(running: Provider, settings, folder) -> Provider:
    (folder / "secrets/oidc-provider-secret").write_text(SECRET)
    site = django_settings.SITE
    reported = OidcSettings(issuer=running.issuer, client_id=CLIENT, name="Example University")
    settings.SITE = site.model_copy(update={"oidc": reported})
    running.claims = {"sub": "u-1", "preferred_username": "alice"}
    running.change, running.key, running.down = {}, "own", False
    return running


@pytest.fixture
def outsider(db: None) -> User:
    """Alice, who has no password here."""
    user = User(username="alice")
    user.set_unusable_password()
    user.save()
    return user


def go(browser: Browser, provider: Provider, **change: str) -> Any:
    """Sign in there; what the portal answers when the browser comes back."""
    there = browser.get(BEGIN)
    assert there.status_code == 302
    query = provider.authorize(there["Location"]) | change
    return browser.get(f"{BEGIN}back/?{urlencode(query)}")


def is_refused(browser: Browser, answer: Any, sentence: str) -> bool:
    """Nobody is signed in, and the login page says why."""
    page = browser.get("/accounts/login/").content.decode().replace("&#x27;", "'")
    return (
        answer["Location"] == "/accounts/login/"
        and sentence in page
        and "_auth_user_id" not in browser.session
    )


def test_a_user_of_the_provider_is_signed_in(anonymous: Browser, provider: Provider, outsider: User) -> None:
    page = anonymous.get("/accounts/login/?next=/jobs/").content.decode()
    assert "Sign in with Example University" in page and "/accounts/outside/?next=/jobs/" in page
    there = anonymous.get(f"{BEGIN}?next=/jobs/")
    answer = anonymous.get(f"{BEGIN}back/?{urlencode(provider.authorize(there['Location']))}")
    assert (answer.status_code, answer["Location"]) == (302, "/jobs/")
    assert anonymous.get("/jobs/").status_code == 200


def test_redirects_stay_on_the_site(anonymous: Browser, provider: Provider, outsider: User) -> None:
    there = anonymous.get(f"{BEGIN}?next=https://evil.example/")
    answer = anonymous.get(f"{BEGIN}back/?{urlencode(provider.authorize(there['Location']))}")
    assert answer["Location"] == "/"


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"iss": "https://other.example"},
        {"aud": "other"},
        {"sub": None},
        {"exp": 1},
    ],
)
def test_a_token_that_is_not_for_this_sign_in_is_refused(
    anonymous: Browser, provider: Provider, outsider: User, change: dict[str, Any]
) -> None:
    provider.change = change
    assert is_refused(anonymous, go(anonymous, provider), "was not accepted")


def test_a_token_that_others_have_signed_is_refused(
    anonymous: Browser, provider: Provider, outsider: User
) -> None:
    provider.key = "foreign"
    assert is_refused(anonymous, go(anonymous, provider), "was not accepted")


def test_an_answer_to_another_browser_or_a_second_time_is_refused(
    anonymous: Browser, provider: Provider, outsider: User
) -> None:
    assert is_refused(anonymous, go(anonymous, provider, state="another"), "was not accepted")
    query = provider.authorize(anonymous.get(BEGIN)["Location"])
    victim = Browser()
    assert is_refused(victim, victim.get(f"{BEGIN}back/?{urlencode(query)}"), "was not accepted")
    # A code of one's own with the state of another sign-in: PKCE's verifier does not fit.
    own_reply = provider.authorize(anonymous.get(BEGIN)["Location"])
    other_reply = provider.authorize(Browser().get(BEGIN)["Location"])
    answer = anonymous.get(f"{BEGIN}back/?{urlencode(own_reply | {'code': other_reply['code']})}")
    assert is_refused(anonymous, answer, "was not accepted")
    again = provider.authorize(anonymous.get(BEGIN)["Location"])
    assert anonymous.get(f"{BEGIN}back/?{urlencode(again)}")["Location"] == "/"
    anonymous.logout()
    assert is_refused(anonymous, anonymous.get(f"{BEGIN}back/?{urlencode(again)}"), "was not accepted")


@pytest.mark.parametrize("name", [None, 7, "", "alice/x", "root;x", "1000", "a" * 65])
def test_an_invalid_account_name_signs_nobody_in(
    anonymous: Browser, provider: Provider, outsider: User, name: Any
) -> None:
    provider.claims |= {"preferred_username": name, "email": "alice@example.org", "email_verified": True}
    assert is_refused(anonymous, go(anonymous, provider), "did not say which account")


def test_accounts_that_sign_in_otherwise_stay_so(
    anonymous: Browser, provider: Provider, alice: User, bob: User
) -> None:
    assert is_refused(anonymous, go(anonymous, provider), "signs in with its password")
    bob.set_unusable_password()
    bob.is_active = False
    bob.save()
    provider.claims["preferred_username"] = "bob"
    assert is_refused(anonymous, go(anonymous, provider), "This account is closed")


def test_an_account_comes_of_a_unix_account_alone(
    anonymous: Browser, provider: Provider, db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrolled: list[str] = []
    monkeypatch.setattr(
        "carme_webui.accounts.outside.enrol_soon", lambda user: enrolled.append(user.username)
    )
    for name in ("root", "nobody-knows-this"):
        provider.claims["preferred_username"] = name
        assert is_refused(anonymous, go(anonymous, provider), f"There is no account {name}")
    known = pwd.struct_passwd(("ada", "x", 4321, 4321, "", "/home/ada", "/bin/sh"))
    monkeypatch.setattr("carme_webui.accounts.outside.pwd.getpwnam", lambda name: known)
    provider.claims["preferred_username"] = "ada"
    assert go(anonymous, provider)["Location"] == "/"
    created = User.objects.get(username="ada")
    assert not created.has_usable_password() and not created.is_staff and enrolled == ["ada"]


def test_a_second_factor_is_requested_here_too(
    anonymous: Browser, provider: Provider, outsider: User
) -> None:
    from allauth.mfa.totp.internal import auth

    auth.TOTP.activate(outsider, auth.generate_totp_secret())
    assert "authenticate" in go(anonymous, provider)["Location"]
    assert "_auth_user_id" not in anonymous.session


def test_a_provider_that_is_away_is_reported(anonymous: Browser, provider: Provider, outsider: User) -> None:
    provider.down = True
    assert is_refused(anonymous, anonymous.get(BEGIN), "The provider does not answer")


def test_without_a_provider_there_is_no_such_way(anonymous: Browser) -> None:
    assert anonymous.get(BEGIN)["Location"] == "/accounts/login/"
    assert anonymous.get(f"{BEGIN}back/?code=x&state=y")["Location"] == "/accounts/login/"
    assert "outside" not in anonymous.get("/accounts/login/").content.decode()


@pytest.mark.parametrize(
    "values",
    [
        {"issuer": "http://login.example.org", "client_id": "x"},
        {"issuer": "https://login.example.org"},
        {"issuer": "https://login.example.org", "client_id": "x", "claim": "email"},
        {"issuer": "https://login.example.org", "client_id": "x", "scope": "profile"},
    ],
)
def test_settings_that_would_be_unsafe_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        OidcSettings(**values)
