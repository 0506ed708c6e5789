"""What a session opens besides JupyterLab, in a real session behind the portal."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from demo_site import DemoSite, wait_until

from .conftest import log_in, open_start_form

#: A web app of the user's own, at a Unix socket.
WEB_APP = """
import http.server, os, socketserver

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<h1>My own page at {self.path}</h1>".encode())

    def log_message(self, *words):
        pass

place = f"/tmp/carme-{os.environ['SLURM_JOB_ID']}/apps/mine.sock"
socketserver.ThreadingUnixStreamServer(place, Page).serve_forever()
"""


@pytest.fixture
def written(demo: DemoSite) -> Iterator[Callable[[str], str]]:
    """Return a function that waits until a file of the user has content, and returns the content."""
    home = f"/home/{demo.user}"
    demo.run("head", "sh", "-c", f"rm -rf {home}/from-*")

    def content(name: str) -> str:
        read = ("cat", f"{home}/{name}")
        return wait_until(f"{name} is written", lambda: demo.run("head", *read, check=False).stdout.strip())

    yield content


def start(page: Page, image: str) -> str:
    """Start a session with an image; returns its name when it is ready."""
    open_start_form(page)
    page.get_by_label("Title").fill("Apps")
    page.locator(f"input[name=image][value={image}]").check()
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.locator(".status .state")).to_have_text("Ready")
    return page.url.rstrip("/").rpartition("/")[2]


def address(demo: DemoSite, name: str, app: str) -> str:
    """What `carme session open` prints."""
    return demo.carme("session", "open", name, "--app", app).stdout.strip()


def test_terminal_tensorboard_and_a_users_web_app_open_in_a_session(
    page: Page, demo: DemoSite, written: Callable[[str], str], keep: Callable[[str], None]
) -> None:
    demo.run("head", "tee", f"/home/{demo.user}/webapp.py", user=demo.user, data=WEB_APP)
    log_in(page, demo)
    name = start(page, "torch")

    page.goto(address(demo, name, "terminal"))
    terminal = page.locator(".jp-Terminal .xterm-screen")
    expect(terminal).to_be_visible()
    terminal.click()
    page.keyboard.type("python3 ~/webapp.py & echo job $SLURM_JOB_ID >~/from-terminal\n")
    assert re.fullmatch(r"job \d+", written("from-terminal"))
    keep("app-terminal")

    own = f"/jupyter/user/{demo.user}/{name}/app/mine/"
    wait_until("the web app answers", lambda: page.request.get(own).status == 200)
    page.goto(own + "some/place")
    expect(page.get_by_role("heading")).to_have_text("My own page at /some/place")

    missing: list[str] = []
    page.on("response", lambda answer: missing.append(answer.url) if answer.status == 404 else None)
    page.goto(address(demo, name, "tensorboard"))
    expect(page).to_have_title("TensorBoard")
    expect(page.get_by_text("No dashboards are active for the current data set")).to_be_visible()
    assert not [url for url in missing if "font" in url]
    keep("app-tensorboard")


def test_vs_code_opens_with_its_terminal(
    page: Page, demo: DemoSite, written: Callable[[str], str], keep: Callable[[str], None]
) -> None:
    if demo.run("head", "test", "-f", "/srv/carme/images/vscode.sif", check=False).returncode:
        pytest.skip("the image vscode is not built here; ./demo up --images vscode builds it")
    log_in(page, demo)
    name = start(page, "vscode")
    # VS Code asks at some time after its start.
    trust = page.get_by_role("button", name="Yes, I trust the authors")
    page.add_locator_handler(trust, lambda: trust.click())
    page.goto(address(demo, name, "vscode"))
    expect(page.locator(".monaco-workbench .explorer-viewlet")).to_be_visible()
    page.keyboard.press("Control+`")
    terminal = page.locator(".terminal-wrapper .xterm-screen").first
    expect(terminal).to_be_visible()
    terminal.click()
    page.keyboard.type("echo job $SLURM_JOB_ID >~/from-vscode\n")
    assert re.fullmatch(r"job \d+", written("from-vscode"))
    keep("app-vscode")
