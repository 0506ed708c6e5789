"""Clean up what a stopped or suddenly ended demo leaves in the running system.

Everything here holds only until the next boot (processes, mounts, interfaces, podman's run folder); the
nodes' disks are never touched. Podman notices that its run folder is gone, as after a boot, and counts all
containers as stopped.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

from . import commands
from .errors import DemoError
from .podman import Container, Podman, process_exists


def sweep(podman: Podman, containers: list[Container], subnet: str) -> None:
    """End processes, network and mounts of a demo's containers.

    Args:
        containers: those whose remains may still be there.
        subnet: the nodes' network.
    """
    for container in containers:
        _end(container)
        commands.run([podman.runtime.name, "delete", "--force", container.id], check=False, timeout=60)
        _forget_namespace(container.netns)
    _end_forwarder(podman.places.run)
    _remove_bridge(podman.places.bridge)
    _remove_rules(subnet, podman.places.name)
    unmount_below(podman.places.state, podman.places.run)
    remove_tree(podman.places.run)
    podman.configure()


def _end(container: Container) -> None:
    for pid in (container.conmon_pid, container.pid):
        # A pid may belong to another process by now: only a process of this container is ended.
        if process_exists(pid) and _belongs(pid, container.id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while process_exists(pid) and time.monotonic() < deadline:
                time.sleep(0.05)


def _belongs(pid: int, identity: str) -> bool:
    with contextlib.suppress(OSError):
        for file in ("cmdline", "cgroup", "mountinfo"):
            if identity.encode() in Path(f"/proc/{pid}/{file}").read_bytes():
                return True
    return False


def _forget_namespace(path: str) -> None:
    if path.startswith("/run/netns/"):
        commands.run(["umount", "--lazy", path], check=False, timeout=30)
        Path(path).unlink(missing_ok=True)


def _end_forwarder(run: Path) -> None:
    for file in run.rglob("aardvark.pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.read_text())
            if b"aardvark-dns" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGTERM)


def _remove_bridge(bridge: str) -> None:
    listed = commands.run(["ip", "-json", "link", "show", "master", bridge], check=False, timeout=30)
    if listed.returncode != 0:
        return
    for link in json.loads(listed.stdout or b"[]"):
        if link.get("ifname"):
            commands.run(["ip", "link", "delete", link["ifname"]], check=False, timeout=30)
    commands.run(["ip", "link", "delete", bridge], check=False, timeout=30)


def stale_rules(listing: str, subnet: str, network: str) -> list[list[str]]:
    """Arguments of iptables that delete the rules and chains of a network.

    Args:
        listing: output of ``iptables -S`` for one table.
        subnet: the network's addresses.
        network: what the network's name in podman begins with.
    """
    base = re.escape(subnet.rpartition(".")[0])
    pattern = re.compile(
        rf"(?:\s-[sd] {base}\.[0-9]+|--to-destination {base}\.[0-9]+"
        rf"|name: {re.escape(network)}(?:-[0-9a-f]+)? id: )"
    )
    rules = [line for line in listing.splitlines() if line.startswith("-A ")]
    doomed = [line for line in rules if pattern.search(line)]
    # The chains that netavark made for this network alone carry its hash.
    chains = set()
    for line in doomed:
        chains |= set(re.findall(r"NETAVARK-(?:DN-)?[0-9A-F]{6,}", line))
    doomed += [line for line in rules if line not in doomed and any(f" {chain}" in line for chain in chains)]
    result = [_split("-D" + line.removeprefix("-A")) for line in doomed]
    result += [["-F", chain] for chain in sorted(chains)]
    result += [["-X", chain] for chain in sorted(chains)]
    return result


def _split(rule: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', rule)]


def _remove_rules(subnet: str, network: str) -> None:
    if shutil.which("iptables") is None:
        return
    for table in ("nat", "filter"):
        listing = commands.run(["iptables", "-t", table, "-S"], check=False, timeout=30)
        for rule in stale_rules(listing.stdout.decode(errors="replace"), subnet, network):
            commands.run(["iptables", "-t", table, *rule], check=False, timeout=30)


def mounts_below(mountinfo: str, *folders: Path) -> list[str]:
    """Mount points at or below folders, the innermost first.

    Args:
        mountinfo: text of /proc/self/mountinfo.
        folders: where to look.
    """
    found = []
    for line in mountinfo.splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split()[4])
        if any(Path(point).is_relative_to(folder) for folder in folders):
            found.append(point)
    return found[::-1]


def unmount_below(*folders: Path) -> None:
    """Unmount everything at or below folders."""
    for point in mounts_below(Path("/proc/self/mountinfo").read_text(), *folders):
        commands.run(["umount", "--lazy", point], check=False, timeout=30)


def remove_tree(folder: Path) -> None:
    """Delete a folder, after unmounting what is mounted there."""
    if not folder.exists():
        return
    unmount_below(folder)
    # Behind a mount may lie the host's own /dev.
    still = mounts_below(Path("/proc/self/mountinfo").read_text(), folder)
    if still:
        raise DemoError(
            f"{still[0]} cannot be unmounted, so {folder} is left as it is.",
            "End what uses it, or restart this host, then run the same command again.",
        )
    # A file that vanishes meanwhile is no reason to stop half way.
    shutil.rmtree(folder, ignore_errors=True)


def end_processes_in(folder: Path) -> None:
    """End processes that an earlier demo left working in a folder, such as an orphaned mmdebstrap."""
    for _ in range(20):
        found = [pid for pid in _pids() if _has_working_directory(pid, folder)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _pids() -> list[int]:
    own = os.getpid()
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if int(entry.name) != own]


def _has_working_directory(pid: int, folder: Path) -> bool:
    if not process_exists(pid):
        return False
    with contextlib.suppress(OSError):
        if f"{folder}/".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return True
        places = (Path(f"/proc/{pid}/{link}").readlink() for link in ("root", "cwd"))
        return any(place.is_relative_to(folder) for place in places)
    return False
