"""Signing in at an outside OpenID Connect provider with a browser.

The provider is django-allauth's, in another portal with a database and keys of its own, in a process of its
own. It asks for the password, and for consent as a stranger's provider does.
"""

import contextlib
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from django.conf import settings as django_settings
from django.db import connection
from playwright.sync_api import Page, expect

from carme.config.settings import OidcSettings
from carme_webui.accounts.models import User
from patience import HANG

from ..conftest import PASSWORD
from ..fake_broker import FakeBroker
from .conftest import keep, log_out

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "secret-of-the-portal"
PROVIDER = """
import sys

import django
import uvicorn

django.setup()
from allauth.idp.oidc.models import Client
from django.conf import settings
from django.core.management import call_command
from carme_webui.accounts.models import User

back, secret, password, name, listening = sys.argv[1:]
call_command("migrate", verbosity=0)
User.objects.create_user(name, password=password)
client = Client(
    id="portal", name="Carme", type=Client.Type.CONFIDENTIAL, redirect_uris=back, scopes="openid\\nprofile",
    grant_types=Client.GrantType.AUTHORIZATION_CODE.value, response_types=Client.ResponseType.CODE.value,
)
client.set_secret(secret)
client.save()
settings.SECURE_HSTS_SECONDS = 0
# A portal's forms lead nowhere else; those of a provider do.
settings.MIDDLEWARE.remove("carme_webui.security.content_security_policy")
uvicorn.run("carme_webui.asgi:application", fd=int(listening), lifespan="off")
"""
CONFIGURATION = """
[site]
name = "Example University"
url = "{issuer}"
[slurm]
cluster = "none"
[broker]
socket = "{there}/none.sock"
[images]
directory = "{there}"
[portal]
database = "sqlite:///{there}/state/portal.sqlite3"
redis = "memory://"
state_directory = "{there}/state"
[secrets]
directory = "{there}/secrets"
"""


@pytest.fixture
def university(address: str, settings, folder: Path, tmp_path: Path) -> Iterator[str]:
    """A provider that knows somebody with the name of the user who runs the tests; the portal trusts it."""
    site = django_settings.SITE
    name = pwd.getpwuid(os.getuid()).pw_name
    there = tmp_path / "university"
    shutil.copytree(folder / "secrets", there / "secrets")
    shutil.copytree(folder / "state/static", there / "state/static")
    if connection.vendor == "sqlite":  # making all tables anew takes seconds
        with contextlib.closing(sqlite3.connect(there / "state/portal.sqlite3")) as copied:
            connection.ensure_connection()
            connection.connection.backup(copied)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        issuer = f"http://127.0.0.1:{listening.getsockname()[1]}"
        (there / "carme.toml").write_text(CONFIGURATION.format(issuer=issuer, there=there))
        (folder / "secrets/oidc-provider-secret").write_text(SECRET)
        reported = OidcSettings(issuer=issuer, client_id="portal", name="Example University")
        changed = site.site.model_copy(update={"url": address})
        trusted = site.broker.model_copy(update={"minimum_uid": 0})
        settings.SITE = site.model_copy(update={"oidc": reported, "site": changed, "broker": trusted})
        words = [f"{address}/accounts/outside/back/", SECRET, PASSWORD, name, str(listening.fileno())]
        environment = os.environ | {
            "CARME_CONFIG": str(there / "carme.toml"),
            "DJANGO_SETTINGS_MODULE": "carme_webui.settings",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with (there / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", PROVIDER, *words],
                env=environment, pass_fds=[listening.fileno()], stdout=log, stderr=log,
            )  # fmt: skip
        try:
            # It listens already; the answer comes once it is made.
            while process.poll() is None:
                try:
                    httpx.get(f"{issuer}/.well-known/openid-configuration", timeout=HANG).raise_for_status()
                    break
                except httpx.TransportError:
                    time.sleep(0.2)
            assert process.poll() is None, (there / "log").read_text()
            yield name
        finally:
            process.terminate()
            process.wait(HANG)


def test_a_user_of_the_provider_signs_in_at_the_portal(
    page: Page, broker: FakeBroker, university: str
) -> None:
    page.goto("/accounts/login/?next=/profile/")
    keep(page, "journey-outside-1")
    page.get_by_role("link", name="Sign in with Example University").click()
    page.get_by_label("User name").fill(university)
    page.get_by_label("Password").fill(PASSWORD)
    keep(page, "journey-outside-2-there")
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.get_by_role("button", name="Authorize").click()
    expect(page.get_by_role("heading", name="Profile")).to_be_visible()
    expect(page.get_by_role("link", name=university)).to_be_visible()
    keep(page, "journey-outside-3-here")
    user = User.objects.get(username=university)
    assert not user.has_usable_password()

    # Anyone who has a password here is somebody else, perhaps.
    log_out(page)
    user.set_password(PASSWORD)
    user.save()
    page.get_by_role("link", name="Sign in with Example University").click()
    page.get_by_role("button", name="Authorize").click()
    expect(page.get_by_text("signs in with its password")).to_be_visible()
