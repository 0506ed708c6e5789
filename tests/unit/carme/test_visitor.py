"""What a user of the check waits for at the portal."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from carme.errors import CarmeError
from carme.validation import Visitor
from patience import HANG

PAGE = '<main><p class="status"><span class="state {0}">{0}</span></p></main>'


class Portal(ThreadingHTTPServer):
    """A session that changes to the next of `states` with each query of its state, up to the last one.

    Attributes:
        pages: How often its page was made.
        has_state: Whether there is an address for its state alone, as portals did not always have.
    """

    def __init__(self, *states: str, has_state: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.states = list(states)
        self.pages = 0
        self.has_state = has_state

    def state(self) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def __enter__(self) -> "Portal":
        Thread(target=self.serve_forever, args=(0.02,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Answers(BaseHTTPRequestHandler):
    server: Portal  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        portal = self.server
        if self.path == "/sessions/s1/":
            portal.pages += 1
            shown = portal.states[0] if portal.has_state else portal.state()
            self.answer(200, "text/html", PAGE.format(shown))
        elif portal.has_state:
            self.answer(200, "application/json", json.dumps({"state": portal.state()}))
        else:
            self.answer(404, "text/html", "There is no such page.")

    def answer(self, code: int, kind: str, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carme.validation.visitor.SECONDS", 0.01)


@pytest.mark.usefixtures("patience")
def test_while_it_waits_no_page_is_made() -> None:
    with Portal("queued", "starting", "starting", "ready") as portal, visitor(portal) as user:
        page = user.wait("s1", "ready", HANG)
        assert (page.state, page.label, portal.pages) == ("ready", "ready", 1)


@pytest.mark.usefixtures("patience")
def test_a_portal_that_says_states_on_pages_alone_is_read_there() -> None:
    with Portal("queued", "starting", "ready", has_state=False) as portal, visitor(portal) as user:
        assert user.wait("s1", "ready", HANG).state == "ready"


@pytest.mark.usefixtures("patience")
def test_the_end_of_what_is_waited_for_is_an_error() -> None:
    with (
        Portal("starting", "ended") as portal,
        visitor(portal) as user,
        pytest.raises(CarmeError, match="Session s1 is ended instead of ready"),
    ):
        user.wait("s1", "ready", HANG)


@pytest.mark.usefixtures("patience")
def test_what_never_comes_is_an_error() -> None:
    with (
        Portal("queued") as portal,
        visitor(portal) as user,
        pytest.raises(CarmeError, match="is still queued after 0 seconds, not ready"),
    ):
        user.wait("s1", "ready", 0)


def visitor(portal: Portal) -> Visitor:
    return Visitor(f"http://127.0.0.1:{portal.server_port}")
