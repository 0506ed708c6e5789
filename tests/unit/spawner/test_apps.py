"""Apps on Unix sockets, served by the real single-user server."""

import os
import shutil
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from .conftest import Site, eventually

JOB = str(4_000_000 + os.getpid())
FOLDER = Path(f"/tmp/carme-{JOB}/apps")
#: The job of a session that a test ends.
ENDING_JOB = str(6_000_000 + os.getpid())

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: A web app of a user, and an image's program: it answers with the path that it sees.
APP = """
import http.server, socketserver, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"app sees {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def address_string(self):
        return "socket"
    def log_message(self, *words):
        pass
socketserver.UnixStreamServer(sys.argv[1], Answer).serve_forever()
"""


def command(programs: Path, job: str) -> list[str]:
    """The session of a job, in an image that has these programs as its apps."""
    code = (
        "from pathlib import Path\nfrom carme_spawner import singleuser\n"
        "from carme_spawner.singleuser import programs\n"
        f"programs.PROGRAMS = Path({str(programs)!r})\nsingleuser.main()"
    )
    return ["env", f"SLURM_JOB_ID={job}", sys.executable, "-s", "-c", code, "--allow-root"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The apps `good` and `bad`."""
    programs = tmp_path_factory.mktemp("programs")
    (programs / "good").write_text(f"#!{sys.executable}\n{APP}")
    (programs / "bad").write_text("#!/bin/sh\necho 'the <disk> is full' >&2\nexit 3\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    return programs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(lasting_site: Site, programs: Path) -> AsyncIterator[Site]:
    """A site in which ada's session s1 is ready, in an image with the apps `good` and `bad`."""
    lasting_site.broker.command = command(programs, JOB)
    await lasting_site.start()
    await eventually(lasting_site.is_ready, "JupyterLab is ready")
    yield lasting_site
    process = lasting_site.broker.processes[100]
    process.terminate()
    await process.wait()
    shutil.rmtree(FOLDER.parent)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def commands_with(word: str) -> list[list[str]]:
    """The command lines of this host that have a word."""
    return [
        found
        for process in psutil.process_iter(["cmdline"])
        if word in (found := process.info["cmdline"] or [])
    ]


async def page(server: Site, path: str) -> tuple[int, str]:
    status, body = await server.visit(path, server.token(100))
    return status, body.decode()


async def test_an_images_program_is_started_when_it_is_opened(server: Site) -> None:
    assert await page(server, "/app/good/some/where?a=1") == (200, "app sees /some/where?a=1")
    assert mode(FOLDER) == 0o700
    assert mode(FOLDER / "good.log") == 0o600
    # Without the slash, relative addresses in the app's pages would lead elsewhere.
    assert await page(server, "/app/good") == (200, "app sees /")


async def test_an_app_ends_with_the_session(server: Site, programs: Path) -> None:
    folder = Path(f"/tmp/carme-{ENDING_JOB}")
    server.broker.command = command(programs, ENDING_JOB)
    await server.start("s2")
    await eventually(lambda: server.is_ready("s2"), "JupyterLab is ready")
    job_id = max(server.broker.processes)
    status, body = await server.visit("/app/good/", server.token(job_id), "s2")
    assert (status, body) == (200, b"app sees /")
    assert commands_with(str(folder / "apps/good.sock"))
    process = server.broker.processes[job_id]
    process.terminate()
    await process.wait()
    assert commands_with(str(folder / "apps/good.sock")) == []
    shutil.rmtree(folder)


async def test_an_app_that_fails_shows_its_last_lines(server: Site) -> None:
    status, text = await page(server, "/app/bad/")
    assert status == 502
    assert "exit code 3" in text
    assert "the &lt;disk&gt; is full" in text


async def test_an_app_that_the_image_lacks_is_named(server: Site) -> None:
    for path in ("/vscode/", "/app/unknown/"):
        status, text = await page(server, path)
        assert status == 502
        assert "This image has no app called" in text


async def test_a_name_cannot_lead_elsewhere(server: Site) -> None:
    for name in (".hidden", "a%2fb", "a b", "%252e%252e"):
        status, text = await page(server, f"/app/{name}/")
        assert status == 404, name
        assert "app sees" not in text


async def test_a_terminal_is_a_page_of_its_own(server: Site) -> None:
    status, text = await page(server, "/carme/terminal")
    assert status == 200
    assert "JupyterLab" in text
