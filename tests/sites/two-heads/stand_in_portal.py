"""Stands in for the portal: each POST is a booking, which PostgreSQL has before it is answered."""

import socket
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._reply(socket.gethostname())

    def do_POST(self) -> None:
        number = int(self.path.strip("/"))
        words = ["psql", "-Xqd", "host=10.79.0.4 user=carme dbname=carme password=trial"]
        done = subprocess.run([*words, "-c", f"INSERT INTO booking VALUES ({number})"], check=False)
        self._reply("booked" if done.returncode == 0 else "failed")

    def _reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


ThreadingHTTPServer(("0.0.0.0", 8100), Answer).serve_forever()
