"""One real single-user server, and one Chromium, for all tests here.

Both take seconds to start. Tests leave the session as it was; those that end it are the last ones of their
module, and the next test gets another one.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser as Chromium
from playwright.async_api import BrowserContext, Page, async_playwright, expect
from real_chromium import OPTIONS, program

from patience import HANG

from ..conftest import Site, eventually, lasting
from ..example_notebooks import write_examples
from ..test_singleuser import leave
from .front import Front, Gate, open_gate

JOB = str(4_000_000 + os.getpid())
#: The session's private folder.
FOLDER = Path(f"/tmp/carme-{JOB}")
#: An app of the image: it answers with the path that it sees.
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
#: Has a session wait for its pages as long as a test wants, from the moment when it imports its server:
#: JupyterHub, which comes with that, has to find the environment that the session has prepared for it.
PREPARE = """
import os
from carme_spawner.singleuser import imports
def prepare(prepare=imports.prepare):
    prepare()
    from carme_spawner.singleuser import server
    server.SAVE_SECONDS = float(os.environ.get("SAVE_SECONDS", server.SAVE_SECONDS))
imports.prepare = prepare
"""
#: What browsers keep of a site, but for what they have loaded from it.
STORED = "cookies,local_storage,indexeddb,service_workers,cache_storage"


@pytest.fixture(scope="package")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A session in an image with the apps `good` and `bad`, whose launcher shows TensorBoard alone."""
    image = tmp_path_factory.mktemp("image")
    programs, shown = image / "programs", image / "shown"
    for folder in (programs, shown):
        folder.mkdir()
    (programs / "good").write_text(f"#!{sys.executable}\n{APP}")
    (programs / "bad").write_text("#!/bin/sh\necho 'the <disk> is full' >&2\nexit 3\n")
    for name in ("tensorboard", "no-program"):
        (shown / name).write_text("#!/bin/sh\n")
    for file in (programs / "good", programs / "bad", shown / "tensorboard"):
        file.chmod(0o755)
    labels = image / "labels.json"
    labels.write_text(json.dumps({"carme.title": "Deep <Learning>"}))
    code = (
        f"{PREPARE}from pathlib import Path\nfrom carme_spawner import singleuser\n"
        "from carme_spawner.singleuser import home, kernels, programs\n"
        f"programs.PROGRAMS, home.PROGRAMS = Path({str(programs)!r}), Path({str(shown)!r})\n"
        f"kernels.image_name.__wrapped__.__defaults__ = (Path({str(labels)!r}),)\nsingleuser.main()"
    )
    names = [f"SLURM_JOB_ID={JOB}", f"CARME_EXAMPLES={write_examples(image / 'examples')}"]
    names.append("CARME_STEP_PROLOG=1.5e9")
    return ["env", *names, sys.executable, "-s", "-c", code, "--allow-root"]


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def lasting_site(
    tmp_path_factory: pytest.TempPathFactory, state_directory: Path
) -> AsyncIterator[Site]:
    """A site, which leaves nothing of its servers."""
    async with lasting(tmp_path_factory.mktemp("site"), state_directory) as site:
        yield site
        await leave(site)
    shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.fixture(scope="package")
def starts() -> dict[int, float]:
    """When the server of each job was started, or earlier."""
    return {}


@pytest.fixture
def save_seconds(request: pytest.FixtureRequest) -> float | None:
    """How long a test's session waits for pages that save; None: as long as it does by itself."""
    return getattr(request, "param", None)


@pytest_asyncio.fixture(loop_scope="package")
async def job_id(
    lasting_site: Site, command: list[str], starts: dict[int, float], save_seconds: float | None
) -> int:
    """The job of ada's session s1, which is ready.

    It is that of the earlier test, unless that has ended it or this test needs one of its own.
    """
    processes = lasting_site.broker.processes
    lives = starts and processes[max(starts)].returncode is None
    if save_seconds is None and lives and await lasting_site.is_ready():
        return max(starts)
    if processes:
        await end_session(lasting_site)
    shutil.rmtree(FOLDER, ignore_errors=True)  # as an epilog does
    began = time.time()
    program, *words = command
    own = [] if save_seconds is None else [f"SAVE_SECONDS={save_seconds}"]
    lasting_site.broker.command = [program, *own, *words]
    await lasting_site.start()
    await eventually(lasting_site.is_ready, "JupyterLab is ready")
    job = max(processes)
    starts[job] = began
    return job


async def end_session(site: Site) -> None:
    """End the session's server; returns when the hub knows."""
    await leave(site)

    async def is_known() -> bool:
        return not await site.server()

    await eventually(is_known, "the hub knows that the session has ended")


@pytest_asyncio.fixture(loop_scope="package")
async def server(lasting_site: Site, job_id: int) -> AsyncIterator[Site]:
    """A site in which ada's session s1 is ready, with no file, kernel or terminal of an earlier test."""
    yield lasting_site
    if lasting_site.broker.processes[job_id].returncode is None and await lasting_site.is_ready():
        token = lasting_site.token(job_id)
        for kind, key in (("sessions", "id"), ("kernels", "id"), ("terminals", "name")):
            for resource in json.loads((await lasting_site.visit(f"/api/{kind}", token))[1]):
                await lasting_site.visit(f"/api/{kind}/{resource[key]}", token, method="DELETE")
    home = lasting_site.broker.socket.parent
    for file in (*home.glob("*.txt"), *home.glob("*.ipynb")):
        file.unlink()
    (home / "typed-at-once").unlink(missing_ok=True)
    for folder in (".jupyter/lab", ".ipynb_checkpoints", "examples"):
        shutil.rmtree(home / folder, ignore_errors=True)
    for app in (FOLDER / "apps").glob("*.sock"):
        app.unlink()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def gate(lasting_site: Site) -> AsyncIterator[Gate]:
    """The site's address for browsers."""
    async with open_gate(lasting_site) as gate:
        yield gate


@pytest_asyncio.fixture(loop_scope="package")
async def front(server: Site, job_id: int, gate: Gate) -> AsyncIterator[Front]:
    """The site's reverse proxy."""
    async with gate.opened_on(job_id) as front:
        yield front


@pytest_asyncio.fixture(loop_scope="package")
async def ending(front: Front) -> AsyncIterator[Front]:
    """The same for a test that ends the session's server itself."""
    yield front
    await end_session(front.site)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def chromium() -> AsyncIterator[Chromium]:
    if program() is None:
        pytest.skip("Chromium is not installed.")
    expect.set_options(timeout=HANG * 1000)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program(), args=OPTIONS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def context(chromium: Chromium) -> AsyncIterator[BrowserContext]:
    """One for pages that load JupyterLab: Chromium has read and compiled most of that for the first one."""
    context = await chromium.new_context()
    context.set_default_timeout(HANG * 1000)
    yield context
    await context.close()


@pytest_asyncio.fixture(loop_scope="package")
async def page(context: BrowserContext, gate: Gate) -> AsyncIterator[Page]:
    """A page of a Chromium that knows nothing of other tests, but for files that it has loaded."""
    page = await context.new_page()
    console = await context.new_cdp_session(page)
    await console.send("Storage.clearDataForOrigin", {"origin": gate.url, "storageTypes": STORED})
    await console.detach()
    yield page
    for each in context.pages:
        await each.close()


@pytest_asyncio.fixture(loop_scope="package")
async def fresh_page(chromium: Chromium) -> AsyncIterator[Page]:
    """A page for a test that sets the browser's clock, which is that of all pages of a context."""
    page = await chromium.new_page()
    page.set_default_timeout(HANG * 1000)
    yield page
    await page.context.close()
