"""Hosts of a site that is not the demo: podman hosts with an administrator, ssh and sudo."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from carme_demo import cleanup, image, registries
from carme_demo.errors import DemoError
from carme_demo.host import install_packages
from carme_demo.nodes import files_archive, network_description, tar_archive
from carme_demo.podman import Podman, host_runtime, ulimits
from carme_demo.registries import host_resolvers
from carme_demo.settings import Node, Places, Settings, write_atomically
from host_commands import run_on

from .package_index import PAGES, PackageIndex

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "carme/sites"
ANSIBLE = Path(__file__).resolve().parents[2] / "ansible"
ADMIN = "admin"
BOOT_SECONDS = 180
CALLBACKS = Path(__file__).with_name("ansible_callbacks")
#: The demo's caches: packages, and layers of images, each named by a hash of what it is made of.
DEMO_CACHE = Path("/var/lib/carme-demo/cache")
DEMO_IMAGES = DEMO_CACHE / "images/images"
#: Below the builder's cache: layers of images, and what pip has built for them.
LAYERS = ("debian-*", "*_libraries-*", "pip/*/*")
#: What the hosts' packages are worth: their disks are taken away with them.
UNSAFE = "force-unsafe-io\n"
#: What the hosts of any site have taken from the package index.
INDEX = CACHE / "index"
#: The port of the site's mirror of the package index, on the hosts' gateway.
INDEX_PORT = 18_080
PYPI = "https://pypi.org/simple"
#: Ends what hangs: one run of the whole playbook on a busy machine.
PLAYBOOK_SECONDS = 4 * 3600


@dataclass(frozen=True)
class SiteDescription:
    """What a site's hosts are.

    Args:
        name: of its podman objects: small letters and digits, at most 12.
        domain: what the hosts' full names end with.
        subnet: their network, a /24 that neither the demo nor another site has.
        system: what they boot.
        hosts: their short names, addresses within the network and numbers of simulated GPUs, the head first.
        shared: folders that are the same files on all hosts.
    """

    name: str
    domain: str
    subnet: str
    system: image.System
    hosts: tuple[tuple[str, int, int], ...]
    shared: Mapping[str, str] = field(default_factory=dict)

    def machines(self) -> list[Node]:
        base = self.subnet.rpartition(".")[0]
        return [Node(name, f"{base}.{number}", gpus) for name, number, gpus in self.hosts]

    def full_name(self, host: str) -> str:
        return f"{host}.{self.domain}"


class SiteHosts:
    """A site's hosts: made from nothing, reached as root by podman and as the administrator by ssh."""

    def __init__(self, description: SiteDescription) -> None:
        self.description = description
        self.places = Places(description.name, CACHE, Path("/run"))
        self.podman = Podman(self.places, host_runtime())
        self.settings = Settings(subnet=description.subnet)
        self.machines = {machine.name: machine for machine in description.machines()}
        self._folder = self.places.state / "administrator"
        self._layers = self.places.cache / "layers"
        self._builders_cache = self.places.cache / "images/images"
        self._index: PackageIndex | None = None

    # -- making and taking away ------------------------------------------------------------------------------

    def make(self) -> None:
        """Make all hosts anew, with nothing on them but the system, the administrator and shared folders."""
        install_packages(self.podman.runtime, self.places)
        self.podman.configure()
        self.destroy()
        self._seed_packages()
        self._seed_layers()
        found = registries.of_host()
        name = image.prepare(self.podman, self.places, found, self.description.system)
        found = self._with_own_index(found)
        network = f"{self.places.name}-net"
        description = network_description(network, self.places, self.settings, forwarder=not host_resolvers())
        write_atomically(self.places.networks / f"{network}.json", json.dumps(description), 0o644)
        for machine in self.machines.values():
            options = self._creation_options(machine, network, found.pip_folders())
            self.podman.run("create", *options, name, "/sbin/init", timeout=300)
            files = files_archive(machine, self.settings, found)
            container = f"{self.podman.container(machine.name)}:/"
            self.podman.run("cp", "-", container, data=files, timeout=120)
            self.podman.run("cp", "-", container, data=tar_archive(self._site_files()), timeout=120)
            self.podman.run("start", self.podman.container(machine.name), timeout=300)
        for name in self.machines:
            wait_until(f"{name} has booted", lambda name=name: self._has_booted(name), BOOT_SECONDS)
        self._make_administrator()

    def destroy(self) -> None:
        """Take hosts, network and shared folders away; image and caches stay."""
        if self._index:
            self._index.close()
            self._index = None
        try:
            present = self.podman.containers()
        except DemoError:
            present = []
        for container in present:
            self.podman.run("rm", "--force", "--time", "5", container.id, check=False, timeout=120)
        if (self.places.storage / "libpod").exists():
            # Of a host whose creation was cut short podman may show nothing, and yet hold its name.
            for name in self.machines:
                left = self.podman.container(name)
                self.podman.run("rm", "--force", "--ignore", "--time", "5", left, check=False, timeout=120)
                self.podman.run("rm", "--force", "--storage", left, check=False, timeout=120)
        cleanup.sweep(self.podman, present, self.description.subnet)
        cleanup.remove_tree(self.places.shared)
        for file in self.places.networks.glob("*.json"):
            file.unlink()

    def _with_own_index(self, found: registries.Registries) -> registries.Registries:
        """Have the hosts ask the site's own mirror of the package index, where no proxy is between them."""
        if found.proxies:
            return found
        address = self.settings.gateway
        options = dict(found.pip)
        trusted = f"{options.get('trusted-host', '')}\n{address}".strip()
        # The first to ask for a large file waits until all of it is here.
        options.setdefault("timeout", "180")
        options |= {"index-url": f"http://{address}:{INDEX_PORT}{PAGES}", "trusted-host": trusted}
        return replace(found, pip=tuple(options.items()))

    def serve_packages(self) -> None:
        """Serve the mirror from now on; the hosts are there, and with them the address."""
        if self._index is None and not registries.of_host().proxies:
            upstream = dict(registries.of_host().pip).get("index-url", PYPI)
            self._index = PackageIndex(INDEX, upstream, self.settings.gateway, INDEX_PORT)

    def _seed_packages(self) -> None:
        """Give each host the packages that others have fetched. Each has its own folder: apt locks it."""
        for machine in self.machines.values():
            link_packages(self.places.cache / "apt" / machine.name, CACHE, DEMO_CACHE)

    def _seed_layers(self) -> None:
        """Give the site's builder of images the layers of earlier sites; images themselves it makes anew."""
        for known in (self._layers, DEMO_IMAGES):
            link_layers(known, self._builders_cache)

    def save_layers(self) -> None:
        """Save the layers that the site has built from its removal, and forget older ones."""
        link_layers(self._builders_cache, self._layers)
        current = layers_of(self._builders_cache)
        names = {layer.name.rpartition("-")[0] for layer in current}
        for old in layers_of(self._layers) - current:
            if old.name.rpartition("-")[0] in names:
                (self._layers / old).unlink()

    def _creation_options(self, machine: Node, network: str, pip_folders: list[Path]) -> list[str]:
        options = [
            *("--name", self.podman.container(machine.name), "--hostname", machine.name),
            *("--network", network, "--ip", machine.address, "--no-hosts"),
            *("--privileged", "--systemd", "always", "--stop-timeout", "10", "--shm-size", "2g"),
            *ulimits(),
        ]
        for name, value in self.podman.runtime.node_environment:
            options += ["--env", f"{name}={value}"]
        volumes = {str(folder): f"{folder}:ro" for folder in pip_folders}
        for name, target in self.description.shared.items():
            volumes[str(self.places.shared / name)] = target
        # What was fetched or built once serves hosts that are made anew.
        volumes[str(self.places.cache / "apt" / machine.name)] = "/var/cache/apt/archives"
        volumes[str(self.places.cache / "pip")] = "/root/.cache/pip"
        volumes[str(self.places.cache / "npm")] = "/root/.npm"
        if machine.name == self.description.hosts[0][0]:
            volumes[str(self.places.cache / "images")] = "/var/cache/carme"
        for source, target in volumes.items():
            Path(source).mkdir(parents=True, exist_ok=True)
            options += ["--volume", f"{source}:{target}"]
        return options

    def _site_files(self) -> dict[str, tuple[bytes, int]]:
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        for machine in self.machines.values():
            full = self.description.full_name(machine.name)
            lines.append(f"{machine.address} {full} {machine.name}")
        return {
            "etc/hosts": ("\n".join(lines).encode() + b"\n", 0o644),
            "etc/dpkg/dpkg.cfg.d/unsafe-io": (UNSAFE.encode(), 0o644),
        }

    def _has_booted(self, host: str) -> bool:
        state = self.run(host, "systemctl", "is-system-running", check=False).stdout.strip()
        ssh = self.run(host, "systemctl", "is-active", "ssh.service", check=False).stdout.strip()
        return ssh == "active" and state in ("running", "degraded")

    def _make_administrator(self) -> None:
        """An ordinary account with a key for ssh, and with a password for sudo."""
        self._folder.mkdir(parents=True, exist_ok=True)
        key, password = self._folder / "id_ed25519", self._folder / "become-password"
        for file in (key, key.with_suffix(".pub")):
            file.unlink(missing_ok=True)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", ADMIN, "-f", str(key)]
        subprocess.run(command, check=True, timeout=60)
        secret = os.urandom(12).hex()
        write_atomically(password, secret + "\n", 0o600)
        known, config = [], []
        for machine in self.machines.values():
            name, full = machine.name, self.description.full_name(machine.name)
            self.run(name, "useradd", "--create-home", "--groups", "sudo", "--shell", "/bin/bash", ADMIN)
            self.run(name, "chpasswd", data=f"{ADMIN}:{secret}\n")
            self.run(name, "install", "-d", "-m", "0700", f"--owner={ADMIN}", f"/home/{ADMIN}/.ssh")
            public = key.with_suffix(".pub").read_text()
            self.run(name, "tee", f"/home/{ADMIN}/.ssh/authorized_keys", data=public)
            host_key = self.run(name, "cat", "/etc/ssh/ssh_host_ed25519_key.pub").stdout
            known.append(f"{full},{machine.address} {host_key}")
            config.append(f"Host {full}\n  HostName {machine.address}\n  HostKeyAlias {full}\n")
        write_atomically(self._folder / "known_hosts", "".join(known), 0o644)
        # The machine that runs Ansible has no name service that knows the site.
        config.append(
            f"Host *\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self._folder / 'known_hosts'}\n"
        )
        write_atomically(self._folder / "ssh_config", "".join(config), 0o644)

    # -- using them ------------------------------------------------------------------------------------------

    def run(
        self,
        host: str,
        *command: str,
        user: str | None = None,
        data: str | None = None,
        check: bool = True,
        timeout: float = 600,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host, as root or, in their home, as `user`."""
        words = list(command)
        if user:
            words = ["runuser", "--login", user, "--command", shlex.join(words)]
        inside, environment = self.podman.inside(host, words, terminal=False), self.podman.environment
        return run_on(host, inside, environment=environment, data=data, check=check, timeout=timeout)

    def put(self, host: str, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Write root's files: path without its leading slash, content and mode."""
        self.podman.execute(host, "tar", "-x", "-C", "/", data=tar_archive(dict(files)), timeout=120)

    def everywhere(self, script: str) -> None:
        """Run root's shell script on all hosts at the same time."""
        words = ["sh", "-ec", script]
        self.at_once(dict.fromkeys(self.machines, words))

    def at_once(self, commands: Mapping[str, list[str]]) -> None:
        """Run one command of root's per host, all at the same time."""
        logs = {name: self.places.log / f"{name}.log" for name in commands}
        self.places.log.mkdir(parents=True, exist_ok=True)
        begun = {}
        for name, words in commands.items():
            with logs[name].open("a") as log:
                begun[name] = subprocess.Popen(
                    self.podman.inside(name, words, terminal=False),
                    env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **self.podman.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        ended = {name: process.wait(timeout=3600) for name, process in begun.items()}
        failed = {name: code for name, code in ended.items() if code}
        tails = "\n".join(f"{name}: {logs[name].read_text()[-2000:]}" for name in failed)
        assert not failed, f"{failed}\n{tails}"

    def ansible(self, *arguments: str | Path, log: str) -> subprocess.CompletedProcess[str]:
        """Run `ansible-playbook` on this machine, as the administrator's: by ssh, with sudo's password.

        Args:
            log: the name of the file below the site's folder of logs that takes the output.
        """
        self.serve_packages()
        self.places.log.mkdir(parents=True, exist_ok=True)
        times = self.times_of(log)
        times.unlink(missing_ok=True)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")
        } | {
            "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
            "ANSIBLE_SSH_ARGS": f"-F {self._folder}/ssh_config -o ControlMaster=auto -o ControlPersist=60s",
            "ANSIBLE_CALLBACK_PLUGINS": str(CALLBACKS),
            "ANSIBLE_CALLBACKS_ENABLED": "task_times",
            "CARME_TASK_TIMES": str(times),
            "ANSIBLE_NOCOLOR": "1",
            "PYTHONUNBUFFERED": "1",
            "LC_ALL": "C.UTF-8",
        }
        command = ["ansible-playbook", *map(str, arguments)]
        command += ["--become-password-file", str(self._folder / "become-password")]
        path = self.places.log / f"{log}.log"
        with path.open("w") as output:
            code = run_group(command, PLAYBOOK_SECONDS, cwd=ANSIBLE, env=environment, output=output)
        return subprocess.CompletedProcess(command, code, path.read_text(), "")

    def times_of(self, log: str) -> Path:
        """The file with the times of the tasks of a playbook, by the name of its log."""
        return self.places.log / f"{log}.times.json"

    def checksums(self, host: str, paths: list[str]) -> dict[str, str]:
        """What files below paths are: owner, mode, and the digest of the content or the link's target."""
        script = (
            'find "$@" \\( -type f -printf "%p|%u:%g:%m|" -exec sha256sum {} \\; \\) '
            '-o \\( -type l -printf "%p|%u:%g|%l\\n" \\) 2>/dev/null || true'
        )
        shown = self.run(host, "sh", "-c", script, "sh", *paths).stdout
        found = {}
        for line in shown.splitlines():
            path, owner, content = line.split("|", 2)
            found[path] = f"{owner} {content.split()[0]}"
        assert found, f"{host} has no file below {', '.join(paths)}"
        return found

    def left_of_services(self, host: str) -> list[str]:
        """Carme's accounts and units that a host has, and what lies in its folders of data."""
        script = (
            "getent passwd | grep '^carme-'; getent group carme;"
            "systemctl list-unit-files --no-legend 'carme-*' | grep -v '^carme-demo-';"
            "find /srv/carme /var/cache/carme -mindepth 1 2>/dev/null | grep -v '^/srv/carme/images';"
            "find /srv/carme/images -name '*.sif' 2>/dev/null; true"
        )
        return self.run(host, "sh", "-c", script).stdout.splitlines()

    def named(self, host: str, pattern: str) -> set[str]:
        """Files and folders of a host's own disk with such a name, without what is in such a folder."""
        hidden = ["-path", "/proc"]
        for folder in ("/sys", "/tmp", "/var/tmp"):
            hidden += ["-o", "-path", folder]
        words = [
            "find",
            "/",
            "-xdev",
            "(",
            *hidden,
            ")",
            "-prune",
            "-o",
            "-name",
            pattern,
            "-print",
            "-prune",
        ]
        return set(self.run(host, *words).stdout.splitlines())


def run_group(
    command: list[str], timeout: float, *, cwd: Path, env: Mapping[str, str], output: IO[str]
) -> int:
    """Run a program and return its exit code; all that it has started ends with it where we are interrupted.

    Ansible's workers would try to reach hosts that are no more.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    try:
        return process.wait(timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def layers_of(folder: Path) -> set[Path]:
    """The files of layers of images in a builder's cache, seen from there."""
    return {file.relative_to(folder) for pattern in LAYERS for file in folder.glob(pattern) if file.is_file()}


def link_packages(target: Path, *caches: Path) -> None:
    """Link Debian's packages that hosts of any site, or of the demo, have fetched into one host's folder.

    Their names have their versions; apt compares each with the digest that it expects.

    Args:
        target: the folder of one host.
        caches: of the demo, or the folder of all sites' caches.
    """
    target.mkdir(parents=True, exist_ok=True)
    for cache in caches:
        for pattern in ("apt/*/*.deb", "*/cache/apt/*/*.deb"):
            for package in cache.glob(pattern):
                _link(package, target / package.name)


def link_layers(known: Path, target: Path) -> None:
    """Link the layers of images that one folder has into another one.

    A layer's record, which says that it is complete, comes after it.
    """
    for file in sorted(layers_of(known), key=lambda file: (file.suffix == ".json", file.name == "complete")):
        _link(known / file, target / file)


def _link(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        try:
            os.link(file, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copy2(file, target)


def wait_until(what: str, holds: Callable[[], Any], timeout: float) -> Any:
    """Wait until `holds()` is true and return it; fails with `what` after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (result := holds()):
        if time.monotonic() > end:
            raise AssertionError(f"After {timeout:.0f} s still not: {what}")
        time.sleep(0.5)
    return result
