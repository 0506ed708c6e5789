"""The hub's configuration from carme.toml, and what the package shows."""

import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from free_ports import free_port
from sqlalchemy import create_engine, text
from tornado import web

import carme_spawner
from carme.config import Settings
from carme.errors import ConfigError
from carme.jobs import SessionOptions
from carme_spawner import waiting
from carme_spawner.hub import main
from carme_spawner.hub_config import PortalAuthenticator, hub_config, server_limit

from .conftest import Site


def test_the_hub_signs_in_at_the_portal(settings: Settings) -> None:
    oauth = hub_config(settings).GenericOAuthenticator
    assert oauth.authorize_url == "https://carme.example.org/identity/o/authorize"
    assert oauth.oauth_callback_url == "https://carme.example.org/jupyter/hub/oauth_callback"
    assert oauth.token_url == "http://127.0.0.1:8100/identity/o/api/token"
    assert oauth.username_claim == "preferred_username"
    assert oauth.auto_login and not oauth.enable_auth_state


def test_users_are_named_as_unix_names_them(settings: Settings) -> None:
    authenticator = PortalAuthenticator(config=hub_config(settings))
    for name in ("anna.maria", "x@lab.org", "Anna", "a+b", "7days"):
        assert authenticator.normalize_username(name) == name and authenticator.validate_username(name)
    assert not authenticator.validate_username("a/b")


async def test_a_portal_that_is_away_is_named_on_the_page_of_a_sign_in(settings: Settings) -> None:
    authenticator = PortalAuthenticator(config=hub_config(settings))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(web.HTTPError, match="The portal does not answer just now") as caught:
            await authenticator.httpfetch(address, request_timeout=0.1)
    assert caught.value.status_code == 503
    with pytest.raises(web.HTTPError, match="The portal does not answer just now") as caught:
        await authenticator.httpfetch(f"http://127.0.0.1:{free_port()}/")
    # The page's own address is worth nothing a second time.
    address = "https://carme.example.org/jupyter/hub/login"
    assert str(caught.value).endswith(f"Sign in again: {address})")
    assert f'<a href="{address}">Sign in again</a>' in caught.value.jupyterhub_html_message  # pyright: ignore


def test_servers_and_routes_outlive_the_hub(settings: Settings) -> None:
    config = hub_config(settings)
    assert config.JupyterHub.cleanup_servers is False
    assert config.JupyterHub.cleanup_proxy is False
    assert config.ConfigurableHTTPProxy.should_start is False
    assert config.ConfigurableHTTPProxy.auth_token == "proxy-auth-token-value"


@pytest.mark.parametrize("minutes", [1, 10_000])
def test_a_start_may_wait_in_the_queue_and_then_copy_its_data(settings: Settings, minutes: int) -> None:
    staging = settings.staging.model_copy(update={"minutes": minutes})
    changed = settings.model_copy(update={"staging": staging})
    stage = [{"source": "/data/images", "target": "ram"}]
    options = SessionOptions.model_validate({"image": "torch", "minutes": 60, "stage": stage})
    copies = waiting.longest_start(options, changed)
    timeout = timedelta(seconds=hub_config(changed).CarmeSpawner.start_timeout)
    assert timeout > waiting.LONGEST_WAIT + copies


@pytest.mark.parametrize("name", ["listen", "proxy_api_url"])
def test_addresses_without_tls_are_refused(settings: Settings, name: str) -> None:
    hub = settings.hub.model_copy(update={name: "http://10.77.0.2:8081"})
    with pytest.raises(ConfigError, match=rf"'{name}' in \[hub\] must begin with https://"):
        hub_config(settings.model_copy(update={"hub": hub}))


async def test_a_commit_does_not_wait_for_the_disk(site: Site) -> None:
    assert site.hub
    assert site.hub.db.execute(text("PRAGMA journal_mode")).scalar() == "wal"
    assert site.hub.db.execute(text("PRAGMA synchronous")).scalar() == 1


def test_a_missing_secret_is_named(settings: Settings) -> None:
    (settings.secrets.directory / "hub-cookie-secret").unlink()
    with pytest.raises(ConfigError, match="hub-cookie-secret"):
        hub_config(settings)


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "carme.toml"
    monkeypatch.setattr("sys.argv", ["carme-hub", "--config", str(missing)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert str(caught.value.code).startswith("carme-hub: ") and str(missing) in str(caught.value.code)


def test_the_package_exports_its_public_names() -> None:
    assert carme_spawner.__all__ == ["CarmeHub", "CarmeSpawner"]
    for name in carme_spawner.__all__:
        assert getattr(carme_spawner, name)


def test_a_key_of_the_wrong_form_is_named(settings: Settings) -> None:
    (settings.secrets.directory / "hub-crypt-key").write_text("secret word\n")
    with pytest.raises(ConfigError, match=r"hub-crypt-key.*openssl rand") as caught:
        hub_config(settings)
    assert "secret word" not in str(caught.value)


async def test_pages_that_name_no_user_have_a_limit_of_servers_too(site: Site) -> None:
    await site.start()
    [ada] = [user for user in (site.hub.users.values() if site.hub else ()) if user.name == "ada"]
    home = SimpleNamespace(path_args=[], current_user=ada)
    named = SimpleNamespace(path_args=["ada"], find_user=lambda name: ada if name == "ada" else None)
    assert server_limit(home) == server_limit(named) > 0  # type: ignore[arg-type]


def test_a_server_of_postgresql_is_reached_by_the_installed_driver(settings: Settings) -> None:
    """SQLAlchemy takes psycopg2 where the address names no driver, and only psycopg is installed."""
    (settings.secrets.directory / "hub-database-password").write_text("p@ss\n")
    hub = settings.hub.model_copy(update={"database": "postgresql://carme-hub@db.example.org/hub"})
    config = hub_config(settings.model_copy(update={"hub": hub}))
    assert config.JupyterHub.db_url == "postgresql+psycopg://carme-hub:p%40ss@db.example.org/hub"
    assert create_engine(config.JupyterHub.db_url).url.password == "p@ss"
