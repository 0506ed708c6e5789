"""A session's server in small: reports to the hub as `carme-singleuser` does, and answers every request.

It stops answering, as on a node that is frozen, while a file `frozen` lies in the job's folder.
"""

import http.server
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

FOLDER = Path(os.environ["CARME_JOB_FOLDER"])
FILES = FOLDER / "files"


def secured(purpose: ssl.Purpose) -> ssl.SSLContext:
    """TLS in which both sides show certificates."""
    context = ssl.create_default_context(purpose, cafile=str(FILES / "singleuser-ca.crt"))
    context.load_cert_chain(FILES / "singleuser.crt", FILES / "singleuser.key")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        while (FOLDER / "frozen").exists():
            time.sleep(0.1)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
server.socket = secured(ssl.Purpose.CLIENT_AUTH).wrap_socket(server.socket, server_side=True)
print("listening", flush=True)
report = urllib.request.Request(
    os.environ["JUPYTERHUB_API_URL"] + "/carme/ready",
    json.dumps(
        {
            "port": server.server_port,
            "host": "127.0.0.1",
            "pid": os.getpid(),
            "marks": {"prolog": time.time() - 2, "container": time.time() - 1, "listening": time.time()},
        }
    ).encode(),
    {"Authorization": f"token {os.environ['JUPYTERHUB_API_TOKEN']}"},
)
while True:
    try:
        urllib.request.urlopen(report, context=secured(ssl.Purpose.SERVER_AUTH))
        break
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        time.sleep(0.05)
server.serve_forever()
