"""The demo's own podman: its storage, its state and its settings are apart from the user's."""

import json
import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import commands
from .settings import Places, write_atomically

CGROUP_ROOT = Path("/sys/fs/cgroup")
LABEL = "carme.demo"


@dataclass(frozen=True)
class Runtime:
    """How containers run here: OCI runtime, who manages cgroups, and what a node's systemd needs to know."""

    name: str
    cgroup_manager: str
    node_environment: tuple[tuple[str, str], ...] = ()


def choose_runtime(unified: bool, systemd: bool) -> Runtime:
    """crun on hosts with cgroup v2 alone; runc on older and mixed ones, where crun refuses.

    Args:
        unified: the host has cgroup v2 and nothing else.
        systemd: the host was booted with systemd.
    """
    manager = "systemd" if systemd else "cgroupfs"
    if unified:
        return Runtime("crun", manager)
    # systemd 257 refuses cgroup v1 unless an option says that this is meant.
    return Runtime("runc", manager, (("SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE", "1"),))


def host_runtime() -> Runtime:
    """The runtime for the host this runs on."""
    return choose_runtime(
        unified=(CGROUP_ROOT / "cgroup.controllers").exists(), systemd=Path("/run/systemd/system").is_dir()
    )


def ulimits() -> list[str]:
    """Options that keep podman from raising limits above the host's own, which needs a capability."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
    most_files = 524288 if files == resource.RLIM_INFINITY else min(files, 524288)
    # Where limits cannot be raised, podman holds its own processes to the limit of files as well.
    most_processes = most_files if processes == resource.RLIM_INFINITY else min(processes, most_files)
    return [
        "--ulimit",
        f"nofile={min(1024, most_files)}:{most_files}",
        "--ulimit",
        f"nproc={most_processes}:{most_processes}",
    ]


@dataclass(frozen=True)
class Container:
    """What podman believes of a container, and whether its process is really there."""

    id: str
    name: str
    status: str
    pid: int
    conmon_pid: int
    created: str
    netns: str
    digest: str
    networks: tuple[str, ...]

    @property
    def claims_to_run(self) -> bool:
        return self.status in ("running", "paused", "stopping")

    @property
    def is_alive(self) -> bool:
        return self.claims_to_run and process_exists(self.pid) and process_exists(self.conmon_pid)


def process_exists(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    if pid <= 0:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


class Podman:
    """Podman with a storage and a configuration of its own, so that the user's own stays untouched."""

    def __init__(self, places: Places, runtime: Runtime) -> None:
        self.places = places
        self.runtime = runtime
        self._environment = {
            "CONTAINERS_CONF": str(places.state / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(places.state / "storage.conf"),
            "TMPDIR": str(places.state / "tmp"),
            # Podman 5 would say at each call that version 1 of control groups is on its way out.
            "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",
        }

    def configure(self) -> None:
        """Write podman's configuration files."""
        for folder in (self.places.state / "tmp", self.places.networks, self.places.run):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            self.places.state / "containers.conf", engine_configuration(self.places, self.runtime), 0o644
        )
        write_atomically(self.places.state / "storage.conf", storage_configuration(self.places), 0o644)

    def arguments(self, *arguments: str) -> list[str]:
        return ["podman", "--runtime", self.runtime.name, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return dict(self._environment)

    def run(self, *arguments: str, **options: Any) -> Any:
        """Run podman; options are those of ``commands.run``."""
        return commands.run(self.arguments(*arguments), environment=self._environment, **options)

    def text(self, *arguments: str, **options: Any) -> str:
        """Podman's output as text."""
        return self.run(*arguments, **options).stdout.decode(errors="replace").rstrip("\n")

    def containers(self) -> list[Container]:
        """All containers of this demo."""
        if not (self.places.storage / "libpod").exists():
            return []
        ids = self.text("ps", "--all", "--no-trunc", "--quiet", timeout=60).split()
        if not ids:
            return []
        return [
            _container(entry) for entry in json.loads(self.text("container", "inspect", *ids, timeout=60))
        ]

    def has_image(self, image: str) -> bool:
        return self.run("image", "exists", image, check=False, timeout=60).returncode == 0

    def container(self, node: str) -> str:
        """The name of the container that is this node."""
        return f"{self.places.name}-{node}"

    def execute(self, node: str, *arguments: str, **options: Any) -> Any:
        """Run a program as root on a node; with ``data`` it gets that as its standard input."""
        interactive = ["--interactive"] if options.get("data") is not None else []
        return self.run("exec", *interactive, self.container(node), *arguments, **options)

    def inside(self, node: str, arguments: Iterable[str], *, terminal: bool) -> list[str]:
        """The command line that runs a program on a node, on the caller's own terminal or pipes.

        Give it ``environment`` beside the caller's own.
        """
        options = ["--interactive", *(["--tty"] if terminal else [])]
        return self.arguments("exec", *options, self.container(node), *arguments)

    def replace_process(self, arguments: list[str]) -> None:
        """Become this command (for an interactive shell)."""
        os.execvpe(arguments[0], arguments, {**os.environ, **self._environment})


def _container(entry: dict[str, Any]) -> Container:
    state = entry.get("State", {})
    return Container(
        id=entry["Id"],
        name=entry["Name"],
        status=state.get("Status", "unknown"),
        pid=state.get("Pid", 0),
        conmon_pid=state.get("ConmonPid", 0),
        created=entry.get("Created", ""),
        netns=entry.get("NetworkSettings", {}).get("SandboxKey", ""),
        networks=tuple(entry.get("NetworkSettings", {}).get("Networks") or ()),
        digest=(entry.get("Config", {}).get("Labels") or {}).get(LABEL, ""),
    )


def engine_configuration(places: Places, runtime: Runtime) -> str:
    """Text of containers.conf.

    Locks are files: podman's usual locks in shared memory would be shared with the user's own podman.
    """
    return f"""[containers]
log_driver = "k8s-file"
log_size_max = 10000000
# A host has no such limit; podman's own (2048) is 120 jobs on a node, and then slurmd ends.
pids_limit = 0

[engine]
runtime = "{runtime.name}"
cgroup_manager = "{runtime.cgroup_manager}"
lock_type = "file"
events_logger = "file"
static_dir = "{places.storage}/libpod"
tmp_dir = "{places.run}/libpod"
volume_path = "{places.storage}/volumes"

[network]
network_backend = "netavark"
network_config_dir = "{places.networks}"
"""


def storage_configuration(places: Places) -> str:
    """Text of storage.conf."""
    return f"""[storage]
driver = "overlay"
graphroot = "{places.storage}"
runroot = "{places.run}/storage"
"""
