"""What large messages, large files, odd addresses and silence meet between a browser and a session's server.

A session takes seconds to start: what needs no other one is checked in the same.

Each limit by itself is tested without a cluster (tests/unit/ansible/test_reverse_proxy.py, with nginx and
clocks that run fast; tests/unit/spawner/real_session/test_running_server.py). Two tests take long and run by
hand alone:
`CARME_UPLOAD_GIB=2 ./test cluster -- -k gibibytes` and `CARME_IDLE_SECONDS=3700 ./test cluster -- -k silent`.
"""

import base64
import hashlib
import os
import random
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from carme.validation.notebook import NotebookKernel
from carme.validation.visitor import Visitor
from demo_site import DemoSite
from patience import HANG

SESSION = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "10", "title": "Limits"}
UPLOAD_GIB = int(os.environ.get("CARME_UPLOAD_GIB", "0"))
IDLE_SECONDS = int(os.environ.get("CARME_IDLE_SECONDS", "0"))
MESSAGE = 50_000_000
PART = 1 << 20  # bytes of a part of an upload, as JupyterLab sends it
ECHO = """
import http.server, os, socketserver, threading
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode("latin-1"))
    def log_message(self, *_):
        pass
socket = f"/tmp/carme-{os.environ['SLURM_JOB_ID']}/apps/echo.sock"
server = socketserver.ThreadingUnixStreamServer(socket, Echo)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""


@pytest.fixture
def opened(demo: DemoSite) -> Iterator[tuple[Visitor, str]]:
    """A browser, and the address of a session's server; the session lasts as long as the test may."""
    minutes = str(10 + (IDLE_SECONDS // 60) + 10 * UPLOAD_GIB)
    with demo.visitor("user1") as visitor:
        name = visitor.start(SESSION | {"minutes": minutes})
        try:
            visitor.wait(name, "ready", timeout=HANG)
            yield visitor, visitor.open(name)
        finally:
            visitor.stop(name)


def test_what_is_large_or_odd_reaches_a_session_and_its_git_panel_answers(
    demo: DemoSite, opened: tuple[Visitor, str]
) -> None:
    visitor, server = opened
    with visitor.kernel(server) as kernel:
        a_message_of_a_kernel_may_have_50_mb(kernel)
        an_app_gets_an_address_as_it_was_sent(kernel, visitor, server)
    a_large_notebook_is_saved_and_opened_again(demo, visitor, server)
    the_git_extension_answers(visitor, server)


def a_message_of_a_kernel_may_have_50_mb(kernel: NotebookKernel) -> None:
    cell = kernel.run(f"'x' * {MESSAGE}", timeout=HANG)
    assert cell.ok and len(cell.output) == MESSAGE + 2


def an_app_gets_an_address_as_it_was_sent(kernel: NotebookKernel, visitor: Visitor, server: str) -> None:
    begun = kernel.run(ECHO, timeout=HANG)
    assert begun.ok, begun.error
    for path in ("/a%20b", "/a%2Fb", "/%C3%BC", "/%FF", "/caf%E9/x?y=%FF"):
        answer = visitor.fetch(f"{server}app/echo{path}")
        assert (answer.status_code, answer.text) == (200, path)


def a_large_notebook_is_saved_and_opened_again(demo: DemoSite, visitor: Visitor, server: str) -> None:
    output = {"output_type": "stream", "name": "stdout", "text": "0123456789abcdef" * (5 << 16)}
    cell = {"cell_type": "code", "metadata": {}, "execution_count": 1, "source": "print(x)"}
    notebook = {"cells": [cell | {"outputs": [output]}], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    name = f"large-{os.getpid()}"
    # A part of an upload, as JupyterLab sends it: 1 MiB, in base64.
    part = {"type": "file", "format": "base64", "content": "YWJj" * (1 << 19), "chunk": -1}
    whole = {"type": "notebook", "format": "json", "content": notebook}
    try:
        for path, content in ((f"{name}.ipynb", whole), (f"{name}.bin", part)):
            saved = visitor.http.put(
                f"{server}api/contents/{path}", json=content, headers=xsrf_header(visitor, server)
            )
            assert saved.status_code in (200, 201), saved.text
        opened = visitor.fetch(f"{server}api/contents/{name}.ipynb").json()
        assert opened["content"]["cells"][0]["outputs"] == [output]
        assert visitor.fetch(f"{server}files/{name}.bin").content == b"abc" * (1 << 19)
    finally:
        demo.run("head", "rm", "-f", f"/home/user1/{name}.ipynb", f"/home/user1/{name}.bin")


def the_git_extension_answers(visitor: Visitor, server: str) -> None:
    answer = visitor.http.get(f"{server}git/settings")
    assert answer.status_code == 200, answer.text
    assert answer.json()["gitVersion"]
    page = visitor.http.get(f"{server}lab").text
    assert "@jupyterlab/git" in page and "nbdime-jupyterlab" not in page


def xsrf_header(visitor: Visitor, server: str) -> dict[str, str]:
    """What JupyterLab sends with each change."""
    return {"X-XSRFToken": visitor.http.cookies.get("_xsrf", path=urlsplit(server).path) or ""}


@pytest.mark.skipif(not UPLOAD_GIB, reason="Takes minutes: set CARME_UPLOAD_GIB=2.")
@pytest.mark.timeout(0)
def test_jupyterlab_takes_an_upload_of_gibibytes(demo: DemoSite, opened: tuple[Visitor, str]) -> None:
    visitor, server = opened
    name, last = f"uploaded-{os.getpid()}.bin", UPLOAD_GIB * 1024
    rng, sent = random.Random(1), hashlib.sha256()
    try:
        for part in range(1, last + 1):
            data = rng.randbytes(PART)  # parts that differ, so that their order counts
            sent.update(data)
            content = base64.b64encode(data).decode()
            saved = visitor.http.put(
                f"{server}api/contents/{name}",
                json={
                    "type": "file",
                    "format": "base64",
                    "content": content,
                    "chunk": -1 if part == last else part,
                },
                headers=xsrf_header(visitor, server),
            )
            assert saved.status_code in (200, 201), saved.text
        found = demo.run("head", "sha256sum", f"/home/user1/{name}").stdout
        assert found.split()[0] == sent.hexdigest()
    finally:
        demo.run("head", "rm", "-f", f"/home/user1/{name}")


@pytest.mark.skipif(not IDLE_SECONDS, reason="Takes an hour: set CARME_IDLE_SECONDS=3700.")
@pytest.mark.timeout(0)
def test_a_kernels_channel_may_be_silent_for_an_hour(opened: tuple[Visitor, str]) -> None:
    visitor, server = opened
    with visitor.kernel(server) as kernel:
        assert kernel.run("a = 6", timeout=HANG).ok
        time.sleep(IDLE_SECONDS)  # which is what is tested
        assert kernel.run("a * 7", timeout=HANG).output == "42"
