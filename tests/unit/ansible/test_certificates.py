"""The site's certificate is renewed and served without a restart: a real nginx, ACME server and client."""

import asyncio
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import real_acme
import real_nginx
import yaml
from aiohttp import web
from cryptography import x509
from free_ports import free_port
from jinja2 import Environment

from carme.config import Settings
from carme.heads import state
from patience import HANG

PROGRAM = real_nginx.ROLE / "files/certificate.py"
NAME = "carme.example.org"

needs_acme = pytest.mark.skipif(
    not (real_acme.PEBBLE and real_acme.CERTBOT.exists()),
    reason="pebble or certbot are not installed; ./test unit fetches them",
)
pytestmark = real_nginx.needed


@dataclass
class Site:
    """A running nginx with the role's configuration.

    Attributes:
        folder: Of its files.
        port: Where it serves pages.
    """

    folder: Path
    port: int

    async def run_renewal(self, *arguments: str, umask: int = 0o022) -> tuple[int, str, str]:
        """Run the program that the timer starts; return its exit code, output and errors.

        After a reload, earlier workers accept connections for a moment; this returns when none does.
        """
        before = real_nginx.workers(self.folder)
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, str(PROGRAM), "--certificate", str(self.folder / "site.pem")],
            *["--key", str(self.folder / "site-key.pem"), "--port", str(self.port)],
            *["--hooks", str(self.folder), "--own", str(self.folder / "own")],
            *["--state", str(self.folder / "acme")],
            *["--logs", str(self.folder / "logs"), "--webroot", str(self.folder / "webroot")],
            *["--nginx", shlex.join(real_nginx.command(self.folder))],
            *["--reload", shlex.join([*real_nginx.command(self.folder), "-s", "reload"])],
            *[*arguments, NAME],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            umask=umask,
        )
        output, errors = await process.communicate()
        if b"nginx serves the new certificate" in output:
            async with asyncio.timeout(HANG):
                while any(real_nginx.takes_connections(each, self.port) for each in before):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        return process.returncode or 0, output.decode(), errors.decode()

    async def served(self) -> str:
        return await real_acme.certificate_of(self.port, NAME)

    def replace(self) -> str:
        """Put another certificate and its key into the files."""
        real_nginx.make_certificate(self.folder, NAME)
        return (self.folder / "site.pem").read_text()


async def greet(request: web.Request) -> web.StreamResponse:
    """What portal and hub answer: an echo where a channel is requested."""
    if request.headers.get("Upgrade"):
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        async for message in channel:
            await channel.send_str(message.data)
        return channel
    return web.Response(text="portal")


@pytest.fixture
async def challenges() -> int:
    return free_port()


@pytest.fixture
async def site(tmp_path: Path, challenges: int) -> AsyncIterator[Site]:
    port, backend = free_port(), free_port()
    application = web.Application()
    application.router.add_route("*", "/{rest:.*}", greet)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", backend).start()
    real_nginx.configure(
        *(tmp_path, port, backend),
        reloads=True,
        reverse_proxy_host=NAME,
        carme_site_url=f"https://{NAME}",
        reverse_proxy_port=443,
        reverse_proxy_acme_directory="https://acme.example.org/directory",
        reverse_proxy_webroot=tmp_path / "webroot",
        reverse_proxy_ipv6={"stat": {"exists": False}},
    )
    text = (tmp_path / "carme.conf").read_text()
    for there, here in (("listen 443 ", port), ("listen 80 ", challenges)):
        assert text.count(there) == 1
        text = text.replace(there, f"listen {here} ")
    real_nginx.write(tmp_path, text, reloads=True)
    try:
        async with real_nginx.running(tmp_path, port):
            yield Site(tmp_path, port)
    finally:
        await runner.cleanup()


def browser() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False))


@needs_acme
async def test_a_certificate_comes_by_acme_and_is_served_without_a_restart(
    site: Site, tmp_path: Path, challenges: int
) -> None:
    served = await site.served()
    (tmp_path / "deploy.d").mkdir()
    hook = tmp_path / "deploy.d/mail"
    hook.write_text(f'#!/bin/sh\ncp "$CARME_CERTIFICATE" {tmp_path}/mail.pem\nhead -1 "$CARME_KEY"\n')
    hook.chmod(0o755)
    async with browser() as session, real_acme.serving(tmp_path, challenges) as acme:
        channel = await session.ws_connect(f"https://127.0.0.1:{site.port}/jupyter/user/ada/s1/channels")
        client = real_acme.make_client(tmp_path, acme.trust)
        arguments = [f"--certbot={client}", "--directory", acme.directory]
        code, output, errors = await site.run_renewal(*arguments, "--email", "admin@example.org", umask=0o077)
        assert (code, errors) == (0, "") and output.startswith(f"New certificate from {acme.directory}")
        now = await site.served()
        assert now != served
        found = x509.load_pem_x509_certificate(now.encode())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [NAME]
        assert "Pebble" in found.issuer.rfc4514_string()
        assert (tmp_path / "mail.pem").read_text() == (tmp_path / "site.pem").read_text()
        for name, mode in (("site-key.pem", 0o600), ("site.pem", 0o644), ("webroot", 0o755)):
            assert (tmp_path / name).stat().st_mode & 0o777 == mode
        # The earlier connection is still open.
        await channel.send_str("still here")
        assert await channel.receive_str() == "still here"
        # Now there is nothing to do; a month before the certificate's end there is.
        assert await site.run_renewal(*arguments) == (0, "", "")
        renewal = tmp_path / "acme/renewal/carme.conf"
        renewal.write_text(f"renew_before_expiry = 99 years\n{renewal.read_text()}")
        code, output, errors = await site.run_renewal(*arguments)
        assert (code, errors) == (0, "") and "New certificate" in output and await site.served() != now
        # A certificate of another server is replaced as well.
        now, text = await site.served(), renewal.read_text().replace("renew_before_expiry = 99 years\n", "")
        assert f"server = {acme.directory}\n" in text
        renewal.write_text(text.replace(f"server = {acme.directory}", "server = https://other.example.org/"))
        code, output, errors = await site.run_renewal(*arguments)
        assert (code, errors) == (0, "") and "New certificate" in output and await site.served() != now
        assert await site.run_renewal(*arguments) == (0, "", "")
        await channel.send_str("and here")
        assert await channel.receive_str() == "and here"
        await channel.close()


@needs_acme
async def test_the_other_head_renews_from_its_copy_of_the_state(
    site: Site, tmp_path: Path, challenges: int
) -> None:
    config, none = tmp_path / "head/carme.toml", str(tmp_path / "none")
    folders = {name: {"state_directory": none} for name in ("broker", "hub", "portal")}
    about = {"site": {"url": f"https://{NAME}"}, "slurm": {"cluster": "c"}, "secrets": {"directory": none}}
    settings = Settings.model_validate(about | folders)
    acme_state = config.parent / "tls/acme"
    acme_state.parent.mkdir(parents=True)
    async with real_acme.serving(tmp_path, challenges) as acme:
        client = real_acme.make_client(tmp_path, acme.trust)
        arguments = [f"--certbot={client}", "--directory", acme.directory, "--state", str(acme_state)]
        code, output, errors = await site.run_renewal(*arguments)
        assert (code, errors) == (0, "") and "New certificate" in output
        accounts = sorted(acme_state.rglob("regr.json"))
        stream, before = io.BytesIO(), await site.served()
        state.send(settings, config, stream)
        shutil.rmtree(config.parent / "tls")
        stream.seek(0)
        state.receive(settings, config, stream)
        # The copy has the certificate of the active head, and so there is nothing to do after a promotion.
        assert await site.run_renewal(*arguments) == (0, "", "")
        renewal = acme_state / "renewal/carme.conf"
        renewal.write_text(f"renew_before_expiry = 99 years\n{renewal.read_text()}")
        code, output, errors = await site.run_renewal(*arguments)
        assert (code, errors) == (0, "") and "New certificate" in output
        assert await site.served() != before
        assert len(accounts) == 1 and sorted(acme_state.rglob("regr.json")) == accounts


@needs_acme
async def test_the_account_of_the_last_certificate_renews_it(
    site: Site, tmp_path: Path, challenges: int
) -> None:
    async with real_acme.serving(tmp_path, challenges) as acme:
        arguments = [
            f"--certbot={real_acme.make_client(tmp_path, acme.trust)}",
            "--directory",
            acme.directory,
        ]
        for state in ("new", "acme"):
            code, output, errors = await site.run_renewal(*arguments, "--state", str(tmp_path / state))
            assert (code, errors) == (0, "") and "New certificate" in output
        # As where a head had got a certificate of its own before its backup was restored.
        shutil.copytree(tmp_path / "new/accounts", tmp_path / "acme/accounts", dirs_exist_ok=True)
        assert len(list((tmp_path / "acme").rglob("regr.json"))) == 2
        renewal = tmp_path / "acme/renewal/carme.conf"
        noted = re.findall(r"^account = .*", renewal.read_text(), re.MULTILINE)
        renewal.write_text(f"renew_before_expiry = 99 years\n{renewal.read_text()}")
        code, output, errors = await site.run_renewal(*arguments)
        assert (code, errors) == (0, "") and "New certificate" in output
        assert re.findall(r"^account = .*", renewal.read_text(), re.MULTILINE) == noted


@needs_acme
async def test_where_the_server_does_not_reach_the_site_the_certificate_stays(
    site: Site, tmp_path: Path
) -> None:
    served = await site.served()
    async with real_acme.serving(tmp_path, free_port()) as acme:  # where nobody answers its challenges
        client = real_acme.make_client(tmp_path, acme.trust)
        arguments = [f"--certbot={client}", "--directory", acme.directory]
        code, output, errors = await site.run_renewal(*arguments)
    assert (code, output) == (1, "")
    assert f"gave no certificate for {NAME}: " in errors and f"must reach port 80 of {NAME}" in errors
    assert await site.served() == served


async def test_a_certificate_that_the_site_has_replaced_is_served(site: Site, tmp_path: Path) -> None:
    assert await site.run_renewal() == (0, "", "")
    wanted = site.replace()
    assert await site.served() != wanted
    code, output, _errors = await site.run_renewal()
    assert (code, output) == (0, f"nginx serves the new certificate in {tmp_path}/site.pem\n")
    assert await site.served() == wanted
    assert await site.run_renewal() == (0, "", "")


@pytest.mark.parametrize("broken", ["key", "text"])
async def test_what_nginx_does_not_take_is_named_and_the_one_of_before_stays(
    site: Site, tmp_path: Path, broken: str
) -> None:
    served, key = await site.served(), (tmp_path / "site-key.pem").read_bytes()
    site.replace()
    if broken == "key":
        (tmp_path / "site-key.pem").write_bytes(key)
        sentence = "Put a certificate and its own key into"
    else:
        (tmp_path / "site.pem").write_text("no certificate")
        sentence = "holds no certificate. Put it there in PEM"
    code, _output, errors = await site.run_renewal()
    assert code == 1 and sentence in errors
    assert await site.served() == served


async def test_a_program_that_did_not_hand_it_on_is_started_again(site: Site, tmp_path: Path) -> None:
    (tmp_path / "deploy.d").mkdir()
    hook = tmp_path / "deploy.d/mail"
    hook.write_text(
        f"#!/bin/sh\necho tried >> {tmp_path}/tried\n[ -e {tmp_path}/up ] || {{ echo away; exit 3; }}\n"
    )
    hook.chmod(0o755)
    (tmp_path / "deploy.d/README").write_text("no program")
    for _ in range(2):
        code, _output, errors = await site.run_renewal()
        assert code == 1 and f"{hook} ended with 3: away" in errors
    (tmp_path / "up").touch()
    assert (await site.run_renewal())[0] == 0
    assert await site.run_renewal() == (0, "", "")
    assert (tmp_path / "tried").read_text() == "tried\n" * 3
    # A standby has a copy of the folder, and others whom its programs serve.
    assert (await site.run_renewal("--own", str(tmp_path / "standby")))[0] == 0
    assert (tmp_path / "tried").read_text() == "tried\n" * 4


async def test_a_certificate_without_renewal_is_named_before_it_ends(site: Site, tmp_path: Path) -> None:
    real_nginx.make_certificate(tmp_path, NAME, days=13)
    code, output, errors = await site.run_renewal()
    assert code == 1 and "nginx serves the new certificate" in output
    assert errors.startswith(f"The certificate in {tmp_path}/site.pem ends within 14 days")


@pytest.mark.parametrize("default_server", [True, False])
def test_nginx_answers_for_all_names_of_the_certificate(tmp_path: Path, default_server: bool) -> None:
    names = {"reverse_proxy_host": NAME, "reverse_proxy_acme_names": ["www.example.org"]}
    names |= {"reverse_proxy_acme_directory": "https://a", "reverse_proxy_default_server": default_server}
    real_nginx.configure(tmp_path, 443, 8100, reverse_proxy_webroot=tmp_path, **names)
    both = f"{NAME} www.example.org"
    found = re.findall(r"server_name (.*);", (tmp_path / "carme.conf").read_text())
    assert found == ["_" if default_server else both, both]


async def test_a_client_that_is_missing_is_named(site: Site) -> None:
    code, _output, errors = await site.run_renewal(
        "--certbot=/nowhere/certbot", "--directory=https://x.example.org"
    )
    assert code == 1 and errors.startswith("/nowhere/certbot is not installed.")


async def test_other_requests_on_port_80_lead_to_https(site: Site, challenges: int) -> None:
    async with browser() as session:
        address = f"http://127.0.0.1:{challenges}"
        async with session.get(f"{address}/jobs?x=1", allow_redirects=False) as reply:
            assert (reply.status, reply.headers["Location"]) == (301, f"https://{NAME}/jobs?x=1")
        async with session.get(f"{address}/.well-known/acme-challenge/none", allow_redirects=False) as reply:
            assert reply.status == 404


def renewal(**variables: object) -> list[str]:
    """The command that the unit starts."""
    known = yaml.safe_load((real_nginx.ROLE / "vars/main.yml").read_text())
    names = {
        "reverse_proxy_certificate_file": "/c",
        "reverse_proxy_key_file": "/k",
        "reverse_proxy_port": 443,
    }
    names |= {"reverse_proxy_host": NAME, "reverse_proxy_webroot": "/w", "carme_has_two_heads": False}
    names |= {
        "reverse_proxy_acme_directory": "",
        "reverse_proxy_acme_email": "",
        "reverse_proxy_acme_names": [],
    }
    text = known["reverse_proxy_renewal"].strip().strip("{}")
    command: list[str] | None = Environment().compile_expression(text)(**(names | variables))
    assert command
    return command


def test_the_unit_renews_only_what_came_by_acme_and_of_two_heads_on_the_active_one() -> None:
    plain = ["/usr/libexec/carme/certificate", "--certificate", "/c", "--key", "/k", "--port", "443", NAME]
    assert renewal() == plain
    assert (
        renewal(carme_has_two_heads=True, reverse_proxy_acme_email="a@b", reverse_proxy_acme_names=["x"])
        == plain
    )
    acme = {"reverse_proxy_acme_directory": "https://a", "reverse_proxy_acme_names": ["www.example.org"]}
    assert renewal(**acme, carme_has_two_heads=True, reverse_proxy_acme_email="a@b")[7:] == [
        *["--directory", "https://a", "--webroot", "/w", "--email", "a@b"],
        *["--only-while", "carme-active.service", NAME, "www.example.org"],
    ]


async def test_a_standby_does_not_renew(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl = tmp_path / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\nexit 3\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}:{os.environ['PATH']}")
    arguments = ["--certbot=/nowhere", "--directory=https://x", "--only-while=carme-active.service"]
    assert await site.run_renewal(*arguments) == (0, "", "")
    assert (tmp_path / "asked").read_text() == "is-active --quiet carme-active.service\n"
