"""JupyterHub's configuration, made from `carme.toml`."""

import re
from html import escape
from ipaddress import ip_address
from sqlite3 import Connection
from typing import Any
from urllib.parse import urlsplit

from jupyterhub.handlers import BaseHandler
from oauthenticator.generic import GenericOAuthenticator
from tornado import web
from tornado.httpclient import HTTPClientError, HTTPRequest
from traitlets.config import Config

from carme.accounts import is_account_name
from carme.config import Settings
from carme.errors import ConfigError
from carme_spawner import handlers, waiting
from carme_spawner.proxy import PatientProxy
from carme_spawner.spawner import CarmeSpawner

handlers.install()

#: Servers of one user that may exist at the same time.
SERVERS_PER_USER = 20
#: Seconds after which the API answers "is starting" (202) instead of waiting on. What the broker refuses, it
#: refuses in less, so that the answer to the start itself says why.
ANSWER_AFTER = 1


class PortalAuthenticator(GenericOAuthenticator):
    """Signs in at the portal, which names users as Unix does: JupyterHub would make their names small."""

    def normalize_username(self, username: str) -> str:
        """The name as it is."""
        return username

    def validate_username(self, username: str) -> bool:
        """Whether an account may have this name (`carme.accounts`)."""
        return is_account_name(username)

    async def fetch(self, req: HTTPRequest, *args: Any, **kwargs: Any) -> Any:
        """Ask the portal.

        Raises:
            HTTPError: It does not answer, or is away; the page that the user sees says so.
            HTTPClientError: It refuses.
        """
        try:
            return await super().fetch(req, *args, **kwargs)
        except (HTTPClientError, OSError) as error:
            if isinstance(error, HTTPClientError) and error.code < 500:
                raise
            # Not by loading the page again: the hub forgot the attempt that its address belongs to.
            address = self.oauth_callback_url.removesuffix("oauth_callback") + "login"
            why = "The portal does not answer just now, so you are not signed in."
            failure = web.HTTPError(503, f"{why} Sign in again: {address}")
            link = f'<a href="{escape(address)}">Sign in again</a>'
            failure.jupyterhub_html_message = f"{why} {link}."  # pyright: ignore  JupyterHub's error page has it
            raise failure from error


def hub_config(settings: Settings) -> Config:
    """The whole configuration of a site's hub.

    Raises:
        ConfigError: A secret is missing or is not what it has to be.
    """
    c = Config()
    for name in ("listen", "proxy_api_url"):
        if not getattr(settings.hub, name).startswith("https://"):
            raise ConfigError(
                f"'{name}' in [hub] must begin with https://, and is '{getattr(settings.hub, name)}'.",
                "Correct it: hub, proxy and the servers of sessions speak TLS with each other.",
            )
    _set_addresses(c, settings)
    _set_proxy(c, settings)
    _set_sessions(c, settings)
    _set_login(c, settings)
    _allow_portal(c, settings)
    return c


def _set_addresses(c: Config, settings: Settings) -> None:
    """Where the hub listens, what it is called, and where its tables and keys are."""
    hub, path, site = settings.hub, settings.hub.base_path, settings.site.url
    c.JupyterHub.bind_url = hub.proxy_url + path
    c.JupyterHub.hub_bind_url = hub.listen
    c.JupyterHub.hub_connect_url = hub.listen
    c.JupyterHub.internal_ssl = True
    c.JupyterHub.internal_certs_location = str(hub.state_directory / "certificates")
    c.JupyterHub.trusted_alt_names = [alternative_name(hub.listen)]
    c.JupyterHub.public_url = site + path
    c.JupyterHub.db_url = with_driver(settings.database("hub"))
    if hub.database.startswith("sqlite"):
        c.JupyterHub.db_kwargs = {"pool_events": [(commit_quickly, "connect")]}
    c.JupyterHub.cookie_secret = key(settings, "hub-cookie-secret")
    c.CryptKeeper.keys = [key(settings, "hub-crypt-key")]
    # The portal is the front page; the hub's own pages that offer a start lead there (`handlers.py`).
    c.JupyterHub.default_url = site + "/"


def _set_proxy(c: Config, settings: Settings) -> None:
    """How the hub gets along with a proxy that it does not start."""
    # The proxy is a service of its own, so routes and servers live on while the hub restarts.
    c.JupyterHub.cleanup_servers = False
    c.JupyterHub.cleanup_proxy = False
    # Routes that a restarted proxy has lost are put back this often (seconds).
    c.JupyterHub.last_activity_interval = 1
    c.JupyterHub.proxy_class = PatientProxy
    c.ConfigurableHTTPProxy.should_start = False
    c.ConfigurableHTTPProxy.api_url = settings.hub.proxy_api_url
    c.ConfigurableHTTPProxy.auth_token = settings.secret("proxy-auth-token")


def _set_sessions(c: Config, settings: Settings) -> None:
    """Sessions are named servers, which the broker starts."""
    c.JupyterHub.spawner_class = CarmeSpawner
    c.CarmeSpawner.settings = settings
    # The broker reports at once if a job dies, and `until_ready` ends one that waits for too long.
    c.CarmeSpawner.start_timeout = int(waiting.start_timeout(settings).total_seconds())
    c.JupyterHub.allow_named_servers = True
    c.JupyterHub.named_server_limit_per_user = server_limit
    # Starts that wait in Slurm's queue count as starting, and Slurm itself limits who gets what: no limit
    # here, else a full cluster would lock everybody out. Failed jobs are no reason to end the hub either.
    c.JupyterHub.concurrent_spawn_limit = 0
    c.JupyterHub.active_server_limit = 0
    c.JupyterHub.tornado_settings = {
        "slow_spawn_timeout": ANSWER_AFTER,
        "slow_stop_timeout": ANSWER_AFTER,
        # Of the hub and, through it, of all servers. The prefix __Host- would need the path "/", and with it
        # every server would be sent the cookies of the hub and of all others.
        "cookie_options": {"samesite": "Lax"},
    }
    c.Spawner.consecutive_failure_limit = 0


def _set_login(c: Config, settings: Settings) -> None:
    """Users sign in at the portal."""
    portal, path, site = f"http://{settings.portal.listen}", settings.hub.base_path, settings.site.url
    c.JupyterHub.authenticator_class = PortalAuthenticator
    c.GenericOAuthenticator.client_id = "jupyterhub"
    c.GenericOAuthenticator.client_secret = settings.secret("oidc-client-secret")
    c.GenericOAuthenticator.oauth_callback_url = f"{site}{path}hub/oauth_callback"
    c.GenericOAuthenticator.authorize_url = f"{site}/identity/o/authorize"
    c.GenericOAuthenticator.token_url = f"{portal}/identity/o/api/token"
    c.GenericOAuthenticator.userdata_url = f"{portal}/identity/o/api/userinfo"
    c.GenericOAuthenticator.scope = ["openid", "profile"]
    c.GenericOAuthenticator.username_claim = "preferred_username"
    c.GenericOAuthenticator.login_service = settings.site.name
    c.GenericOAuthenticator.auto_login = True
    c.GenericOAuthenticator.enable_auth_state = False
    # The portal decides who may sign in.
    c.GenericOAuthenticator.allow_all = True


def _allow_portal(c: Config, settings: Settings) -> None:
    """The portal starts and stops sessions for their owners."""
    # The token comes from a generator and needs no slow hash, which would delay every request of the portal.
    c.JupyterHub.trust_user_provided_tokens = True
    c.JupyterHub.services = [{"name": "carme-portal", "api_token": settings.secret("hub-api-token")}]
    c.JupyterHub.load_roles = [
        # There is no narrower scope than admin:users for adding users.
        {"name": "carme-portal", "services": ["carme-portal"], "scopes": ["admin:users", "servers"]}
    ]


def with_driver(address: str) -> str:
    """A database's address as SQLAlchemy takes it: without a driver's name it wants an older one."""
    return re.sub("^postgresql:", "postgresql+psycopg:", address)


def commit_quickly(connection: Connection, _: object) -> None:
    """Let SQLite not wait for the disk at each of the many commits of a start.

    What is committed survives the end of the hub. The end of the whole host may take the last moments: the
    server of a session that is lost so is refused by the hub, and ends.
    """
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def alternative_name(url: str) -> str:
    """What the certificate of a service at `url` must be good for, in certipy's words."""
    host = urlsplit(url).hostname or ""
    try:
        return f"IP:{ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def key(settings: Settings, name: str) -> bytes:
    """A secret of 32 bytes, which its file holds in hexadecimal digits."""
    text = settings.secret(name)
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 32:
        raise ConfigError(
            f"The secret {name!r} must be 64 hexadecimal digits and is not.",
            f"Write the output of 'openssl rand -hex 32' into {settings.secrets.directory / name}.",
        )
    return value


def server_limit(handler: BaseHandler) -> int:
    """How many named servers a user may have: those that have ended do not count."""
    # The hub's own page of administrators names no user: it is about who looks at it.
    user = handler.find_user(handler.path_args[0]) if handler.path_args else handler.current_user
    records = user.orm_spawners if user else {}
    ended = sum(bool(name) and record.server is None for name, record in records.items())
    return SERVERS_PER_USER + ended
