"""A portal with its own configuration, a JupyterHub and a broker that listen for real.

Its database is a file of SQLite, or on the PostgreSQL server that CARME_TEST_DATABASE names.
"""

import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import django
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from real_redis import Redis

from patience import HANG

HUB_TOKEN = "token-of-the-portal"
CLIENT_SECRET = "secret-of-the-hub"
PASSWORD = "correct horse battery"


FOLDER = Path(tempfile.mkdtemp(prefix="carme-webui-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
REDIS = Redis(FOLDER)


def _write_site(folder: Path) -> None:
    """Write a site's configuration and secrets."""
    for name in ("secrets", "images", "state"):
        (folder / name).mkdir()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "secrets/oidc-signing-key").write_bytes(pem)
    (folder / "secrets/portal-secret-key").write_text("0" * 64)
    (folder / "secrets/oidc-client-secret").write_text(CLIENT_SECRET)
    (folder / "secrets/hub-api-token").write_text(HUB_TOKEN)
    for name in ("torch", "keras"):
        (folder / f"images/{name}.sif").write_text("")
        manifest = {"name": name, "title": f"{name.title()} <lab>", "packages": {"numpy": "2.1", name: "1.0"}}
        (folder / f"images/{name}.json").write_text(json.dumps(manifest))
    (folder / "carme.toml").write_text(
        f"""
[site]
name = "Test & site"
url = "https://carme.example:8443"
[slurm]
cluster = "test"
default_partition = "gpu"
[broker]
socket = "{folder}/broker.sock"
audit_log = "{folder}/audit.jsonl"
state_directory = "{folder}/state"
[images]
directory = "{folder}/images"
[sessions]
maximum_minutes = 600
[hub]
proxy_url = "http://127.0.0.1:1"
[portal]
listen = "127.0.0.1:8100"
database = "{os.environ.get("CARME_TEST_DATABASE") or f"sqlite:///{folder}/state/portal.sqlite3"}"
redis = "{REDIS.address}"
state_directory = "{folder}/state"
[secrets]
directory = "{folder}/secrets"
"""
    )


def _configure(folder: Path) -> None:
    """Load Django with that configuration, leaving the environment of other tests as it is."""
    before = os.environ.get("CARME_CONFIG")
    os.environ["CARME_CONFIG"] = str(folder / "carme.toml")
    os.environ["DJANGO_SETTINGS_MODULE"] = "carme_webui.settings"
    from django.conf import settings

    if "sqlite3" in settings.DATABASES["default"]["ENGINE"]:
        # A file, so that the tests meet the same locking as a site.
        settings.DATABASES["default"]["TEST"] = {"NAME": str(folder / "state/test.sqlite3")}
    else:
        # A connection that a pool keeps would keep the tests' database from being removed.
        settings.DATABASES["default"]["OPTIONS"].pop("pool")
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    django.setup()
    import carme_webui.celery  # noqa: F401  # which sets the variable where it is missing

    # Processes that pytest starts would read a site that is not theirs.
    del os.environ["DJANGO_SETTINGS_MODULE"]
    if before is None:
        del os.environ["CARME_CONFIG"]
    else:
        os.environ["CARME_CONFIG"] = before


_write_site(FOLDER)
_configure(FOLDER)

from django.conf import settings as django_settings  # noqa: E402
from django.core.cache import caches  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.core.management.color import Style  # noqa: E402
from django.core.management.commands import flush  # noqa: E402
from django.db.backends.base.base import BaseDatabaseWrapper  # noqa: E402
from django.middleware.csrf import CSRF_SECRET_LENGTH  # noqa: E402
from django.test import Client  # noqa: E402
from django.utils import timezone, translation  # noqa: E402
from django.utils.crypto import get_random_string  # noqa: E402
from whitenoise.base import WhiteNoise  # noqa: E402

from carme.jobs import Cluster, Node, Partition  # noqa: E402
from carme_webui import notifier as notifier_module  # noqa: E402
from carme_webui.accounts import directory, login  # noqa: E402
from carme_webui.accounts.models import User  # noqa: E402
from carme_webui.api import limits  # noqa: E402
from carme_webui.api.models import SCOPES, Token  # noqa: E402
from carme_webui.cluster import broker_silence, cluster_cache  # noqa: E402
from carme_webui.notifier import notifier  # noqa: E402
from carme_webui.sessions.lifecycle import due_sessions, tend_named  # noqa: E402

from .fake_broker import NOW, FakeBroker  # noqa: E402
from .fake_hub import FakeHub  # noqa: E402


def text(answer: Any) -> str:
    """The page that the test client got."""
    return answer.content.decode()


def words(answer: Any) -> str:
    """The text of that page, without its markup, with single spaces."""
    return " ".join(re.sub(r"<[^>]+>", " ", text(answer)).split())


@pytest.fixture(scope="session", autouse=True)
def _redis() -> Iterator[None]:
    """Redis, where there is one; the portal's pages do without. On a busy machine its answers may be late."""
    notifier_module.PATIENCE = HANG
    notifier.__init__(REDIS.address)
    if REDIS.is_installed:
        REDIS.start()
    yield
    REDIS.kill()


#: Events reach other processes by Redis alone.
needs_redis = pytest.mark.skipif(not REDIS.is_installed, reason="there is no Redis; ./test fetches it")


@pytest.fixture(scope="session", autouse=True)
def _static() -> Iterator[None]:
    """The static files, among which each client of a test would search anew."""
    call_command("collectstatic", interactive=False, verbosity=0)
    search = WhiteNoise.update_files_dictionary
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def remember(self: WhiteNoise, root: str, prefix: str) -> None:
        if (root, prefix) not in found:
            before, self.files = self.files, {}
            search(self, root, prefix)
            found[root, prefix], self.files = self.files, before
        self.files.update(found[root, prefix])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WhiteNoise, "update_files_dictionary", remember)
        yield


@pytest.fixture(scope="session", autouse=True)
def _lasting_types() -> Iterator[None]:
    """Content types and permissions outlast the tests that commit, and nothing here changes them.

    Django empties all tables after such a test, and makes these rows anew: that takes longer than many tests.
    """
    lasting = {"django_content_type", "auth_permission"}

    def statements(style: Style, connection: BaseDatabaseWrapper, **options: bool) -> list[str]:
        tables = connection.introspection.django_table_names(only_existing=True, include_views=False)
        emptied = [table for table in tables if table not in lasting]
        return connection.ops.sql_flush(style, emptied, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flush, "sql_flush", statements)
        patched.setattr(flush, "emit_post_migrate_signal", lambda *_: None)
        yield


@pytest.fixture(autouse=True)
def _fresh_cache(db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The tests' broker changes between two queries.
    monkeypatch.setattr(cluster_cache, "seconds", 0.0)
    monkeypatch.setattr("carme_webui.cluster.ACCESS_SECONDS", 0.0)
    # On a busy machine its answers may be late.
    monkeypatch.setattr(broker_silence, "patience", HANG)
    monkeypatch.setattr(broker_silence, "_silent_until", None)
    # The tests change the database as well, without notifying anybody.
    monkeypatch.setattr("carme_webui.caches.SHARED_SECONDS", 0.0)
    monkeypatch.setattr("carme_webui.bookings.table.SECONDS", 0.0)
    for alias in caches:
        caches[alias].clear()
    if REDIS.is_installed:
        REDIS.flush()
    limits._counter.cache_clear()
    yield
    translation.deactivate()  # a page may have been German


@pytest.fixture
def caching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache all answers until something changes."""
    if not REDIS.is_installed:
        pytest.skip("there is no Redis; ./test fetches it")
    monkeypatch.setattr("carme_webui.caches.SHARED_SECONDS", 3600.0)
    monkeypatch.setattr("carme_webui.bookings.table.SECONDS", 3600.0)
    monkeypatch.setattr(cluster_cache, "seconds", 3600.0)


@pytest.fixture
def folder() -> Path:
    """The site's folder."""
    return FOLDER


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """A broker on the site's socket; the home that a test makes for its users ends with it."""
    with FakeBroker(FOLDER / "broker.sock") as running:
        yield running
        for home in (running.home, running.homes):
            shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def hub(settings) -> Iterator[FakeHub]:
    """A JupyterHub; the site knows its address."""
    with FakeHub(HUB_TOKEN) as running:
        site = django_settings.SITE
        settings.SITE = site.model_copy(
            update={"hub": site.hub.model_copy(update={"proxy_url": running.url})}
        )
        yield running


def tend_all() -> None:
    """What `carme-portal sync` does, in the caller's thread, which sees the test's database."""
    for name in due_sessions():
        tend_named(name)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish the background work of a page before its answer."""
    monkeypatch.setattr("carme_webui.sessions.actions.tend_soon", tend_all)
    for module in (login, directory):
        monkeypatch.setattr(module, "run_soon", lambda task, *arguments: task.apply(arguments))


@pytest.fixture
def resume_sync(monkeypatch: pytest.MonkeyPatch):
    """Stop the sync of sessions; the returned function starts it again."""
    monkeypatch.setattr("carme_webui.sessions.actions.tend_soon", lambda: None)
    return lambda: monkeypatch.setattr("carme_webui.sessions.actions.tend_soon", tend_all)


def _account(name: str) -> User:
    return User.objects.create_user(name, password=PASSWORD)


@pytest.fixture
def alice(db: None) -> User:
    return _account("alice")


@pytest.fixture
def bob(db: None) -> User:
    return _account("bob")


@pytest.fixture
def admin(db: None) -> User:
    return User.objects.create_user("root1", password=PASSWORD, is_staff=True)


class _Dates(type):
    def __instancecheck__(cls, found: object) -> bool:
        return isinstance(found, datetime)


class _Still(datetime, metaclass=_Dates):
    moment: datetime

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return cls.moment.astimezone(tz)


@pytest.fixture
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the portal's clock, so that the times on pages do not depend on a busy machine."""
    monkeypatch.setattr(_Still, "moment", timezone.now(), raising=False)
    # Below `timezone.now`, which is the default of fields, too.
    monkeypatch.setattr(timezone, "datetime", _Still)


class Browser(Client):
    """A browser that comes through the reverse proxy and checks CSRF tokens as a real one must."""

    def __init__(self) -> None:
        super().__init__(
            enforce_csrf_checks=True,
            headers={"host": "carme.example:8443", "x-forwarded-proto": "https"},
        )

    def send(self, page: str, url: str, **fields: object):
        """Open `page`, then send a form to `url` with the page's token."""
        return self.send_with(self.token(page), url, **fields)

    def token(self, page: str) -> str:
        """The token in the forms of a page."""
        content = self.get(page).content.decode()
        return content.split('name="csrfmiddlewaretoken" value="')[1].split('"')[0]

    def own_token(self) -> str:
        """A token as a page would give it, without one: for steps before what a test is about."""
        token = get_random_string(CSRF_SECRET_LENGTH)
        self.cookies[django_settings.CSRF_COOKIE_NAME] = token
        return token

    def send_with(self, token: str, url: str, **fields: object):
        """Send a form."""
        return self.post(
            url,
            {"csrfmiddlewaretoken": token, **fields},
            headers={"origin": "https://carme.example:8443"},
        )


@pytest.fixture
def anonymous(db: None) -> Browser:
    return Browser()


@pytest.fixture
def browser(alice: User) -> Browser:
    """Alice's browser, signed in."""
    found = Browser()
    found.force_login(alice)
    return found


@pytest.fixture
def root(admin: User) -> Browser:
    """An admin's browser."""
    found = Browser()
    found.force_login(admin)
    return found


class Program(Client):
    """A program that asks the API with a token."""

    def __init__(self, secret: str) -> None:
        headers = {"host": "carme.example:8443", "x-forwarded-proto": "https"}
        if secret:
            headers["authorization"] = f"Bearer {secret}"
        super().__init__(enforce_csrf_checks=True, headers=headers)

    def ask(self, method: str, path: str, body: object = None, **query: object):
        """The answer to a request below /api/v1/."""
        url = f"/api/v1/{path}" + (f"?{urlencode(query)}" if query else "")
        data = json.dumps(body) if body is not None else ""
        return self.generic(method.upper(), url, data, content_type="application/json")


def program_of(user: User, *scopes: str) -> Program:
    """A program with a token of this user; without named scopes it has all of them."""
    expires = timezone.now() + timedelta(days=1)
    return Program(Token.make(user, "test", list(scopes or SCOPES), expires)[1])


@pytest.fixture
def program(alice: User) -> Program:
    """A program of Alice's."""
    return program_of(alice)


@pytest.fixture
def bobs_browser(bob: User) -> Browser:
    """Bob's browser, signed in."""
    found = Browser()
    found.force_login(bob)
    return found


@pytest.fixture
def rules(settings, broker: FakeBroker):
    """Bookings are allowed, on two nodes; called with values it changes the rules."""
    broker.cluster = Cluster(
        taken=NOW,
        partitions=[Partition(name="gpu", default=True, node_names=["n1", "n2"])],
        nodes=[Node(name=name, cpus=16, memory_mb=64_000, gpus={"a100": 4}) for name in ("n1", "n2")],
    )

    def change(**values: Any) -> None:
        site = django_settings.SITE
        policy = {"enabled": True, "share_percent": 100, "notice_minutes": 0} | values
        settings.SITE = site.model_copy(
            update={
                "bookings": site.bookings.model_copy(update=policy),
                "site": site.site.model_copy(update={"time_zone": "Europe/Berlin"}),
            }
        )

    change()
    return change
