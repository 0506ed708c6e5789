"""The nodes' root file system: a small Debian that boots systemd, made once and kept."""

import hashlib
import io
import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from . import commands
from .errors import DemoError
from .podman import Podman
from .registries import Registries
from .settings import Places

PACKAGES = (
    "ca-certificates",
    "curl",
    "dbus",
    "gnupg",
    "iproute2",
    "iputils-ping",
    "less",
    "openssh-server",
    "procps",
    "python3",
    "python3-apt",
    "python3-venv",
    "rsync",
    "systemd",
    "systemd-sysv",
    "tar",
)


@dataclass(frozen=True)
class System:
    """Which Debian a node boots.

    Args:
        suite: Debian's release.
        packages: what it has beyond the base system.
    """

    suite: str
    packages: tuple[str, ...]


#: The demo's own; its head runs Ansible.
DEMO = System("trixie", ("ansible-core", *PACKAGES))

# Units that would act on the host's kernel or devices (a node is a privileged container), or only cost time.
MASKED = (
    "systemd-udevd.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-udev-trigger.service",
    "systemd-modules-load.service",
    "systemd-sysctl.service",
    "systemd-binfmt.service",
    "systemd-pstore.service",
    "systemd-logind.service",
    "systemd-firstboot.service",
    "getty@.service",
    "console-getty.service",
    "container-getty@.service",
    "serial-getty@.service",
    "getty.target",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "sys-kernel-config.mount",
    "sys-fs-fuse-connections.mount",
    "proc-sys-fs-binfmt_misc.automount",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "motd-news.timer",
)

FILES = Path(__file__).with_name("node")
# Each node makes its own host keys and identity; name and resolver come with the container. The image holds
# no package lists: their folder is made old, so that a playbook's "update when older than" does update.
HOOK = " && ".join(
    (
        'rm -f "$1"/etc/ssh/ssh_host_* "$1"/etc/resolv.conf "$1"/etc/hostname',
        ': > "$1"/etc/machine-id',
        'touch -d 2000-01-01 "$1"/var/lib/apt/lists',
    )
)


def overlay() -> bytes:
    """What a node's file system has beyond Debian's packages, as a tar archive with stable bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(FILES.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                member = tarfile.TarInfo(str(path.relative_to(FILES)))
                content = path.read_bytes()
                member.size = len(content)
                member.mode = 0o755 if content.startswith(b"#!") else 0o644
                archive.addfile(member, io.BytesIO(content))
        for unit in MASKED:
            _link(archive, f"etc/systemd/system/{unit}", "/dev/null")
        _link(
            archive,
            "etc/systemd/system/sysinit.target.wants/carme-demo-node.service",
            "/etc/systemd/system/carme-demo-node.service",
        )
    return buffer.getvalue()


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    member = tarfile.TarInfo(name)
    member.type = tarfile.SYMTYPE
    member.linkname = target
    archive.addfile(member)


def digest(registries: Registries, system: System = DEMO) -> str:
    """Names everything that an image is made of: another digest, another image."""
    sources = registries.debian_sources(system.suite)
    inputs = json.dumps([system.suite, system.packages, HOOK, sources, registries.apt_options])
    return hashlib.sha256(inputs.encode() + overlay()).hexdigest()[:16]


def arguments(registries: Registries, overlay_file: Path, target: Path, system: System = DEMO) -> list[str]:
    """mmdebstrap's command line."""
    options = [f"--aptopt={name} {json.dumps(value)}" for name, value in registries.apt_options]
    return [
        # A demo that is killed takes its mmdebstrap along.
        *("setpriv", "--pdeathsig", "TERM"),
        "mmdebstrap",
        "--variant=minbase",
        "--format=tar",
        f"--include={','.join(system.packages)}",
        *options,
        f"--customize-hook=tar-in {overlay_file} /",
        f"--customize-hook={HOOK}",
        system.suite,
        str(target),
        *registries.debian_sources(system.suite),
    ]


def prepare(podman: Podman, places: Places, registries: Registries, system: System = DEMO) -> str:
    """Make the image where it is missing.

    Args:
        system: what its nodes boot.

    Returns:
        The image's name in the demo's podman.
    """
    key = digest(registries, system)
    name = f"localhost/{places.name}-node:{key}"
    if podman.has_image(name):
        return name
    archive = places.cache / f"node-{key}.tar"
    if not archive.exists():
        _build(archive, places, registries, system)
    podman.run("import", "--quiet", "--change", "STOPSIGNAL SIGRTMIN+3", str(archive), name, timeout=600)
    _forget_older(podman, places, key)
    return name


def _build(archive: Path, places: Places, registries: Registries, system: System) -> None:
    log = places.log / "image.log"
    places.cache.mkdir(parents=True, exist_ok=True)
    places.log.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    work = places.state / "tmp"
    work.mkdir(parents=True, exist_ok=True)
    overlay_file = work / "overlay.tar"
    overlay_file.write_bytes(overlay())
    draft = work / "node.tar"
    commands.run(
        arguments(registries, overlay_file, draft, system),
        log=log,
        timeout=1800,
        environment={"TMPDIR": str(work), "DEBIAN_FRONTEND": "noninteractive"},
        remedy="See that the Debian mirror can be reached from this host, then run the same command again.",
    )
    with draft.open("rb") as stream:
        os.fsync(stream.fileno())
    if draft.stat().st_size < 50_000_000:
        raise DemoError("The nodes' file system came out far too small.", "Run the same command again.", log)
    draft.replace(archive)


def _forget_older(podman: Podman, places: Places, key: str) -> None:
    for old in places.cache.glob("node-*.tar"):
        if old.name != f"node-{key}.tar":
            old.unlink()
    for image in podman.text("images", "--format", "{{.Repository}}:{{.Tag}}", timeout=60).splitlines():
        if image.startswith(f"localhost/{places.name}-node:") and not image.endswith(key):
            # Nodes made from it may still be there: then it stays until they go.
            podman.run("rmi", image, check=False, timeout=120)
