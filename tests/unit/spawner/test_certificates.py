"""Who may speak to whom, and for how long."""

import asyncio
import json
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509

from carme.config import Settings
from carme_spawner import hub as hub_module
from carme_spawner.certificates import REST, renew
from carme_spawner.hub import main
from carme_spawner.names import address_in, name_pattern, server_name

from .conftest import Site, eventually

#: What a client sees that was turned away, depending on who was faster.
REFUSED = (ssl.SSLError, ConnectionError)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


async def answer(host: str, port: int, context: ssl.SSLContext | None, name: str | None = None) -> bytes:
    """The answer to a request; without a context it is sent in the clear."""
    requested = (name or host) if context else None
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=requested)
    try:
        writer.write(b"GET /jupyter/hub/api HTTP/1.0\r\n\r\n")
        return await reader.read()
    finally:
        writer.close()


async def test_the_hub_says_nothing_without_a_certificate(site: Site) -> None:
    host, port = address(site.settings.hub.listen)
    stranger = ssl.create_default_context()
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(REFUSED):
        await answer(host, port, stranger)
    with pytest.raises(REFUSED):
        assert await answer(host, port, None) == b""
        raise ConnectionError  # closed without a word is as good
    assert b"200 OK" in await answer(host, port, site.proxys_certificate())


async def test_servers_trust_hub_and_proxy_but_no_other_server(site: Site) -> None:
    for user in ("ada", "bob"):
        await site.start("s1", user)
    await eventually(lambda: len(site.routes) >= 3, "both servers are ready")
    name, port = address(site.routes["/jupyter/user/ada/s1/"]["target"])
    assert b"200 OK" in await answer("127.0.0.1", port, site.proxys_certificate(), name)
    neighbour = site.servers_certificate(101)
    neighbour.check_hostname, neighbour.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(REFUSED):
        await answer("127.0.0.1", port, neighbour, name)


async def test_a_server_cannot_pass_for_another_one_at_its_port(site: Site) -> None:
    for user in ("ada", "bob"):
        await site.start("s1", user)
    await eventually(lambda: len(site.routes) >= 3, "both servers are ready")
    name, _ = address(site.routes["/jupyter/user/ada/s1/"]["target"])
    _, port = address(site.routes["/jupyter/user/bob/s1/"]["target"])
    with pytest.raises(ssl.SSLCertVerificationError):
        await answer("127.0.0.1", port, site.proxys_certificate(), name)


async def test_the_keys_of_servers_stay_off_the_hubs_disk(site: Site) -> None:
    await site.start()
    key = (site.broker.folder(100) / "files" / "singleuser.key").read_bytes()
    folder = site.settings.hub.state_directory / "certificates"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.read_bytes() != key for path in folder.rglob("*") if path.is_file())
    assert site.hub
    spawner = next(user for user in site.hub.users.values() if user.name == "ada").spawners["s1"]
    await eventually(lambda: spawner.routed, "the session is there")
    assert not spawner.files


async def test_a_servers_certificate_outlives_its_session(site: Site) -> None:
    site.broker.command = None
    await site.start()
    [own] = x509.load_pem_x509_certificates(
        (site.broker.folder(100) / "files" / "singleuser.crt").read_bytes()
    )
    left = own.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=7) < left < timedelta(days=60)


@pytest.fixture
def folder(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the certificates of hub and proxy, made by `carme-hub --certificates`."""
    own = settings.model_copy(
        update={"hub": settings.hub.model_copy(update={"state_directory": tmp_path / "state"})}
    )
    monkeypatch.setattr(hub_module, "load", lambda path: own)
    monkeypatch.setattr("sys.argv", ["carme-hub", "--certificates"])
    hub_module.CarmeHub.clear_instance()
    main()
    hub_module.CarmeHub.clear_instance()
    return tmp_path / "state" / "certificates"


def test_the_certificates_can_be_made_before_the_hub_starts(folder: Path) -> None:
    for service in ("hub-internal", "proxy-api", "proxy-client"):
        created = certificate(folder / service / f"{service}.crt")
        created.verify_directly_issued_by(
            certificate(next(path for path in folder.glob("*-ca/*.crt") if issued(created, path)))
        )
    before = {path: path.read_bytes() for path in folder.glob("*/*")}
    main()
    hub_module.CarmeHub.clear_instance()
    assert {path: path.read_bytes() for path in folder.glob("*/*")} == before


def issued(child: x509.Certificate, authority: Path) -> bool:
    return certificate(authority).subject == child.issuer


def test_certificates_are_renewed_before_they_run_out(folder: Path) -> None:
    authority, hub = folder / "notebooks-ca/notebooks-ca.crt", folder / "hub-internal/hub-internal.crt"
    old_authority, old_hub = certificate(authority), certificate(hub)
    later = old_hub.not_valid_after_utc - REST + timedelta(days=1)
    renew(folder, ["IP:127.0.0.1"], later)
    new = certificate(authority)
    assert new.not_valid_after_utc > later + REST
    # With the same key: what it has signed stays good.
    assert new.public_key() == old_authority.public_key()
    assert new.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    main()
    hub_module.CarmeHub.clear_instance()
    assert certificate(hub).serial_number != old_hub.serial_number


def test_certificates_follow_the_hubs_address(folder: Path) -> None:
    renew(folder, ["IP:127.0.0.1"])
    assert "hub-internal" in json.loads((folder / "certipy.json").read_text())
    renew(folder, ["IP:10.77.0.9"])
    assert "hub-internal" not in json.loads((folder / "certipy.json").read_text())


@pytest.mark.parametrize("text", ["10.77.0.3", "127.0.0.1", "::1", "fd00::77:3"])
def test_a_servers_name_holds_its_address(text: str) -> None:
    name = server_name(text, "k")
    assert address_in(name) == text
    assert name.split(".", 1)[1] == name_pattern("k").split(".", 1)[1]


@pytest.mark.parametrize("name", ["localhost", "n1.k.session.invalid", "1-2.k.session.invalid", "10.77.0.3"])
def test_other_names_hold_no_address(name: str) -> None:
    assert address_in(name) is None
