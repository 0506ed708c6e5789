"""A broker that answers with an overview of the test, for sizes and states that no Slurm here has.

Nothing of the broker is repeated here: every answer is the one overview.
"""

import socketserver
import threading
from pathlib import Path

from pydantic_core import to_jsonable_python

from carme.broker import protocol
from carme.broker.overview import Overview

__all__ = ["SimulatedBroker", "answer_line", "configuration"]


def answer_line(overview: Overview) -> bytes:
    """The broker's answer to a question for the overview, without the end of the line."""
    return protocol.Answer(result=to_jsonable_python(overview)).model_dump_json().encode()


def configuration(folder: Path, socket: Path) -> Path:
    """A site's configuration with that broker, and with a portal and a hub that are away; its file."""
    file = folder / "carme.toml"
    file.write_text(
        '[site]\nurl = "https://localhost"\n[slurm]\ncluster = "c"\n'
        f'[broker]\nsocket = "{socket}"\n'
        # Nobody listens at port 1.
        '[portal]\nlisten = "127.0.0.1:1"\n[hub]\nproxy_url = "http://127.0.0.1:1"\n'
    )
    file.chmod(0o644)
    return file


class SimulatedBroker(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers every request with `overview`, which may be changed; listens while it is entered."""

    daemon_threads = True

    def __init__(self, socket: Path, overview: Overview) -> None:
        self.overview = overview
        super().__init__(str(socket), _Handler)

    def __enter__(self) -> "SimulatedBroker":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, SimulatedBroker)
        while self.rfile.readline():
            self.wfile.write(answer_line(self.server.overview) + b"\n")
