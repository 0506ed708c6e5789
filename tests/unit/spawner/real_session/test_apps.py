"""Apps on Unix sockets, served by the real single-user server."""

import asyncio
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from patience import HANG

from ..conftest import Site
from .conftest import FOLDER
from .front import Front

APPS = FOLDER / "apps"
Visit = Callable[..., Awaitable[tuple[int, str]]]

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest_asyncio.fixture(loop_scope="package", autouse=True)
async def _no_app_is_left(server: Site) -> AsyncIterator[None]:
    """Close the apps that a test has opened, before the next test."""
    yield
    for process in psutil.process_iter(["cmdline"]):
        if str(APPS / "good.sock") in (process.info["cmdline"] or []):
            process.kill()
            await asyncio.to_thread(process.wait, HANG)
    for socket in APPS.glob("*.sock"):
        socket.unlink()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def commands_with(word: str) -> list[list[str]]:
    """The command lines of this host that have a word."""
    return [
        found
        for process in psutil.process_iter(["cmdline"])
        if word in (found := process.info["cmdline"] or [])
    ]


@pytest.fixture
def visit(server: Site, job_id: int) -> Visit:
    """Gives status and page at a path of the session, for its owner."""

    async def visit(path: str, post: object = None) -> tuple[int, str]:
        status, body = await server.visit(path, server.token(job_id), post=post)
        return status, body.decode()

    return visit


async def test_an_images_program_is_started_when_it_is_opened(visit: Visit) -> None:
    assert await visit("/app/good/some/where?a=1") == (200, "app sees /some/where?a=1")
    assert mode(APPS) == 0o700
    assert mode(APPS / "good.log") == 0o600
    # Without the slash, relative addresses in the app's pages would lead elsewhere.
    assert await visit("/app/good") == (200, "app sees /")


async def test_an_app_that_fails_shows_its_last_lines(visit: Visit) -> None:
    status, text = await visit("/app/bad/")
    assert status == 502
    assert "exit code 3" in text
    assert "the &lt;disk&gt; is full" in text


async def test_an_app_that_the_image_lacks_is_named(visit: Visit) -> None:
    for path in ("/vscode/", "/app/unknown/"):
        status, text = await visit(path)
        assert status == 502
        assert "This image has no app called" in text


async def test_a_name_cannot_lead_elsewhere(visit: Visit) -> None:
    for name in (".hidden", "a%2fb", "a b", "%252e%252e"):
        status, text = await visit(f"/app/{name}/")
        assert status == 404, name
        assert "app sees" not in text


async def test_a_terminal_is_a_page_of_its_own(visit: Visit) -> None:
    status, text = await visit("/carme/terminal")
    assert status == 200
    assert "JupyterLab" in text


async def test_apps_and_kernels_end_with_the_session(
    ending: Front, server: Site, job_id: int, visit: Visit
) -> None:
    assert await visit("/app/good/") == (200, "app sees /")
    assert (await visit("/api/kernels", {"name": "python3"}))[0] == 201
    process = server.broker.processes[job_id]
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 1 and commands_with(str(APPS / "good.sock"))
    process.terminate()
    assert await asyncio.wait_for(process.wait(), HANG) == 0
    assert commands_with(str(APPS / "good.sock")) == []
    assert not any(child.is_running() for child in children)
