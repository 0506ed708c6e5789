"""What large messages, large files, odd addresses and silence meet between a browser and a session's server.

Each limit by itself is tested without a cluster (tests/unit/ansible/test_reverse_proxy.py, with nginx and
clocks that run fast; tests/unit/spawner/test_running_server.py). Two tests take long and run by hand alone:
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

from carme.validation.visitor import Visitor
from demo_site import DemoSite
from patience import HANG

SESSION = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "10", "title": "Limits"}
UPLOAD_GIB = int(os.environ.get("CARME_UPLOAD_GIB", "0"))
IDLE_SECONDS = int(os.environ.get("CARME_IDLE_SECONDS", "0"))
MESSAGE = 50_000_000
PART = 1 << 20  # of an upload, as JupyterLab sends it
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


def test_a_message_of_a_kernel_may_have_50_mb(opened: tuple[Visitor, str]) -> None:
    visitor, server = opened
    with visitor.kernel(server) as kernel:
        cell = kernel.run(f"'x' * {MESSAGE}", timeout=HANG)
    assert cell.ok and len(cell.output) == MESSAGE + 2


def test_an_app_gets_an_address_as_it_was_sent(opened: tuple[Visitor, str]) -> None:
    visitor, server = opened
    with visitor.kernel(server) as kernel:
        begun = kernel.run(ECHO, timeout=HANG)
        assert begun.ok, begun.error
        for path in ("/a%20b", "/a%2Fb", "/%C3%BC", "/%FF", "/caf%E9/x?y=%FF"):
            answer = visitor.fetch(f"{server}app/echo{path}")
            assert (answer.status_code, answer.text) == (200, path)


@pytest.mark.skipif(not UPLOAD_GIB, reason="Takes minutes: set CARME_UPLOAD_GIB=2.")
@pytest.mark.timeout(0)
def test_an_upload_of_gibibytes_by_jupyterlab(demo: DemoSite, opened: tuple[Visitor, str]) -> None:
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
                headers={"X-XSRFToken": visitor.http.cookies.get("_xsrf", path=urlsplit(server).path) or ""},
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
