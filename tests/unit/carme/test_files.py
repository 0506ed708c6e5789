"""A user's files through the broker: by a real program on a real connection, as the user."""

import asyncio
import hashlib
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carme.broker import BrokerClient
from carme.errors import CarmeError, Denied
from carme.files.client import FileError, Files
from carme.slurm import UnixAccount, lookups
from patience import HANG

UPLOAD = "0123456789abcdef" * 2


@pytest.fixture
def files(site: Any) -> Files:
    site.act("hub", trusted=True)
    return Files(BrokerClient(site.settings.broker.socket), "ada")


async def ask(function: Callable[..., Any], *arguments: Any, **values: Any) -> Any:
    """What a plain program asks; the broker answers in this thread meanwhile."""
    return await asyncio.to_thread(function, *arguments, **values)


async def refused(function: Callable[..., Any], *arguments: Any, **values: Any) -> str:
    with pytest.raises(CarmeError) as caught:
        await ask(function, *arguments, **values)
    return str(caught.value)


def send(
    files: Files, path: Path, data: bytes, *, at: int = 0, upto: int | None = None, **values: Any
) -> Any:
    """Send bytes of an upload from `at` to `upto`."""
    part = data[at:upto]
    values = {"replace": False} | values
    return files.write(
        str(path), UPLOAD, io.BytesIO(part), offset=at, length=len(part), size=len(data), **values
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(files: Files, path: Path, **values: Any) -> bytes:
    with files.read(str(path), **values) as part:
        return b"".join(part)


async def test_a_file_goes_up_and_comes_down(files: Files, site: Any) -> None:
    data = os.urandom(3_000_001)
    path = Path(await ask(files.home)) / "data of ada.bin"
    assert path.parent == site.home
    assert not (await ask(files.begun, str(path), UPLOAD)).exists
    reported = await ask(send, files, path, data, upto=2_000_000)
    assert (reported.offset, reported.done) == (2_000_000, False) and not path.exists()
    assert (await ask(files.show, str(site.home))).entries == []  # nothing half done is shown
    assert (await ask(files.begun, str(path), UPLOAD)).offset == 2_000_000
    assert (await ask(send, files, path, data, at=2_000_000)).done
    assert path.read_bytes() == data
    (entry,) = (await ask(files.show, str(site.home))).entries
    assert (entry.name, entry.kind, entry.size) == (path.name, "file", len(data))
    assert names(site.home) == [path.name]
    assert path.stat().st_uid == site.home.stat().st_uid and path.stat().st_mode & 0o777 == 0o600
    assert await ask(content, files, path) == data
    assert await ask(content, files, path, offset=2_999_990) == data[2_999_990:]
    assert await ask(content, files, path, offset=5, length=10) == data[5:15]
    assert await ask(content, files, path, offset=99_999_999) == b""


async def test_an_interrupted_part_is_sent_again(files: Files, site: Any) -> None:
    data = os.urandom(100_000)
    path = site.home / "x"

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 1000)) if self.tell() < 5000 else b""

    def cut_off() -> None:
        files.write(str(path), UPLOAD, Broken(data), offset=0, length=50_000, size=100_000, replace=False)

    assert "interrupted" in await refused(cut_off)
    # The program may still be reading what had been sent.
    while (await ask(files.begun, str(path), UPLOAD)).offset < 5000:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert "bytes have arrived" in await refused(send, files, path, data, at=60_000)
    assert not path.exists()
    assert not (await ask(send, files, path, data, upto=60_000)).done  # over what came before
    assert (await ask(send, files, path, data, at=60_000)).done
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(data).digest()


async def test_an_empty_file_is_a_file(files: Files, site: Any) -> None:
    assert (await ask(send, files, site.home / "empty", b"")).done
    assert (site.home / "empty").read_bytes() == b""


async def test_what_is_there_is_replaced_only_on_request(files: Files, site: Any) -> None:
    path = site.home / "x"
    await ask(send, files, path, b"old")
    assert (await ask(files.begun, str(path), UPLOAD)).exists
    assert "'x' already" in await refused(send, files, path, b"new")
    assert path.read_bytes() == b"old"
    await ask(send, files, path, b"new", replace=True)
    assert path.read_bytes() == b"new"
    (site.home / "folder").mkdir()
    assert "a folder of that name" in await refused(send, files, site.home / "folder", b"x", replace=True)


async def test_folders_are_made_moved_and_removed(files: Files, site: Any) -> None:
    home = site.home
    await ask(files.make, str(home / "a"))
    await ask(send, files, home / "a/x", b"1")
    await ask(files.move, str(home / "a"), str(home / "b"))
    assert (home / "b/x").read_bytes() == b"1"
    await ask(files.make, str(home / "a"))
    assert "'b' already" in await refused(files.move, str(home / "a"), str(home / "b"))
    (home / "b/link").symlink_to("/etc")
    await ask(files.remove, str(home / "b"))
    assert names(home) == ["a"] and names(Path("/etc"))


async def test_names_that_are_no_utf8_and_links_are_shown(files: Files, site: Any) -> None:
    home = site.home
    name = os.fsdecode(b"caf\xe9\n")
    (home / name).write_text("x")
    (home / "dead").symlink_to("nowhere")
    (home / "self").symlink_to(".")
    os.mkfifo(home / "fifo")
    found = {entry.name: (entry.kind, entry.link) for entry in (await ask(files.show, str(home))).entries}
    assert found == {
        name: ("file", False), "dead": ("other", True), "self": ("folder", True), "fifo": ("other", False),
    }  # fmt: skip
    assert await ask(content, files, home / name) == b"x"
    assert "not a plain file" in await refused(content, files, home / "fifo")
    assert "There is no 'dead'" in await refused(content, files, home / "dead")


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("show", "There is no 'none'"),
        ("read", "There is no 'none'"),
        ("remove", "There is no 'none'"),
        ("make", "There is no 'none'"),
    ],
)
async def test_what_is_not_there_is_reported(files: Files, site: Any, action: str, words: str) -> None:
    with pytest.raises(FileError) as caught:
        await ask(getattr(files, action), str(site.home / "no/none"))
    assert words in str(caught.value) and caught.value.number == 2


@pytest.mark.parametrize("upload", ["../../x", "0" * 31, "0" * 32 + "/x", ""])
async def test_an_upload_stays_in_its_folder(files: Files, site: Any, upload: str) -> None:
    assert "not understood" in await refused(files.begun, str(site.home / "x"), upload)
    assert names(site.home) == []


@pytest.mark.skipif(os.getuid() != 0, reason="another account's files need root")
async def test_the_program_is_the_user_and_no_more(files: Files, site: Any, folder: Path) -> None:
    secret = folder / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    for step in (
        lambda: content(files, secret),
        lambda: files.show(str(closed)),
        lambda: files.remove(str(secret)),
        lambda: send(files, closed / "x", b"x"),
        lambda: files.make(str(folder / "mine")),
        lambda: files.move(str(secret), str(site.home / "mine")),
    ):
        assert "You may not do that" in await refused(step)
    (site.home / "link").symlink_to(secret)
    assert "You may not do that" in await refused(content, files, site.home / "link")
    assert secret.read_text() == "root's"


async def test_only_services_open_files(files: Files, site: Any) -> None:
    site.act("ada")
    with pytest.raises(Denied):
        await ask(files.home)
    assert site.audit()[-1]["action"] == "files"
    site.act("hub", trusted=True)
    with pytest.raises(Denied):
        await ask(Files(BrokerClient(site.settings.broker.socket), "root").home)


async def test_files_whose_owners_groups_do_not_come_are_an_error(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(UnixAccount, "identity", lambda _: go.wait(HANG) and {})
    monkeypatch.setattr(lookups, "IDENTITY_SECONDS", 0.05)
    try:
        assert "groups of the account ada cannot be read" in await refused(files.home)
    finally:
        go.set()


async def test_open_parts_have_a_limit_and_are_let_go(files: Files, site: Any) -> None:
    big = site.home / "big"
    with big.open("wb") as file:
        file.truncate(50_000_000)
    big.chmod(0o644)
    parts = [await ask(files.read, str(big)) for _ in range(8)]
    assert "Too many files" in await refused(files.read, str(big))
    for part in parts:
        part.close()
    while True:  # until the programs are let go; the test's own limit ends it
        try:
            (await ask(files.read, str(big))).close()
            break
        except CarmeError:
            await asyncio.sleep(0.05)


async def test_a_file_that_shrinks_is_not_taken_for_whole(files: Files, site: Any) -> None:
    path = site.home / "log"
    path.write_bytes(b"x" * 30_000_000)
    path.chmod(0o644)
    part = await ask(files.read, str(path))
    os.truncate(path, 10)
    with pytest.raises(FileError, match="shorter"):
        await ask(lambda: sum(map(len, part)))
    part.close()


async def test_free_space_is_reported_for_readable_folders(files: Files, site: Any) -> None:
    home = await ask(files.home)
    found = await ask(files.space, [home, f"{home}/none"])
    assert [space.path for space in found] == [home]
    status = os.statvfs(home)
    assert found[0].size == status.f_blocks * status.f_frsize
