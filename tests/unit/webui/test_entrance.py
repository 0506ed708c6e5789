"""Who may pass to a notebook server."""

import asyncio
import threading

import httpx
import pytest
from django.conf import settings
from django.contrib.auth import SESSION_KEY
from django.contrib.sessions.models import Session as Login
from hypothesis import given
from hypothesis import strategies as st

from carme_webui.accounts.entrance import admit, owner_of
from carme_webui.accounts.models import User
from carme_webui.asgi import application, pages
from patience import HANG

from .conftest import PASSWORD, Browser

BASE = "/jupyter/"


def cookies(browser: Browser) -> str:
    return "; ".join(f"{name}={cookie.value}" for name, cookie in browser.cookies.items())


# --- whose server it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "/jupyter/user/alice/s0123abcd/lab",
        "/jupyter/user/alice",
        "/jupyter/user/alice/",
        "/jupyter/user/alice?next=/jupyter/user/bob/",
        "/jupyter/user/alice/s1/api/contents/My%20file.ipynb",
        "/jupyter/user/alice/s1/api/contents/100%25.ipynb?x=%2F..%2F",
        "/jupyter/user/alice/s1/api/contents/a%2Fb.ipynb",
        "/jupyter/user/alice/s1/api/contents/%E4%BD%A0%E5%A5%BD.ipynb",
        "/jupyter/user/alice/s1/app/plots/%FF",
        "/jupyter/user/alice/s1/files/caf%E9%2F%25FF.txt",
        "/jupyter/user/alice/s1//double",
        "/jupyter/user/alice/s1/x/../y",
        "/jupyter/user/%61lice/s1/",
    ],
)
def test_an_honest_address_has_an_owner(address: str) -> None:
    assert owner_of(address, BASE) == "alice"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Alice", "Alice"),
        ("alice@bob", "alice@bob"),
        ("x%40lab.org", "x@lab.org"),
        ("anna.maria", "anna.maria"),
        ("a%2Bb", "a+b"),
    ],
)
def test_names_of_directories_are_names_of_their_own(written: str, name: str) -> None:
    assert owner_of(f"/jupyter/user/{written}/s1/", BASE) == name


HOSTILE = [
    "",
    "/",
    "x",
    "/jupyter/",
    "/jupyter/user/",
    "/jupyter/user//alice/",
    "//jupyter/user/alice/",
    "/jupyter//user/alice/",
    "/./jupyter/user/alice/",
    "/jupyter/user/./alice/",
    "/jupyter/hub/home",
    "/jupyter/user-redirect/alice/",
    "/jupyter/users/alice/",
    "/Jupyter/User/alice/",
    "/jupyter/user/alice/../bob/",
    "/jupyter/user/alice/x/../../bob/",
    "/jupyter/user/alice/..",
    "/jupyter/user/alice/../../hub/home",
    "/jupyter/user/alice/%2e%2e/bob/",
    "/jupyter/user/alice/%2E%2E%2Fbob/",
    "/jupyter/user/alice/..%2fbob/",
    "/jupyter/user/alice/..%5cbob/",
    "/jupyter/user/alice/..\\bob/",
    "/jupyter/user/alice\\..\\bob/",
    "/jupyter/user/alice/%252e%252e/bob/",
    "/jupyter/user/alice/%252e%252e%252fbob/",
    "/jupyter/user/alice/%25252e%25252e%25252fbob/",
    "/jupyter/user/alice/%2525252525252e",
    "/jupyter/user/bob%2f..%2falice/",
    "/jupyter/user/bob/../alice/",
    "/jupyter/user/bob%252f..%252falice/",
    "/jupyter/user/%2e%2e/user/alice/",
    "/jupyter/user/alice%00/",
    "/jupyter/user/alice/%00",
    "/jupyter/user/alice%20/",
    "/jupyter/user/alice;x/",
    "/jupyter/user/alice%3f/",
    "/jupyter/user/alice%0d%0aX:/",
    "/jupyter/user/al%69ce%ff/",
    "/jupyter/user/alice%c0%af../",
    "/jupyter/user/alice/%ff/%2e%2e%2f../bob/",
    "/jupyter/user/%ef%bd%81lice/",
    "/jupyter/user/alicé/",
    "/jupyter/user/" + "a" * 65 + "/",
    "https://carme.example/jupyter/user/alice/",
    "../jupyter/user/alice/",
    "*",
]


@pytest.mark.parametrize("address", HOSTILE)
def test_an_address_that_can_be_read_in_two_ways_has_none(address: str) -> None:
    assert owner_of(address, BASE) is None


@given(st.lists(st.sampled_from(
    ["alice", "bob", "user", "/", "//", "..", ".", "%2f", "%2e", "%5c", "\\", "%25", "2e", "2f", "?", "%"]
), max_size=12))  # fmt: skip
def test_nothing_put_behind_the_name_leads_to_another(parts: list[str]) -> None:
    assert owner_of("/jupyter/user/alice/" + "".join(parts), BASE) in ("alice", None)


@given(st.text())
def test_any_address_gets_an_answer(address: str) -> None:
    assert owner_of(address, BASE) is None


# --- who is let in ---------------------------------------------------------------------------------------

OWN_SERVER, FOREIGN_SERVER = "/jupyter/user/alice/s1/lab", "/jupyter/user/bob/s1/lab"


def test_ones_own_server_is_open_and_others_are_not(browser: Browser) -> None:
    own_cookies = cookies(browser)
    assert admit(OWN_SERVER, own_cookies, "") == 204
    assert admit(FOREIGN_SERVER, own_cookies, "") == 403
    assert admit("/jupyter/hub/home", own_cookies, "") == 403


@pytest.mark.parametrize(
    "jar",
    ["", "x", "=", "a=b", "__Host-carme-session=", "__Host-carme-session=guess",
     "__Host-carme-session=" + "x" * 9999, "__Host-carme-session=a\0b", "carme-session=x; a=y"],
)  # fmt: skip
def test_without_a_login_pages_redirect_to_it(db, jar: str) -> None:
    assert admit(OWN_SERVER, jar, "") == 401


def test_the_right_cookie_under_another_name_counts_nothing(browser: Browser) -> None:
    assert admit(OWN_SERVER, cookies(browser).replace("__Host-", ""), "") == 401


@pytest.mark.parametrize("authorization", ["token abc", "Bearer abc", "bearer  abc", " Token abc"])
def test_with_a_token_the_hub_decides(db, authorization: str) -> None:
    assert admit(OWN_SERVER, "", authorization) == 204
    assert admit("/jupyter/user/alice/../bob/", "", authorization) == 403, "but the address must be clear"


@pytest.mark.parametrize(
    "authorization", ["Basic abc", "token", "token ", "Bearer", "abc", "tokenabc", "xtoken abc"]
)
def test_a_token_unknown_to_the_hub_does_not_count(browser: Browser, authorization: str) -> None:
    assert admit(OWN_SERVER, "", authorization) == 401
    assert admit(FOREIGN_SERVER, cookies(browser), authorization) == 403


def test_signing_out_closes_the_door(browser: Browser) -> None:
    before = cookies(browser)
    browser.send("/accounts/logout/", "/accounts/logout/")
    assert admit(OWN_SERVER, before, "") == 401


@pytest.mark.parametrize("change", ["password", "inactive", "gone", "login-gone"])
def test_an_expired_login_does_not_count(browser: Browser, alice: User, change: str) -> None:
    jar = cookies(browser)
    assert browser.session[SESSION_KEY] == str(alice.pk)
    if change == "password":
        alice.set_password(PASSWORD + "!")
        alice.save()
    elif change == "inactive":
        alice.is_active = False
        alice.save()
    elif change == "gone":
        alice.delete()
    else:
        Login.objects.all().delete()
    assert admit(OWN_SERVER, jar, "") == 401


def test_a_check_costs_two_queries_to_the_database(browser: Browser, django_assert_num_queries) -> None:
    jar = cookies(browser)
    with django_assert_num_queries(2):
        admit(OWN_SERVER, jar, "")
    with django_assert_num_queries(0):
        admit(OWN_SERVER, jar, "token abc")
        admit("/jupyter/user/alice/../bob/", jar, "")


# --- as nginx asks ---------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
async def test_nginx_gets_a_bare_answer() -> None:
    def prepare() -> str:
        found = Browser()
        found.force_login(User.objects.create_user("alice", password=PASSWORD))
        return cookies(found)

    from asgiref.sync import sync_to_async

    jar = await sync_to_async(prepare)()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=application), base_url="http://127.0.0.1:8100"
    ) as nginx:

        async def ask(**headers: str) -> httpx.Response:
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            return await nginx.get("/internal/enter", headers=headers)

        answer = await ask(x_original_uri=OWN_SERVER, cookie=jar)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["Cache-Control"] == "no-store" and "Set-Cookie" not in answer.headers
        assert (await ask(x_original_uri=FOREIGN_SERVER, cookie=jar)).status_code == 403
        assert (await ask(x_original_uri=OWN_SERVER)).status_code == 401
        assert (await ask(cookie=jar)).status_code == 403, "a question without an address"
        assert (await ask(x_original_uri=FOREIGN_SERVER, authorization="token x")).status_code == 204


@pytest.mark.django_db(transaction=True)
async def test_nginx_gets_an_answer_while_all_pages_wait() -> None:
    """As they do while a file system or the broker hangs."""
    go_on = threading.Event()
    waiting = [pages._threads.submit(go_on.wait, HANG) for _ in range(settings.PAGE_THREADS)]
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=application), base_url="http://127.0.0.1:8100"
        ) as nginx:
            answer = nginx.get("/internal/enter", headers={"x-original-uri": OWN_SERVER})
            assert (await asyncio.wait_for(answer, HANG)).status_code == 401
        assert not any(thread.done() for thread in waiting)
    finally:
        go_on.set()


def test_the_other_pages_know_no_such_address(browser: Browser) -> None:
    assert browser.get("/internal/enter").status_code == 404
    assert browser.get(OWN_SERVER).status_code == 404
