"""A user in front of the portal: logs in, starts, opens and stops sessions through the pages' own forms."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urljoin

import httpx
from bs4 import BeautifulSoup, Tag

from carme.errors import CarmeError
from carme.validation.notebook import NotebookKernel, description

#: Seconds between two looks at a session.
SECONDS = 0.5
#: The state that a session does not leave again.
OVER = {"ended"}


@dataclass(frozen=True)
class SessionPage:
    """What a session's page says: its `state`, the `label` that people read, and all of it in plain words."""

    name: str
    state: str
    label: str
    text: str


class Visitor:
    """One person with one browser. Use as a context manager.

    Arguments: `url` of the site, `certificate` a PEM file to trust (the site's own certificate, when no
    public authority signed it).
    """

    def __init__(self, url: str, certificate: str | None = None) -> None:
        self.url = url.rstrip("/") + "/"
        self.trust = ssl.create_default_context(cafile=certificate)
        self.http = httpx.Client(verify=self.trust, follow_redirects=True, timeout=60)

    def __enter__(self) -> Visitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()

    def login(self, user: str, password: str) -> None:
        """Log in at the portal. Raises `CarmeError` when the portal refuses."""
        page = self._get(self.url)
        form = self.form(page, "password")
        reply = self.send(page, form, {"login": user, "password": password})
        if _parse_html(reply).find("input", {"type": "password"}):
            raise CarmeError(
                f"The portal refused to log in {user}: {_messages(reply)}", "Check the name and the password."
            )

    def start(self, options: dict[str, str]) -> str:
        """Fill in the start form and send it; returns the session's name. Raises with the page's sentence."""
        page = self._get(self.url)
        # Numbers of our own, in place of the cards that the form has chosen.
        numbers = {"hardware": "custom", "time": "custom", "hours": "0"}
        reply = self.send(page, self.form(page, "gpus_per_node"), numbers | options)
        parts = reply.url.path.strip("/").split("/")
        if reply.status_code != 200 or parts[0] != "sessions" or len(parts) != 2:
            raise CarmeError(f"The portal did not start the session: {_messages(reply)}", "")
        return parts[1]

    def session(self, name: str) -> SessionPage:
        """The session's page as it is now."""
        soup = _parse_html(self._get(urljoin(self.url, f"sessions/{name}/")))
        shown = soup.select_one(".status .state")
        if shown is None:
            raise CarmeError(f"The page of session {name} shows no state.", "")
        state = next(word for word in shown.get_attribute_list("class") if word and word != "state")
        text = (soup.main or soup).get_text(" ", strip=True)
        return SessionPage(name, state, shown.get_text(strip=True), text)

    def wait(self, name: str, state: str, timeout: float) -> SessionPage:
        """Wait until the session is in `state`; raises when it ends otherwise or after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            is_late = time.monotonic() > end
            if is_late or self._state(name) in {state, *OVER}:
                page = self.session(name)
                if page.state == state:
                    return page
                if page.state in OVER:
                    raise CarmeError(f"Session {name} is {page.state} instead of {state}: {page.text}", "")
                if is_late:
                    raise CarmeError(
                        f"Session {name} is still {page.state} after {timeout:.0f} seconds, not {state}.",
                        "Look at its page in the portal.",
                    )
            time.sleep(SECONDS)

    def _state(self, name: str) -> str:
        """The session's state; its page, which costs much, is made where a portal says it there alone."""
        reply = self._get(urljoin(self.url, f"sessions/{name}/state/"))
        if reply.headers.get("Content-Type") != "application/json":
            return self.session(name).state
        return str(reply.json()["state"])

    def open(self, name: str) -> str:
        """Follow the session's Open link until the notebook server lets us in; returns its address."""
        soup = _parse_html(self._get(urljoin(self.url, f"sessions/{name}/")))
        link = soup.find("a", id="open")
        if not isinstance(link, Tag):
            raise CarmeError(f"The page of session {name} has no link that opens it.", "")
        reply = self._get(urljoin(self.url, str(link["href"])))
        path = reply.url.path
        marker = f"/{name}/"
        if marker not in path:
            raise CarmeError(
                f"Opening session {name} ended at {path} with {reply.status_code}.", _messages(reply)
            )
        return str(reply.url.copy_with(path=path[: path.index(marker) + len(marker)], query=None))

    def kernel(self, server_url: str) -> NotebookKernel:
        """A notebook kernel on an opened session's server."""
        return NotebookKernel(self.http, server_url, self.trust)

    def stop(self, name: str) -> None:
        """Confirm that the session is to stop."""
        page = self._get(urljoin(self.url, f"sessions/{name}/stop/"))
        form = _parse_html(page).select_one("main form")
        if form is None:
            raise CarmeError(f"Session {name} cannot be stopped: {_messages(page)}", "")
        self.send(page, form, {})

    def fetch(self, url: str) -> httpx.Response:
        """Whatever the site answers at an address. Raises `CarmeError` when nothing answers."""
        try:
            return self.http.get(url)
        except httpx.TransportError as error:
            raise _silent(url, error) from error

    def _get(self, url: str) -> httpx.Response:
        reply = self.fetch(url)
        if reply.status_code >= 500:
            raise CarmeError(f"{reply.url} answered {reply.status_code}.", "Look at the service's log.")
        return reply

    def form(self, page: httpx.Response, field: str) -> Tag:
        """The form on a page that has a field of this name."""
        found = _parse_html(page).select_one(f'[name="{field}"]')
        form = found.find_parent("form") if isinstance(found, Tag) else None
        if not isinstance(form, Tag):
            raise CarmeError(f"{page.url} has no form with the field {field}: {_messages(page)}", "")
        return form

    def send(self, page: httpx.Response, form: Tag, values: dict[str, str]) -> httpx.Response:
        """Send a form as a browser would: the fields' own values, and ours over them."""
        data: dict[str, str] = {}
        for item in form.find_all(["input", "select", "textarea"]):
            name = item.get("name")
            if not name or item.get("type") in {"submit", "button"}:
                continue
            if item.get("type") in {"checkbox", "radio"} and not item.has_attr("checked"):
                continue
            if item.name == "select":
                chosen = item.find("option", selected=True) or item.find("option")
                data[str(name)] = str(chosen.get("value", "")) if isinstance(chosen, Tag) else ""
            else:
                data[str(name)] = str(item.get("value", "")) if item.name == "input" else item.get_text()
        data.update(values)
        target = urljoin(str(page.url), str(form.get("action") or page.url))
        # Django refuses form posts over TLS without a Referer of the same origin.
        try:
            return self.http.post(target, data=data, headers={"Referer": str(page.url)})
        except httpx.TransportError as error:
            raise _silent(target, error) from error


def _silent(url: str, error: httpx.TransportError) -> CarmeError:
    return CarmeError(f"{url} does not answer: {description(error)}.", "Check the reverse proxy (nginx).")


def _parse_html(reply: httpx.Response) -> BeautifulSoup:
    return BeautifulSoup(reply.text, "html.parser")


def _messages(reply: httpx.Response) -> str:
    """The sentences a page shows as errors, or else its main text, shortened."""
    soup = _parse_html(reply)
    shown = [item.get_text(" ", strip=True) for item in soup.select("[role=alert], .errorlist li, .error")]
    main = soup.main or soup
    return "; ".join(shown) or main.get_text(" ", strip=True)[:300]
