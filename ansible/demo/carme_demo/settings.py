"""What can be chosen about a demo, what follows from it, and where everything lies."""

import dataclasses
import ipaddress
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DemoError

DEFAULT_NAME = "carme"
MAXIMUM_NODES = 16
MAXIMUM_GPUS = 16
#: Every demo has these: what is offered first, and what the main job trains with.
IMAGES = ("base", "torch")
USERS: tuple[dict[str, Any], ...] = (
    {"name": "user1", "uid": 2001, "admin": False},
    {"name": "user2", "uid": 2002, "admin": False},
    {"name": "admin", "uid": 2003, "admin": True},
)


@dataclass(frozen=True)
class Node:
    """One machine of the demo: its host name, its address, and how many GPUs it pretends to have."""

    name: str
    address: str
    gpus: int

    @property
    def is_head(self) -> bool:
        return self.name == "head"


@dataclass(frozen=True)
class Settings:
    """What a user may choose.

    Args:
        nodes: compute nodes beside the head.
        gpus: pretended GPUs per compute node.
        port: port on 127.0.0.1 under which the portal answers.
        subnet: the nodes' network, IPv4, a /24 or larger.
        images: the job images that are built; those of every demo are added.
        monitoring: Prometheus and its alerts on the head. Once there it stays.
        horovod: Horovod in the images of PyTorch and TensorFlow. Once there it stays.
    """

    nodes: int = 2
    gpus: int = 4
    port: int = 8443
    subnet: str = "10.77.0.0/24"
    images: tuple[str, ...] = IMAGES
    monitoring: bool = False
    horovod: bool = False

    def __post_init__(self) -> None:
        _within("--nodes", self.nodes, 1, MAXIMUM_NODES)
        _within("--gpus", self.gpus, 0, MAXIMUM_GPUS)
        _within("--port", self.port, 1, 65535)
        try:
            network = ipaddress.IPv4Network(self.subnet)
        except ValueError:
            raise DemoError(
                f"--subnet is {self.subnet!r}, but must be an IPv4 network such as 10.77.0.0/24.",
                "Give the network's first address and its prefix length.",
            ) from None
        if network.prefixlen > 24:
            raise DemoError(
                f"--subnet {self.subnet} is too small: the demo needs a /24 or larger.",
                "Give a network such as 10.77.0.0/24.",
            )
        for name in self.images:
            if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
                raise DemoError(
                    f"--images names {name!r}, which cannot be an image's name.",
                    "Give names of containers/images/NAME.def separated by commas: base,torch,vscode.",
                )
        # Frozen, and a list when it comes from the file.
        object.__setattr__(self, "images", tuple(dict.fromkeys([*IMAGES, *self.images])))

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    @property
    def gateway(self) -> str:
        return str(ipaddress.IPv4Network(self.subnet)[1])

    def machines(self) -> list[Node]:
        """The head (address 2) and the compute nodes n1, n2 ... (addresses 11, 12 ...)."""
        network = ipaddress.IPv4Network(self.subnet)
        computes = [Node(f"n{i}", str(network[10 + i]), self.gpus) for i in range(1, self.nodes + 1)]
        return [Node("head", str(network[2]), 0), *computes]


def _within(option: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise DemoError(
            f"{option} is {value!r}, but must be a whole number from {low} to {high}.",
            f"Give {option} a number in that range.",
        )


@dataclass(frozen=True)
class Places:
    """Where a demo keeps its things. All of it is below two folders that carry the demo's name."""

    name: str = DEFAULT_NAME
    state_base: Path = Path("/var/lib")
    run_base: Path = Path("/run")

    def __post_init__(self) -> None:
        # The bridge is called NAME0 and Linux allows 15 characters.
        if not re.fullmatch(r"[a-z][a-z0-9]{0,11}", self.name):
            raise DemoError(
                f"--name is {self.name!r}, but must be 1 to 12 small letters and digits, a letter first.",
                "Choose a name such as carme or second.",
            )

    @property
    def state(self) -> Path:
        return self.state_base / f"{self.name}-demo"

    @property
    def run(self) -> Path:
        return self.run_base / f"{self.name}-demo"

    @property
    def storage(self) -> Path:
        return self.state / "storage"

    @property
    def networks(self) -> Path:
        return self.state / "networks"

    @property
    def cache(self) -> Path:
        return self.state / "cache"

    @property
    def shared(self) -> Path:
        return self.state / "shared"

    @property
    def log(self) -> Path:
        return self.state / "log"

    @property
    def settings(self) -> Path:
        return self.state / "settings.json"

    @property
    def passwords(self) -> Path:
        return self.state / "passwords.json"

    @property
    def deployed(self) -> Path:
        """Holds the digest of what Ansible last deployed with success."""
        return self.state / "deployed"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def bridge(self) -> str:
        return f"{self.name}0"


def load(places: Places) -> Settings | None:
    """The settings of an existing demo, or None where there is none."""
    try:
        raw = json.loads(places.settings.read_text())
        return Settings(**raw)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError):
        raise DemoError(
            f"{places.settings} cannot be read as the demo's settings.",
            f"Delete it and run ./demo again with the options you want{_name_option(places)}.",
        ) from None


def _name_option(places: Places) -> str:
    return "" if places.name == DEFAULT_NAME else f" and --name {places.name}"


def save(places: Places, settings: Settings) -> None:
    """Record the settings."""
    write_atomically(places.settings, json.dumps(dataclasses.asdict(settings), indent=2) + "\n", 0o644)


def passwords(places: Places) -> dict[str, str]:
    """The demo accounts' passwords: random, made at the first call, readable by root alone."""
    known: dict[str, str] = {}
    if places.passwords.exists():
        try:
            known = json.loads(places.passwords.read_text())
        except ValueError:
            known = {}  # a torn file: new passwords, which the next deployment sets
    wanted = {user["name"]: known.get(user["name"]) or secrets.token_urlsafe(12) for user in USERS}
    if wanted != known:
        write_atomically(places.passwords, json.dumps(wanted, indent=2) + "\n", 0o600)
    return wanted


def write_atomically(path: Path, text: str, mode: int) -> None:
    """Write a file so that a reader, or a power cut, meets the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "w") as stream:
        os.fchmod(handle, mode)
        stream.write(text)
        stream.flush()
        os.fsync(handle)
    draft.replace(path)
