"""My files in the browser, through the real program."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from django.conf import settings as django_settings

from .conftest import Browser, words
from .fake_broker import FakeBroker

UPLOAD = "0123456789abcdef" * 2


@pytest.fixture
def home(broker: FakeBroker, settings) -> Path:
    broker.home.mkdir()
    site = django_settings.SITE
    sessions = site.sessions.model_copy(update={"bind": [broker.home.parent / "scratch"]})
    settings.SITE = site.model_copy(update={"sessions": sessions})
    return broker.home


def key(path: Path) -> str:
    return quote(os.fsencode(path))


def body(answer: Any) -> bytes:
    """What a stream holds, as the server reads it."""
    import asyncio

    async def collect() -> bytes:
        return b"".join([part async for part in answer.streaming_content])

    return asyncio.run(collect())


def put(browser: Browser, path: Path, data: bytes, **query: Any):
    token = browser.token("/files/")
    values = {"offset": 0, "size": len(data), "replace": 0, "id": UPLOAD} | query
    address = f"/files/upload/?path={key(path)}&" + "&".join(
        f"{name}={value}" for name, value in values.items()
    )
    return browser.put(
        address, data, content_type="application/octet-stream",
        headers={"origin": "https://carme.example:8443", "x-csrftoken": token},
    )  # fmt: skip


def test_a_folder_is_shown_and_walked(browser: Browser, home: Path) -> None:
    (home / "data & more").mkdir()
    (home / "<b>.txt").write_text("x" * 2048)
    (home / os.fsdecode(b"caf\xe9")).write_text("latin")
    page = browser.get("/files/").content.decode()
    assert "&lt;b&gt;.txt" in page and "2\xa0KiB" in page and "caf\N{REPLACEMENT CHARACTER}" in page
    folder = re.findall(r'href="(\?path=[^"]+more)"', page)[0]
    inside = browser.get(f"/files/{folder}")
    assert "This folder is empty." in words(inside) and "data &amp; more" in inside.content.decode()
    latin = re.findall(r'href="(/files/download/[^"]+E9)"', page)[0]
    assert body(browser.get(latin)) == b"latin"


def test_what_is_hidden_is_shown_when_it_is_requested(browser: Browser, home: Path) -> None:
    (home / ".cache/inside").mkdir(parents=True)
    (home / "seen.txt").write_text("x")
    page = browser.get("/files/").content.decode()
    assert "seen.txt" in page and ".cache" not in page and "Show 1 hidden entry" in page
    every = re.findall(r'href="(\?path=[^"]*)">Show 1', page)[0].replace("&amp;", "&")
    page = browser.get(f"/files/{every}").content.decode()
    assert "seen.txt" in page and ".cache/</a>" in page and "Hide hidden entries" in page
    # What is in a hidden folder is no less hidden by that.
    inside = re.findall(r'href="(\?path=[^"]+)">.cache/', page)[0].replace("&amp;", "&")
    (home / ".cache/.deep").mkdir()
    page = browser.get(f"/files/{inside}").content.decode()
    assert "inside/</a>" in page and ".deep/</a>" in page
    (home / "seen.txt").unlink()
    assert "This folder is empty." not in words(browser.get("/files/"))


def test_a_file_is_downloaded_whole_and_in_parts(browser: Browser, home: Path) -> None:
    data = os.urandom(2_500_000)
    (home / "weights.pt").write_bytes(data)
    address = f"/files/download/?path={key(home / 'weights.pt')}"
    answer = browser.get(address)
    assert body(answer) == data and answer["Content-Length"] == "2500000"
    assert answer["Content-Disposition"] == 'attachment; filename="weights.pt"'
    for requested, expected, reported in (
        ("bytes=10-19", data[10:20], "bytes 10-19/2500000"),
        ("bytes=2499990-", data[-10:], "bytes 2499990-2499999/2500000"),
        ("bytes=-5", data[-5:], "bytes 2499995-2499999/2500000"),
        ("bytes=2499999-9999999", data[-1:], "bytes 2499999-2499999/2500000"),
    ):
        part = browser.get(address, headers={"range": requested})
        assert (part.status_code, body(part), part["Content-Range"]) == (206, expected, reported)
    whole = browser.get(address, headers={"range": "bytes=1-2", "if-range": '"another"'})
    assert whole.status_code == 200 and body(whole) == data
    assert browser.get(address, headers={"range": "bytes=2500000-"}).status_code == 416
    for strange in ("bytes=5-1", "bytes=-", "lines=1-2", "bytes=0-1,5-6"):
        answer = browser.get(address, headers={"range": strange})
        assert answer.status_code == 200 and body(answer) == data
    head = browser.head(address)
    assert head["Content-Length"] == "2500000" and head["Accept-Ranges"] == "bytes"


def test_a_file_is_sent_in_parts(browser: Browser, home: Path) -> None:
    path = home / "new.bin"
    first = put(browser, path, b"abc", size=5)
    assert first.json() == {"offset": 3, "done": False, "exists": False}
    assert not path.exists() and "This folder is empty." in words(browser.get("/files/"))
    state = browser.get(f"/files/upload/?path={key(path)}&id={UPLOAD}").json()
    assert (state["offset"], state["exists"]) == (3, False)
    late = put(browser, path, b"e", size=5, offset=4)
    assert late.status_code == 409 and "3 bytes have arrived" in late.json()["message"]
    assert put(browser, path, b"de", size=5, offset=3).json()["done"]
    assert path.read_bytes() == b"abcde"
    again = put(browser, path, b"x")
    assert again.status_code == 409 and "already" in again.json()["message"]
    assert put(browser, path, b"x", replace=1).json()["done"] and path.read_bytes() == b"x"


@pytest.mark.parametrize(
    "query",
    [
        {"offset": -1}, {"offset": "x"}, {"size": 10**17}, {"offset": 7}, {"size": 0},
        {"id": "../../etc/x"}, {"id": ""},
    ],
)  # fmt: skip
def test_an_invalid_part_is_refused(browser: Browser, home: Path, query: dict[str, Any]) -> None:
    answer = put(browser, home / "x", b"abc", **query)
    assert answer.status_code in (409, 422) and answer.json()["message"]
    assert not list(home.iterdir())


def test_a_part_is_never_larger_than_was_agreed(browser: Browser, home: Path) -> None:
    answer = put(browser, home / "x", bytes((8 << 20) + 1))
    assert answer.status_code == 422 and not list(home.iterdir())


def test_an_upload_needs_a_token_of_this_login(browser: Browser, home: Path) -> None:
    answer = browser.put(f"/files/upload/?path={key(home / 'x')}&id={UPLOAD}&offset=0&size=1", b"x")
    assert answer.status_code == 403 and not list(home.iterdir())


def test_folders_are_made_renamed_and_deleted(browser: Browser, home: Path) -> None:
    browser.send("/files/", "/files/make/", path=key(home), name="my run")
    assert (home / "my run").is_dir()
    (home / "my run/x").write_text("1")
    browser.send("/files/", "/files/rename/", path=key(home / "my run"), folder=key(home), name="run 2")
    assert (home / "run 2/x").exists()
    page = browser.get(f"/files/delete/?path={key(home / 'run 2')}").content.decode()
    assert "Delete “run 2”?" in page and (home / "run 2").exists()
    answer = browser.send("/files/", "/files/delete/", path=key(home / "run 2"), folder=key(home))
    assert answer["Location"] == f"/files/?path={key(home)}" and not (home / "run 2").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/x", "a\nb", "\x00"])
def test_an_invalid_name_is_refused(browser: Browser, home: Path, name: str) -> None:
    (home / "old").mkdir()
    for address, path in (("/files/make/", home), ("/files/rename/", home / "old")):
        answer = browser.send("/files/", address, path=key(path), folder=key(home), name=name)
        assert "A name has letters" in words(browser.get(answer["Location"]))
    assert [file.name for file in home.iterdir()] == ["old"]


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "relative", "HOME/../../../etc/passwd", "//etc/passwd", "HOMEx/y", "/", "\0"]
)
def test_only_ones_own_places_are_shown(browser: Browser, home: Path, path: str) -> None:
    requested = quote(path.replace("HOME", str(home)))
    for address in ("/files/", "/files/download/", "/files/delete/"):
        answer = browser.get(f"{address}?path={requested}")
        assert answer.status_code == 422 and "does not show this folder" in words(answer)
    browser.send("/files/", "/files/delete/", path=requested, folder=requested)
    assert Path("/etc/passwd").exists()
    answer = browser.get(f"/files/upload/?path={requested}&id={UPLOAD}")
    assert answer.status_code == 422


def test_a_place_itself_is_never_deleted(browser: Browser, home: Path) -> None:
    answer = browser.send("/files/", "/files/delete/", path=key(home), folder=key(home))
    assert "cannot be deleted" in words(browser.get(answer["Location"])) and home.is_dir()


def test_what_cannot_be_read_says_why(browser: Browser, home: Path, broker: FakeBroker) -> None:
    answer = browser.get(f"/files/?path={key(home / 'none')}")
    assert answer.status_code == 404 and "There is no 'none'." in words(answer).replace("&#x27;", "'")
    (home / "file").write_text("x")
    answer = browser.get(f"/files/?path={key(home / 'file')}")
    assert answer.status_code == 409 and "is not a folder" in words(answer)
    broker.__exit__()
    assert browser.get("/files/").status_code == 503
    broker.__enter__()


def test_the_user_is_who_is_signed_in(
    bobs_browser: Browser, anonymous: Browser, home: Path, broker: FakeBroker
) -> None:
    bobs_browser.get("/files/")
    assert {request.user for request in broker.requests_of("files")} == {"bob"}
    assert anonymous.get("/files/").status_code == 302
