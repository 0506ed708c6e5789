"""A session's server in small: reports to the hub as `carme-singleuser` does, and answers every request."""

import http.server
import json
import os
import time
import urllib.error
import urllib.request


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
print("listening", flush=True)
report = urllib.request.Request(
    os.environ["JUPYTERHUB_API_URL"] + "/carme/ready",
    json.dumps({"port": server.server_port, "host": "127.0.0.1", "pid": os.getpid()}).encode(),
    {"Authorization": f"token {os.environ['JUPYTERHUB_API_TOKEN']}"},
)
while True:
    try:
        urllib.request.urlopen(report)
        break
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        time.sleep(0.05)
server.serve_forever()
