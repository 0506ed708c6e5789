"""Who may read what exporters serve: who shows the site's certificate; without TLS loopback alone."""

from __future__ import annotations

import grp
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from free_ports import free_port
from prometheus_client import CollectorRegistry, Gauge

from carme_monitoring import serving
from carme_monitoring.certificates import Entry, make
from carme_monitoring.serving import CONNECTIONS, MetricsServer, ServingFailed
from patience import HANG

from .conftest import ROOT

GROUP = grp.getgrgid(os.getgid()).gr_name
TABLE: list[Entry] = [
    {"name": "node", "group": GROUP, "hosts": ["127.0.0.1", "n1"]},
    {"name": "other", "group": GROUP, "hosts": ["127.0.0.1"]},
    {"name": "reader", "group": GROUP, "client": True},
]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "monitoring"
    make(folder, TABLE)
    return folder


@pytest.fixture
def port(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    # A client that stalls here does so until its test is over.
    monkeypatch.setattr(serving, "PATIENCE", HANG)
    registry = CollectorRegistry()
    Gauge("secret", "Somebody's.", registry=registry).set(7)
    server = MetricsServer("127.0.0.1:0", registry, site / "node")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def context(site: Path, client: str | None) -> ssl.SSLContext:
    authorities = ssl.create_default_context(cafile=site / "node/ca.crt")
    if client:
        authorities.load_cert_chain(site / client / "tls.pem")
    return authorities


def scrape(port: int, trusted: ssl.SSLContext) -> str:
    with httpx.Client(verify=trusted, trust_env=False, timeout=HANG) as client:
        return client.get(f"https://127.0.0.1:{port}/metrics").text


def test_a_client_with_a_reader_s_certificate_may_read(site: Path, port: int):
    assert "secret 7.0" in scrape(port, context(site, "reader"))


@pytest.mark.parametrize("client", [None, "other"])
def test_nobody_else_may(site: Path, port: int, client: str | None):
    """Neither without a certificate nor with that of another node."""
    with pytest.raises(httpx.TransportError):
        scrape(port, context(site, client))


def test_a_certificate_of_another_authority_reads_nothing(site: Path, port: int, tmp_path: Path):
    make(tmp_path / "forged", TABLE)
    trusted = context(site, None)
    trusted.load_cert_chain(tmp_path / "forged/reader/tls.pem")
    with pytest.raises(httpx.TransportError):
        scrape(port, trusted)


def test_plain_http_is_not_answered(port: int):
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)


def test_clients_that_stall_hold_up_no_other(site: Path, port: int):
    stalled = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS - 1)]
    assert "secret 7.0" in scrape(port, context(site, "reader"))
    for stalling in stalled:
        stalling.close()


def test_connections_of_one_address_are_limited(site: Path, port: int):
    stalled = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    with pytest.raises(httpx.TransportError):
        scrape(port, context(site, "reader"))
    # From another address of the same interface there are still some.
    plain = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
    with context(site, "reader").wrap_socket(plain, server_hostname="127.0.0.1") as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.0 200")
    for stalling in stalled:
        stalling.close()


def test_others_are_not_served_without_tls():
    with pytest.raises(ServingFailed, match="private"):
        MetricsServer("0.0.0.0:0", CollectorRegistry(), None)


def test_the_program_says_what_is_wrong_with_its_certificates(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "carme_monitoring.node.exporter", "--listen", f"127.0.0.1:{free_port()}"]  # noqa: RUF005
        + ["--certificates", str(tmp_path)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'monitoring/src'}:{ROOT / 'carme/src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"The certificates in {tmp_path} cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_group_that_the_host_lacks_is_named_before_anything_is_made(tmp_path: Path):
    table = [*TABLE, {"name": "zabbix", "group": "no-such-group", "client": True}]
    done = subprocess.run(
        [sys.executable, "-m", "carme_monitoring.certificates", str(tmp_path / "made"), json.dumps(table)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'monitoring/src'}:{ROOT / 'carme/src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and not (tmp_path / "made").exists()
    assert "has no group 'no-such-group', to which the certificate 'zabbix' is to belong" in done.stderr
    assert "groupadd" in done.stderr and "Traceback" not in done.stderr


def test_certificates_are_made_once(site: Path):
    before = {file: file.read_bytes() for file in site.rglob("*") if file.is_file()}
    assert make(site, TABLE) == []
    assert before == {file: file.read_bytes() for file in site.rglob("*") if file.is_file()}


def test_certificates_are_renewed_for_a_new_address_or_when_old_or_damaged(site: Path):
    moved: list[Entry] = [{"name": "node", "group": GROUP, "hosts": ["127.0.0.1", "n2"]}, *TABLE[1:]]
    assert make(site, moved) == ["node"]
    assert make(site, moved, datetime.now(UTC) + timedelta(days=3400)) == ["node", "other", "reader"]
    (site / "reader/tls.pem").write_text("torn")
    assert "reader" in make(site, moved)


def test_keys_are_closed_to_others(site: Path):
    modes = {
        str(path.relative_to(site)): stat.S_IMODE(path.stat().st_mode)
        for path in (site / "authority.pem", site / "node", site / "node/tls.pem")
    }
    assert modes == {"authority.pem": 0o600, "node": 0o750, "node/tls.pem": 0o640}
    (site / "node/tls.pem").chmod(0o644)
    assert make(site, TABLE) == ["node"]
    assert stat.S_IMODE((site / "node/tls.pem").stat().st_mode) == 0o640
