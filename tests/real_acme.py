"""A real ACME server and a real client: pebble and certbot of the distribution, and names for them."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import real_nginx
from free_ports import free_port

from patience import HANG

PEBBLE = shutil.which("pebble")
CERTBOT = Path(os.environ.get("CARME_CERTBOT", "/")) / "usr/bin/certbot"
_A = 1  # the type of a record that holds an address of version 4


@dataclass
class Acme:
    """A running ACME server.

    Attributes:
        directory: Its address.
        trust: The certificate that its clients must trust.
    """

    directory: str
    trust: Path


def make_client(folder: Path, trust: Path) -> Path:
    """A program that is certbot, with the Python that the distribution made it for.

    Args:
        folder: Where it goes.
        trust: The certificate of the server, which on a site lies among the system's.
    """
    program = folder / "certbot"
    modules = CERTBOT.parents[1] / "lib/python3/dist-packages"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={modules} REQUESTS_CA_BUNDLE={trust} exec /usr/bin/python3 {CERTBOT} "$@"\n'
    )
    program.chmod(0o755)
    return program


@contextlib.asynccontextmanager
async def serving(folder: Path, challenges: int) -> AsyncIterator[Acme]:
    """pebble, for which every name is this machine, until the block ends.

    Args:
        folder: The folder of its files.
        challenges: The port where it requests answers to its challenges, in place of 80.
    """
    assert PEBBLE
    port, management, names = (free_port() for _ in range(3))
    real_nginx.make_certificate(folder, stem="acme")
    configuration = {
        "pebble": {
            "listenAddress": f"127.0.0.1:{port}",
            "managementListenAddress": f"127.0.0.1:{management}",
            "certificate": str(folder / "acme.pem"),
            "privateKey": str(folder / "acme-key.pem"),
            "httpPort": challenges,
            "tlsPort": free_port(),
            "ocspResponderURL": "",
        }
    }
    (folder / "pebble.json").write_text(json.dumps(configuration))
    # At once, and without the random refusals that pebble makes by default.
    environment = os.environ | {"PEBBLE_VA_NOSLEEP": "1", "PEBBLE_WFE_NONCEREJECT": "0"}
    loop = asyncio.get_running_loop()
    transport, _protocol = await loop.create_datagram_endpoint(_Names, ("127.0.0.1", names))
    with (folder / "pebble.log").open("wb") as log:
        pebble = await asyncio.create_subprocess_exec(
            *[PEBBLE, "-config", str(folder / "pebble.json"), "-dnsserver", f"127.0.0.1:{names}"],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(HANG):
            while not await real_nginx.listens(port):
                assert pebble.returncode is None, (folder / "pebble.log").read_text()
                await asyncio.sleep(0.02)
        yield Acme(f"https://127.0.0.1:{port}/dir", folder / "acme.pem")
    finally:
        if pebble.returncode is None:
            pebble.terminate()
        await pebble.wait()
        transport.close()


class _Names(asyncio.DatagramProtocol):
    """A DNS server that resolves each name to this machine, and has no other records."""

    transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(0, 12) + 5  # of the question: a name, its type and class
        question, kind = data[12:end], struct.unpack("!H", data[end - 4 : end - 2])[0]
        count = 1 if kind == _A else 0
        header = data[:2] + struct.pack("!HHHHH", 0x8180, 1, count, 0, 0)
        address = b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 60, 4) + socket.inet_aton("127.0.0.1")
        self.transport.sendto(header + question + address * count, addr)


async def certificate_of(port: int, name: str) -> str:
    """The certificate, in PEM, that a server on this machine presents for a name."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    try:
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return ssl.DER_cert_to_PEM_cert(found)
