"""The demo's machines: podman containers that boot systemd, and the network between them."""

import hashlib
import io
import json
import os
import secrets
import tarfile
import time
from pathlib import Path

from . import cleanup
from .errors import DemoError
from .podman import LABEL, Container, Podman, ulimits
from .registries import Registries, host_resolvers
from .settings import Node, Places, Settings, write_atomically

SHARED = {"home": "/home", "scratch": "/scratch", "images": "/srv/carme/images"}
BOOT_SECONDS = 90
STOP_SECONDS = 40

# In this order: nothing may write to what has already gone.
HEAD_SERVICES = (
    ("nginx.service", "carme-*.service"),
    ("slurmctld.service", "slurmrestd.service"),
    ("slurmdbd.service",),
    ("mariadb.service", "redis-server.service"),
)

# Run on a node by its shell; each is one call instead of several.
_CONFIGURE = """
before=$(sha256sum /etc/carme-demo/node.json 2>/dev/null || true)
tar -x -C /
if [ "$before" = "$(sha256sum /etc/carme-demo/node.json)" ]; then
  # A stop of the demo that was killed leaves the host running and this service inactive.
  systemctl start carme-demo-node.service
else
  systemctl restart carme-demo-node.service
fi
"""
_BOOT_STATE = "echo $(systemctl is-system-running; systemctl is-active ssh.service)"
_MAKE_KEY = """
key=/root/.ssh/id_ed25519
if ! [ -s $key.pub ]; then
  rm -f $key
  mkdir -p -m 0700 /root/.ssh
  ssh-keygen -q -t ed25519 -N '' -C carme-demo -f $key
fi
cat $key.pub
"""
_TRUST_KEY = "tar -x -C /; cat /etc/ssh/ssh_host_ed25519_key.pub"


class Nodes:
    """Makes, starts, repairs and stops the machines of one demo."""

    def __init__(self, podman: Podman, places: Places, settings: Settings, registries: Registries) -> None:
        self.podman = podman
        self.places = places
        self.settings = settings
        self.registries = registries

    def present(self) -> dict[str, Container]:
        """Containers of this demo by node name."""
        prefix = f"{self.places.name}-"
        return {each.name.removeprefix(prefix): each for each in self.podman.containers()}

    def identity(self) -> str:
        """Changes whenever a node was made anew."""
        ids = sorted(container.id for container in self.present().values())
        return hashlib.sha256(" ".join(ids).encode()).hexdigest()

    # -- up ------------------------------------------------------------------------------------------------

    def repair(self) -> bool:
        """Clear away what a sudden end left behind.

        Returns:
            Whether there was anything to clear away.
        """
        try:
            present = self.present()
        except DemoError:
            # Podman cannot even read its state: first without what is only valid until a reboot.
            cleanup.sweep(self.podman, [], self.settings.subnet)
            try:
                self.present()
            except DemoError:
                cleanup.sweep(self.podman, [], self.settings.subnet)
                cleanup.remove_tree(self.places.storage)
                cleanup.remove_tree(self.places.networks)
                self.podman.configure()
            return True
        broken = [each for each in present.values() if each.claims_to_run and not each.is_alive]
        if not broken:
            return False
        for node, each in present.items():
            if each.is_alive:
                self._stop(node)
        cleanup.sweep(self.podman, list(present.values()), self.settings.subnet)
        return True

    def bring_up(self, image: str) -> list[str]:
        """Let every node of the settings run, with as little change as possible.

        Args:
            image: what new nodes are made from.

        Returns:
            Names of the nodes that were made anew.
        """
        self._make_folders()
        present = self.present()
        wanted = {node.name: node for node in self.settings.machines()}
        for name in sorted(set(present) - set(wanted)):
            self.remove(name)
        for name, node in wanted.items():
            if name in present and present[name].digest != self._digest(node):
                self.remove(name)
                del present[name]
        self._ensure_network()
        recreated = []
        for name, node in wanted.items():
            if name not in present:
                self._create(node, image)
                recreated.append(name)
            elif present[name].status == "paused":
                self.podman.run("unpause", self.podman.container(name), timeout=60)
        for node in wanted.values():
            if not self._start(node):
                recreated += self._start_anyway(node, image)
        for node in wanted.values():
            self._wait_for_boot(node)
        self._introduce()
        return recreated

    def _make_folders(self) -> None:
        for name in SHARED:
            folder = self.places.shared / name
            folder.mkdir(parents=True, exist_ok=True)
        (self.places.shared / "scratch").chmod(0o1777)
        for node in self.settings.machines():
            self._archives(node.name).mkdir(parents=True, exist_ok=True)
        for name in ("pip", "npm", "images"):
            (self.places.cache / name).mkdir(parents=True, exist_ok=True)

    def _archives(self, node: str) -> Path:
        return self.places.cache / "apt" / node

    def _network(self) -> str | None:
        """Name of the network in use."""
        files = list(self.places.networks.glob("*.json"))
        if len(files) != 1:
            return None
        try:
            known = json.loads(files[0].read_text())
            fits = known["subnets"][0]["subnet"] == self.settings.subnet
        except (ValueError, LookupError):
            return None
        return files[0].stem if fits else None

    def _ensure_network(self) -> str:
        """Have a network, and a new one whenever no node runs.

        Podman keeps its record of taken addresses by the network's name, in a place that all podmans share.
        After a sudden end it counts the nodes' own addresses as taken; under a new name all of them are free.
        """
        present = self.present()
        current = self._network()
        if current and any(each.is_alive for each in present.values()):
            return current
        name = f"{self.places.name}-{secrets.token_hex(3)}"
        description = network_description(name, self.places, self.settings, forwarder=not host_resolvers())
        write_atomically(self.places.networks / f"{name}.json", json.dumps(description), 0o644)
        addresses = {node.name: node.address for node in self.settings.machines()}
        for node, each in present.items():
            for old in each.networks:
                self.podman.run("network", "disconnect", "--force", old, each.name, check=False, timeout=60)
            self.podman.run("network", "connect", "--ip", addresses[node], name, each.name, timeout=60)
        for file in self.places.networks.glob("*.json"):
            if file.stem != name:
                file.unlink()
        return name

    def creation_options(self, node: Node, network: str) -> list[str]:
        """What a container is created with, less its image."""
        options = [
            *("--name", self.podman.container(node.name), "--hostname", node.name),
            *("--network", network, "--ip", node.address, "--no-hosts"),
            *("--privileged", "--systemd", "always", "--stop-timeout", str(STOP_SECONDS)),
            *ulimits(),
            *("--shm-size", f"{_half_of_memory()}m"),
        ]
        for name, value in self.podman.runtime.node_environment:
            options += ["--env", f"{name}={value}"]
        for name, target in SHARED.items():
            options += ["--volume", f"{self.places.shared / name}:{target}"]
        options += ["--volume", f"{self._archives(node.name)}:/var/cache/apt/archives"]
        options += ["--volume", f"{self.places.cache}/pip:/root/.cache/pip"]
        options += ["--volume", f"{self.places.cache}/npm:/root/.npm"]
        for folder in self.registries.pip_folders():
            options += ["--volume", f"{folder}:{folder}:ro"]
        if node.is_head:
            options += ["--volume", f"{self.places.cache}/images:/var/cache/carme"]
            options += ["--publish", f"127.0.0.1:{self.settings.port}:{self.settings.port}"]
        return options

    def _digest(self, node: Node) -> str:
        """Names what a container was created with; another digest means that the node is made anew.

        The network's name is left out: a container can change to another one.
        """
        options = json.dumps(self.creation_options(node, self.places.name))
        return hashlib.sha256(options.encode()).hexdigest()[:16]

    def _create(self, node: Node, image: str) -> None:
        self._seed_archives(node)
        label = f"{LABEL}={self._digest(node)}"
        options = self.creation_options(node, self._network() or self._ensure_network())
        command = ("create", "--label", label, *options, image, "/sbin/init")
        try:
            self.podman.run(*command, timeout=120)
        except DemoError:
            # A creation that was cut short holds the name.
            container = self.podman.container(node.name)
            self.podman.run("rm", "--force", container, check=False, timeout=120)
            self.podman.run("rm", "--force", "--storage", container, check=False, timeout=120)
            self.podman.run(*command, timeout=120)

    def _seed_archives(self, node: Node) -> None:
        """Give a new node the packages that others have fetched. Each keeps its own folder: apt locks it."""
        archives = self._archives(node.name)
        archives.mkdir(parents=True, exist_ok=True)
        for package in (self.places.cache / "apt").glob("*/*.deb"):
            target = archives / package.name
            if not target.exists():
                os.link(package, target)

    def _start(self, node: Node) -> bool:
        """Start a node and let it answer; False: this container cannot be brought to life again."""
        container = self.podman.container(node.name)
        try:
            present = self.present()[node.name]
            network = self._network()
            if network and network not in present.networks:
                self.podman.run("network", "connect", "--ip", node.address, network, container, timeout=60)
            if present.is_alive:
                if self._is_connected(node):
                    self._configure(node, running=True)
                    return True
                self._stop(node.name)
            self._configure(node, running=False)
            self.podman.run("start", container, timeout=120)
        except DemoError:
            return False
        return True

    def _start_anyway(self, node: Node, image: str) -> list[str]:
        """Start a node that refused: with its remains cleared away, and if that does not help, made anew."""
        present = self.present()
        for name in present:
            if present[name].is_alive:
                self._stop(name)
        cleanup.sweep(self.podman, list(present.values()), self.settings.subnet)
        self._ensure_network()
        recreated = []
        if not self._start(node):
            self.remove(node.name)
            self._create(node, image)
            recreated = [node.name]
        for each in self.settings.machines():
            if each.name in recreated or not self._start(each):
                self._configure(each, running=False)
                self.podman.run("start", self.podman.container(each.name), timeout=120)
        return recreated

    def _is_connected(self, node: Node) -> bool:
        """Whether the node answers and has its address."""
        command = ("ip", "-o", "-4", "address", "show", "to", node.address)
        try:
            return bool(self.podman.execute(node.name, *command, check=False, timeout=20).stdout.strip())
        except DemoError:
            return False

    def _configure(self, node: Node, *, running: bool) -> None:
        """Write the files that this demo and this host decide."""
        archive = files_archive(node, self.settings, self.registries)
        if running:
            self.podman.execute(node.name, "sh", "-ec", _CONFIGURE, data=archive, timeout=90)
        else:
            self.podman.run("cp", "-", f"{self.podman.container(node.name)}:/", data=archive, timeout=120)

    def _wait_for_boot(self, node: Node) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        state = "not running"
        while time.monotonic() < deadline:
            message = self.podman.execute(node.name, "sh", "-c", _BOOT_STATE, check=False, timeout=60)
            state, _, ssh = message.stdout.decode(errors="replace").strip().partition(" ")
            # "degraded" is a failed unit of Slurm or Carme: Ansible's business, not a failed boot.
            if ssh == "active" and state in ("running", "degraded", "starting"):
                return
            time.sleep(0.3)
        raise DemoError(
            f"Node {node.name} did not boot within {BOOT_SECONDS} seconds (systemd says {state!r}).",
            "See ./demo logs boot; ./demo reset creates the nodes again.",
        )

    def _introduce(self) -> None:
        """Let root on the head log in on every node, which all prove who they are."""
        public = self.podman.execute("head", "sh", "-ec", _MAKE_KEY, timeout=60).stdout
        archive = tar_archive({"root/.ssh/authorized_keys": (public, 0o600)})
        hosts = []
        for node in self.settings.machines():
            message = self.podman.execute(node.name, "sh", "-ec", _TRUST_KEY, data=archive, timeout=60)
            kind, value, *_ = message.stdout.decode().split()
            hosts.append(f"{node.name},{node.address} {kind} {value}\n")
        archive = tar_archive({"etc/ssh/ssh_known_hosts": ("".join(hosts).encode(), 0o644)})
        self.podman.execute("head", "tar", "-x", "-C", "/", data=archive, timeout=60)

    # -- down ----------------------------------------------------------------------------------------------

    def halt(self) -> None:
        """Stop everything in order, keep the disks, and leave no process, mount or interface behind."""
        self.repair()
        present = self.present()
        if "head" in present and present["head"].is_alive:
            if present["head"].status == "paused":
                self.podman.run("unpause", self.podman.container("head"), timeout=60)
            self._stop_services()
        for name in sorted(present, key=lambda each: each == "head"):
            if present[name].is_alive:
                self._stop(name)
        cleanup.sweep(self.podman, list(self.present().values()), self.settings.subnet)

    def _stop_services(self) -> None:
        try:
            self.podman.execute("head", "scancel", "--state=RUNNING", check=False, timeout=15)
            for services in HEAD_SERVICES:
                self.podman.execute("head", "systemctl", "stop", *services, check=False, timeout=60)
        except DemoError:
            return  # a head that does not answer is stopped as a whole

    def _stop(self, node: str) -> None:
        container = self.podman.container(node)
        if self.present()[node].status == "paused":
            self.podman.run("unpause", container, timeout=60)
        self.podman.run("stop", container, check=False, timeout=STOP_SECONDS + 60)

    def remove(self, node: str) -> None:
        """Remove a node with its disk."""
        self.podman.run("rm", "--force", "--time", "10", self.podman.container(node), timeout=120)

    def destroy(self) -> None:
        """Remove all nodes with their disks and the shared folders; the image and the caches stay."""
        self.repair()
        for name in self.present():
            self.remove(name)
        cleanup.sweep(self.podman, [], self.settings.subnet)
        cleanup.remove_tree(self.places.shared)
        cleanup.remove_tree(self.places.networks)
        self.places.deployed.unlink(missing_ok=True)


def network_description(
    name: str, places: Places, settings: Settings, *, forwarder: bool
) -> dict[str, object]:
    """A network as netavark reads it. Its bridge carries our name, so that no other podman comes to use it.

    Args:
        forwarder: let podman forward name queries; one more thing that can die, so only where the host's own
            resolver answers on the loopback alone.
    """
    return {
        "name": name,
        "id": hashlib.sha256(name.encode()).hexdigest(),
        "driver": "bridge",
        "network_interface": places.bridge,
        "created": "2026-01-01T00:00:00Z",
        "subnets": [{"subnet": settings.subnet, "gateway": settings.gateway}],
        "ipv6_enabled": False,
        "internal": False,
        "dns_enabled": forwarder,
        "ipam_options": {"driver": "host-local"},
    }


def hosts_file(settings: Settings) -> str:
    """Text of /etc/hosts: every node knows every node, and itself, by its address on the nodes' network."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{node.address} {node.name}" for node in settings.machines()]
    return "\n".join(lines) + "\n"


def files_archive(node: Node, settings: Settings, registries: Registries) -> bytes:
    """The files of a node that follow from settings and host."""
    bundle_digest = hashlib.sha256(registries.authorities.encode()).hexdigest()
    facts = {"name": node.name, "gpus": node.gpus, "authorities": bundle_digest}
    return tar_archive(
        {
            "etc/hosts": (hosts_file(settings).encode(), 0o644),
            "etc/pip.conf": (registries.pip_conf().encode(), 0o644),
            "etc/environment": (registries.environment_file().encode(), 0o644),
            "etc/apt/apt.conf.d/50demo": (registries.apt_conf().encode(), 0o644),
            "etc/carme-demo/host-ca.pem": (registries.authorities.encode(), 0o644),
            "etc/carme-demo/node.json": (json.dumps(facts).encode(), 0o644),
            "root/.npmrc": (registries.npmrc().encode(), 0o600),
        }
    )


def tar_archive(files: dict[str, tuple[bytes, int]]) -> bytes:
    """A tar archive of root's files.

    Args:
        files: path below / and content with mode.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, (content, mode) in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            member.mode = mode
            member.mtime = int(time.time())
            archive.addfile(member, io.BytesIO(content))
        end = archive.offset + 2 * tarfile.BLOCKSIZE
    # Without tarfile's padding: `podman cp` fails where its reader ends before all of that is written.
    return buffer.getvalue()[:end]


def _half_of_memory() -> int:
    """MiB, in steps of 256, of what a real machine's /dev/shm would be: half of the memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(256, total // 2 // 2**28 * 256)
