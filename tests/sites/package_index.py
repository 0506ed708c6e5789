"""A mirror of the package index for a site's hosts: what one has fetched serves all, and later sites."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from html import escape, unescape
from http import HTTPStatus
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

#: Seconds for which a page is taken as it is; later it is requested again, and is used if no answer comes.
PAGE_SECONDS = 12 * 3600
#: Seconds that the index has for each piece of an answer.
ANSWER_SECONDS = 180
PAGES, FILES = "/simple/", "/files/"
_LINK = re.compile(r'href="([^"]+)"')


class PackageIndex:
    """Serves pages of the "simple" interface (PEP 503) and the files that they name.

    Args:
        folder: what was fetched.
        upstream: the index, such as https://pypi.org/simple.
        address: on which to listen.
        port: on which to listen.
    """

    def __init__(self, folder: Path, upstream: str, address: str, port: int) -> None:
        self._folder = folder
        self._upstream = upstream.rstrip("/")
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
        context = ssl.create_default_context(cafile=bundle)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        index = self

        class Handler(BaseHTTPRequestHandler):
            """Answers one request after the other."""

            def do_GET(self) -> None:
                index.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing: pip says what it misses."""

        self._server = ThreadingHTTPServer((address, port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer with a page or a file, or with the index's refusal."""
        path = request.path.partition("?")[0]
        try:
            if path.startswith(PAGES):
                file, kind = self._page(path.removeprefix(PAGES).strip("/")), "text/html; charset=utf-8"
            elif path.startswith(FILES):
                file, kind = self._file(path.removeprefix(FILES)), "application/octet-stream"
            else:
                return request.send_error(HTTPStatus.NOT_FOUND)
        except urllib.error.HTTPError as error:
            return request.send_error(error.code)
        except (OSError, HTTPException) as error:
            return request.send_error(HTTPStatus.BAD_GATEWAY, str(error))
        with file.open("rb") as content:
            request.send_response(HTTPStatus.OK)
            request.send_header("Content-Type", kind)
            request.send_header("Content-Length", str(os.fstat(content.fileno()).st_size))
            request.end_headers()
            shutil.copyfileobj(content, request.wfile)

    def _page(self, name: str) -> Path:
        address = f"{self._upstream}/{name}/"
        file = self._place("pages", address)
        with self._locks[file]:
            if not file.exists() or time.time() - file.stat().st_mtime > PAGE_SECONDS:
                try:
                    fetched = self._fetched(address, file)
                except (OSError, HTTPException) as error:
                    is_answer = isinstance(error, urllib.error.HTTPError) and error.code < 500
                    if is_answer or not file.exists():
                        raise
                else:
                    fetched.write_text(_LINK.sub(lambda link: _own(address, link[1]), fetched.read_text()))
                    fetched.replace(file)
        return file

    def _file(self, path: str) -> Path:
        scheme, _, rest = path.partition("/")
        address = f"{scheme}://{rest}"
        file = self._place("files", address)
        with self._locks[file]:
            if not file.exists():
                self._fetched(address, file).replace(file)
        return file

    def _place(self, kind: str, address: str) -> Path:
        name = Path(unquote(urlsplit(address).path)).name
        return self._folder / kind / f"{hashlib.sha256(address.encode()).hexdigest()[:16]}-{name}"

    def _fetched(self, address: str, file: Path) -> Path:
        """What the index answers, in a file beside `file`."""
        if urlsplit(address).scheme not in ("http", "https"):
            raise OSError(f"{address} is not an address of the web")
        file.parent.mkdir(parents=True, exist_ok=True)
        with (
            self._opener.open(address, timeout=ANSWER_SECONDS) as answer,
            tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", delete=False) as draft,
        ):
            try:
                shutil.copyfileobj(answer, draft)
                length = answer.headers.get("Content-Length")
                if length and draft.tell() != int(length):
                    raise OSError(f"{address} ended too early")
            except BaseException:
                Path(draft.name).unlink()
                raise
        return Path(draft.name)


def _own(page: str, link: str) -> str:
    """A link of a page, as it is requested here."""
    address, fragment = urldefrag(urljoin(page, unescape(link)))
    scheme, _, rest = address.partition("://")
    return f'href="{escape(f"{FILES}{scheme}/{rest}")}{"#" if fragment else ""}{escape(fragment)}"'
