"""A site in one folder: its configuration, secrets, homes and images, for a sandbox on this computer."""

import json
import os
import pwd
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from carme.errors import ConfigError

__all__ = ["HOST_IMAGE", "Addresses", "Places", "make_site"]

#: The image that stands for this computer itself.
HOST_IMAGE = "local"

_CONFIGURATION = """\
# Written by ./dev. A site on one computer, without Slurm, containers and root.
[site]
name = "Carme sandbox"
url = "http://{host}:{front}"

[slurm]
cluster = "sandbox"
default_partition = "gpu"
default_account = "users"
poll_seconds = 0.3

[broker]
socket = "{folder}/broker.sock"
services = ["{user}"]
observers = []
audit_log = "{folder}/audit.jsonl"
state_directory = "{folder}/broker"

[images]
directory = "{folder}/images"
default = "{image}"

[sessions]
default_minutes = 60

[bookings]
enabled = true
share_percent = 100

[staging]
cache = "{folder}/cache"
scratch = "{folder}/scratch"
datasets = "{folder}/datasets"

[hub]
listen = "https://{host}:{hub}"
proxy_url = "http://{host}:{front}"
proxy_api_url = "https://{host}:{proxy_api}"
database = "sqlite:///{folder}/hub/hub.sqlite"
state_directory = "{folder}/hub"

[portal]
listen = "{host}:{portal}"
database = "sqlite:///{folder}/portal/portal.sqlite3"
redis = "{redis}"
state_directory = "{folder}/portal"
history_days = 760
processes = 1

[secrets]
directory = "{folder}/secrets"
"""


@dataclass(frozen=True)
class Places:
    """Where things lie in a sandbox's folder."""

    folder: Path

    @property
    def configuration(self) -> Path:
        return self.folder / "carme.toml"

    @property
    def homes(self) -> Path:
        return self.folder / "homes"

    @property
    def slurm(self) -> Path:
        return self.folder / "slurm"

    @property
    def redis(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def programs(self) -> Path:
        """Programs that jobs find by their names."""
        return self.folder / "bin"


@dataclass(frozen=True)
class Addresses:
    """The ports of a sandbox, all on the loopback: what browsers use, and what the services use among them.

    Attributes:
        front: Where browsers go.
        portal: Where the portal listens; the same as `front` where nothing stands before it.
        hub, proxy_api: JupyterHub's, and its proxy's.
        redis: Whether there is a Redis.
    """

    front: int
    portal: int
    hub: int
    proxy_api: int
    redis: bool


def make_site(folder: Path, addresses: Addresses, users: list[str]) -> Places:
    """Write a site's files; secrets and homes that are there already stay.

    Args:
        folder: An absolute path, short enough for sockets.
        addresses: Where its services listen.
        users: Who gets a home.

    Raises:
        ConfigError: The folder holds other things.
    """
    places = Places(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not places.configuration.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} holds other things than a sandbox.",
            "Name an empty folder, or one that ./dev created.",
        )
    # The broker serves anyone who reaches its socket, in the name of each user.
    folder.chmod(0o700)
    folders = (
        "homes",
        "images",
        "secrets",
        "portal",
        "hub",
        "broker",
        "slurm",
        "cache",
        "scratch",
        "datasets",
    )
    for name in (*folders, "bin", *(f"homes/{user}" for user in users)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    places.configuration.write_text(
        _CONFIGURATION.format(
            folder=folder,
            host="127.0.0.1",
            user=pwd.getpwuid(os.getuid()).pw_name,
            image=HOST_IMAGE,
            front=addresses.front,
            portal=addresses.portal,
            hub=addresses.hub,
            proxy_api=addresses.proxy_api,
            redis=f"redis+socket://{places.redis}" if addresses.redis else "memory://",
        )
    )
    _write_secrets(folder / "secrets")
    _write_image(folder / "images")
    return places


def _write_secrets(folder: Path) -> None:
    folder.chmod(0o700)
    names = ("portal-secret-key", "hub-cookie-secret", "hub-crypt-key", "hub-api-token")
    for name in (*names, "oidc-client-secret", "proxy-auth-token"):
        if not (folder / name).exists():
            (folder / name).write_text(secrets.token_hex(32))
    if not (folder / "oidc-signing-key").exists():
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (folder / "oidc-signing-key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, none))


def _write_image(folder: Path) -> None:
    """An image whose file is empty: the sandbox runs its jobs without a container."""
    (folder / f"{HOST_IMAGE}.sif").touch()
    manifest = {
        "name": HOST_IMAGE,
        "title": "This computer",
        "description": "No container: what is installed on this computer.",
        "entry_points": {"lab": "JupyterLab"},
    }
    (folder / f"{HOST_IMAGE}.json").write_text(json.dumps(manifest))
