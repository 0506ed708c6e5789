"""A portal whose certificate this computer does not know, over real TLS."""

import http.server
import io
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import self_signed
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

import carme
from carme.cli import main
from carme.client import Login, Unreachable

PROFILE = {
    "user": "alice", "email": "", "manager": False, "accounts": [], "default_account": None, "scopes": [],
    "token_expires": "2030-01-01T00:00:00Z",
}  # fmt: skip


class Portal(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(PROFILE).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of the site's own; its key lies beside it."""
    signed, key = self_signed("localhost")
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "site.pem").write_bytes(signed)
    return tmp_path / "site.pem"


@pytest.fixture
def url(certificate: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Portal) as server:
        # In each connection's own thread: one that distrusts us must not hold up the next.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"https://localhost:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("CARME_CONFIG", "CARME_URL", "CARME_TOKEN", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("carme.cli.portal.DEFAULT_PATH", tmp_path / "none.toml")
    monkeypatch.setattr("carme.config.settings.DEFAULT_PATH", tmp_path / "none.toml")


def test_a_certificate_that_is_not_known_is_named_and_can_be_trusted(
    url: str, certificate: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("carme_token\n"))
    assert main(["login", url]) == 1 and not Login().exists()
    error = capsys.readouterr().err
    known = x509.load_pem_x509_certificate(certificate.read_bytes())
    assert f"The certificate of the portal at {url} is not trusted here: self" in error
    assert "issued by CN=localhost, SHA-256 " + known.fingerprint(SHA256()).hex(":").upper() in error
    assert f"carme login {url} --ca FILE" in error and "network" not in error
    for path, words in (("none.pem", "No such file"), ("key.pem", "holds no certificate as PEM")):
        monkeypatch.setattr("sys.stdin", io.StringIO("carme_token\n"))
        assert main(["login", url, "--ca", str(certificate.with_name(path))]) == 1
        assert words in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("carme_token\n"))
    assert main(["login", url, "--ca", str(certificate)]) == 0
    certificate.unlink()  # it is kept with the token
    with carme.Client() as client:
        assert client.profile().user == "alice"
    monkeypatch.setattr("sys.stdin", io.StringIO("carme_other\n"))
    assert main(["login", url]) == 0  # another token for the same portal
    with carme.Client() as client:
        assert client.profile().user == "alice"


def test_a_certificate_of_another_host_is_never_trusted(url: str, certificate: Path) -> None:
    by_number = url.replace("localhost", "127.0.0.1")
    Login().write(by_number, "carme_token", certificate.read_text())
    with (
        carme.Client() as client,
        pytest.raises(Unreachable, match="not trusted here: IP address mismatch") as caught,
    ):
        client.profile()
    assert "It is that of CN=localhost" in str(caught.value) and "--ca" not in str(caught.value)


@pytest.mark.parametrize("words", [["report", "7"], ["session", "shell", "s1"]])
def test_on_a_laptop_nobody_is_to_write_the_sites_configuration(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "works on the computers of the cluster only" in error and "Create it" not in error
    assert main(["status"]) == 1
    assert "carme login https://PORTAL" in capsys.readouterr().err
