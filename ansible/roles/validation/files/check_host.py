"""Check one host of an installed site.

Usage: check_host.py EXPECTED, where EXPECTED is JSON: validation_expected of the role validation.
Prints a list of {"name", "host", "ok", "skipped", "detail", "remedy", "seconds"}.
"""

import fcntl
import grp
import json
import pwd
import re
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

GROUPS = {
    "portal-secret-key": "carme-portal",
    "oidc-signing-key": "carme-portal",
    "hub-cookie-secret": "carme-hub",
    "hub-crypt-key": "carme-hub",
    "proxy-auth-token": "carme-hub",
    "oidc-client-secret": "carme",
    "hub-api-token": "carme",
}
FS_IOC_GETFLAGS, FS_APPEND_FL = 0x80086601, 0x20  # linux/fs.h
AT_WORK = {"idle", "mixed", "allocated", "reserved", "completing", "planned"}
SET_ASIDE = {"drained", "draining", "maint"}  # and in contact: a node that is not has an asterisk
SAVING_POWER = "~#%!"  # after a state: switched off, being switched on or off, or about to be; jobs start it
GPU_JOBS = 8  # that examine GPUs at the same time: sites limit how many jobs a user has
GPU_SECONDS = 600.0  # in which they begin
WAIT_SECONDS = 60  # that one of them waits for a free GPU
SHOWN = 5  # names in a sentence, and nodes with a fault after which no further ones are checked


class Wrong(Exception):
    """What a check found instead of what it wanted."""


class Skipped(Exception):
    """Why a check could examine nothing, which is no fault."""


class Busy(Exception):
    """No GPU of a node was free in time."""


class Limited(Wrong):
    """Slurm refuses the user one more job."""


def run(*command: str, timeout: float = 60) -> str:
    """The output of a command; Wrong with its last words if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Wrong(str(error)) from None
    if done.returncode:
        raise Wrong((done.stderr or done.stdout).strip()[-500:] or f"exit code {done.returncode}")
    return done.stdout


def unit(name: str) -> str:
    """A systemd unit must be active."""
    state = subprocess.run(
        ["systemctl", "is-active", name], capture_output=True, text=True, check=False
    ).stdout.strip()
    if state != "active":
        raise Wrong(f"{name} is {state or 'unknown'}.")
    return "active"


def stopped(names: list[str]) -> str:
    """None of these units may run: they belong to the active head."""
    command = ["systemctl", "is-active", *names]
    states = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    running = [
        name for name, state in zip(names, states, strict=False) if state not in ("inactive", "failed")
    ]
    if running or len(states) != len(names):
        raise Wrong(f"On a standby run: {', '.join(running) or 'systemd does not say what'}.")
    return f"{len(names)} units stopped"


def listening(host: str, port: int, tls: bool) -> str:
    """Something must answer on a port."""
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            if tls:
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                context.wrap_socket(connection).close()
    except OSError as error:
        raise Wrong(f"{host}:{port}: {error}") from None
    return f"{host}:{port} answers"


def closed(host: str, ports: list[int]) -> str:
    """Ports that belong to this host alone must not answer on its address in the network."""
    open_ports = []
    for port in ports:
        try:
            socket.create_connection((host, port), timeout=2).close()
            open_ports.append(str(port))
        except OSError:
            pass
    if open_ports:
        raise Wrong(f"Port {', '.join(open_ports)} answers on {host}, but is for this host alone.")
    return "closed to others"


def file_mode(path: Path, mode: int, owner: str, group: str) -> str:
    """A path must have exactly this mode, owner and group."""
    try:
        found = path.stat()
    except OSError as error:
        raise Wrong(f"{path}: {error.strerror}.") from None
    is_now = (
        found.st_mode & 0o7777,
        pwd.getpwuid(found.st_uid).pw_name,
        grp.getgrgid(found.st_gid).gr_name,
    )
    if is_now != (mode, owner, group):
        raise Wrong(f"{path} is {is_now[0]:04o} {is_now[1]}:{is_now[2]}, not {mode:04o} {owner}:{group}.")
    return f"{mode:04o} {owner}:{group}"


def munge_key(path: Path) -> str:
    """Nobody but munge may read the cluster's key; its owner may also write it, as some packages have it."""
    found = path.stat()
    owner = pwd.getpwuid(found.st_uid).pw_name
    if owner != "munge" or found.st_mode & 0o177:
        raise Wrong(f"{path} is {found.st_mode & 0o7777:04o} of {owner}, but must be 0400 or 0600 of munge.")
    return f"{found.st_mode & 0o7777:04o} {owner}"


def secrets(directory: Path) -> str:
    """All secrets must be there, and readable by their service alone."""
    file_mode(directory, 0o750, "root", "carme")
    for name, group in GROUPS.items():
        file_mode(directory / name, 0o640, "root", group)
    return f"{len(GROUPS)} files with the right modes"


def append_only(path: Path) -> str:
    """Whether what is in a log can be changed; only reported, as some file systems cannot prevent it."""
    with path.open("rb") as file:
        try:
            flags = struct.unpack("i", fcntl.ioctl(file, FS_IOC_GETFLAGS, bytes(8))[:4])[0]
        except OSError as error:
            return f"the file system of {path} cannot make it append-only: {error.strerror}"
    return "append-only" if flags & FS_APPEND_FL else f"{path} is not marked append-only"


def bare(state: str) -> str:
    """A node's state without power saving, and without the minus sign of a job that is to have it next."""
    return state.rstrip("-" + SAVING_POWER)


def is_asleep(state: str) -> bool:
    """Whether power saving has the node switched off, or is switching it on or off."""
    return state.rstrip("-").endswith(tuple(SAVING_POWER))


def nodes(names: list[str]) -> str:
    """Slurm must be able to use every node that an administrator has not set aside; those are named.

    It names also those that are asleep by power saving: Slurm switches them on for jobs.
    """
    output = run("sinfo", "--noheader", "--Node", "--format=%N|%T|%E")
    found = dict.fromkeys(names, ("unknown", ""))
    for line in output.splitlines():
        name, state, reason = line.split("|", 2)
        if name in found:
            found[name] = (state.strip(), reason.strip())
    off = {name: (state, why) for name, (state, why) in found.items() if bare(state) not in AT_WORK}
    aside = {name: words for name, words in off.items() if bare(words[0]) in SET_ASIDE}
    bad = [f"{name} is {state}" for name, (state, _why) in off.items() if name not in aside]
    if bad or len(off) == len(names):
        bad += [f"{name} is {state} ({why})" for name, (state, why) in aside.items()]
        raise Wrong("; ".join(bad) + ".")
    left = "".join(f"; {name} is {state} ({why})" for name, (state, why) in aside.items())
    asleep = [name for name, (state, _why) in found.items() if name not in off and is_asleep(state)]
    saving = f"; asleep by power saving: {shortened(asleep)}" if asleep else ""
    return f"{len(names) - len(off)} nodes at work{saving}{left}"


def partition_nodes(partition: str) -> list[dict[str, Any]]:
    """The nodes of a partition: how many GPUs, whether at work and awake; Wrong where none is at work."""
    form = "--Format=NodeList:256,Gres:512,StateLong:64"
    output = run("sinfo", "--noheader", "--Node", f"--partition={partition}", form)
    found = {}
    for line in output.splitlines():
        name, gres, state = line.split()
        # gpu:a100:4(S:0-1),gpu:2; a comma within brackets distinguishes sockets.
        counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:([0-9]+)(?=[,(]|$)", gres)
        found[name] = {
            "name": name,
            "gpus": sum(map(int, counts)),
            "usable": bare(state) in AT_WORK,
            "awake": not is_asleep(state),
        }
    if not any(node["usable"] for node in found.values()):
        raise Wrong(
            f"The partition {partition} has no node at work; 'sinfo --partition={partition}' says more."
        )
    return list(found.values())


def node_gpus(partition: str) -> dict[str, int]:
    """How many GPUs each node of a partition has that is at work, awake and has any."""
    # A job on each of those that sleep would switch the whole cluster on, and wait minutes for it.
    return {
        node["name"]: node["gpus"]
        for node in partition_nodes(partition)
        if node["usable"] and node["awake"] and node["gpus"]
    }


def gpus(user: str, node_gpus: dict[str, int], partition: str = "", account: str = "") -> str:
    """A job of an ordinary user must see the GPU that it requested, and the other ones of a node not.

    Some nodes at the same time. Those that are left out are named, with the reason. Skipped if all are.
    """
    end = time.monotonic() + GPU_SECONDS
    wrong: list[str] = []
    busy: list[str] = []
    limited: list[str] = []
    late: list[str] = []

    def check_node(name: str, alone: bool = False) -> None:
        if time.monotonic() > end or len(wrong) >= SHOWN:
            late.append(name)
            return
        try:
            gpu_apart(user, name, node_gpus[name], partition, account)
        except Busy:
            busy.append(name)
        except Wrong as error:
            if isinstance(error, Limited) and not alone:
                limited.append(name)
            else:
                wrong.append(str(error))

    with ThreadPoolExecutor(GPU_JOBS) as pool:
        list(pool.map(check_node, node_gpus))
    for name in limited:  # which may be on how many jobs the user has
        check_node(name, alone=True)
    if wrong:
        raise Wrong(" ".join(sorted(wrong)))
    seen = len(node_gpus) - len(busy) - len(late)
    text = f"one GPU visible and all others closed on {seen} nodes" if seen else "no node was checked"
    for names, reason in (
        (busy, f"no GPU was free within {WAIT_SECONDS} s"),
        (late, f"{GPU_SECONDS:.0f} s were over"),
    ):
        text += f"; not checked, as {reason}: {shortened(names)}" if names else ""
    if not seen:
        raise Skipped(text if node_gpus else "no node at work has GPUs")
    return text


def gpu_apart(user: str, name: str, count: int, partition: str, account: str) -> None:
    """Have a job examine the GPUs of a node. Raises Wrong, Busy, Limited."""
    script = 'echo "$CUDA_VISIBLE_DEVICES"; for d in /dev/nvidia[0-9]*; do (: <"$d") 2>&1; done; true'
    try:
        message = run(
            *("runuser", "--user", user, "--", "srun", "--chdir=/", f"--immediate={WAIT_SECONDS}"),
            *("--time=1", *([f"--partition={partition}"] if partition else [])),
            *([f"--account={account}"] if account else []),
            *(f"--nodelist={name}", "--gres=gpu:1", "sh", "-c", script),
            timeout=WAIT_SECONDS + 30,
        )
    except Wrong as error:
        refused = "Unable to allocate resources" in str(error)
        # "Socket timed out" is another matter: Slurm itself does not answer.
        if refused and re.search(r"nodes are busy|Connection timed out|queued and waiting", str(error)):
            raise Busy from None
        kind = Limited if refused and "violates accounting/QOS policy" in str(error) else Wrong
        raise kind(f"A job with one GPU on {name}: {error}") from None
    visible = message.split("\n", 1)[0]
    if len(visible.split(",")) != 1 or not visible:
        raise Wrong(f"A job with one GPU on {name} sees '{visible}'.")
    closed_to_it = message.lower().count("operation not permitted")
    if closed_to_it != count - 1:
        raise Wrong(
            f"A job with one GPU on {name} is kept from {closed_to_it} of the {count - 1} other GPUs."
        )


def shortened(names: list[str]) -> str:
    """Some of these names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(sorted(names)[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def apart(owner: str, stranger: str) -> str:
    """A user's job folders must be closed to another user."""
    folder = Path(pwd.getpwnam(owner).pw_dir, ".local/share/carme/jobs")
    command = ["runuser", "--user", stranger, "--", "ls", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 or "ermission denied" not in done.stderr:
        raise Wrong(f"{stranger} may look into {folder} of {owner}: {done.stdout or done.stderr}")
    return f"{stranger} cannot look into {folder}"


def image(directory: Path, name: str) -> str:
    """The default image must be there, readable by everybody."""
    for path in (directory / f"{name}.sif", directory / f"{name}.json"):
        if not path.is_file() or not path.stat().st_mode & 0o004:
            raise Wrong(f"{path} is missing or not readable by all.")
    return f"{name} is there"


def checks(wanted: dict[str, Any]) -> list[tuple[str, Callable[[], str], str]]:
    """What to check on this host: name, check, what to do when it fails."""
    table: list[tuple[str, Callable[[], str], str]] = [
        (f"unit {name}", lambda name=name: unit(name), f"systemctl status {name}; journalctl --unit {name}.")
        for name in wanted["units"]
    ]
    if wanted["stopped"]:
        remedy = "carme-head status says which head is active; systemctl stop these units here."
        table.append(("standby", lambda: stopped(wanted["stopped"]), remedy))
    if wanted["images"]:
        directory = Path(wanted["images"])
        remedy = "Run the playbook with --tags images."
        table.append(("image", lambda: image(directory, wanted["default_image"]), remedy))
    if Path("/etc/munge/munge.key").exists():
        key = Path("/etc/munge/munge.key")
        table.append(("munge key", lambda: munge_key(key), f"chown munge {key}; chmod 0400 {key}."))
    if not wanted["head"]:
        return table
    address, users, partition = wanted["address"], wanted["users"], wanted["partition"]
    table += [
        (
            "port nginx",
            lambda: listening("127.0.0.1", wanted["site_port"], True),
            "nginx -t; systemctl status nginx.",
        ),
        ("port portal", lambda: listening("127.0.0.1", 8100, False), "journalctl --unit carme-portal."),
        ("port proxy", lambda: listening("127.0.0.1", 8000, False), "journalctl --unit carme-proxy."),
        ("port hub", lambda: listening(address, wanted["hub_port"], False), "journalctl --unit carme-hub."),
        (
            "ports closed",
            lambda: closed(address, wanted["closed"]),
            "Restart that service: it must listen on 127.0.0.1 only.",
        ),
        ("secrets", lambda: secrets(Path(wanted["secrets"])), "Run site.yml with --tags secrets."),
        (
            "audit log",
            lambda: append_only(Path("/var/log/carme/audit.jsonl")),
            "Run site.yml with --tags broker.",
        ),
        (
            "nodes",
            lambda: nodes([node["name"] for node in partition_nodes(partition)]),
            "scontrol show node NAME says why; scontrol update nodename=NAME state=resume.",
        ),
    ]
    if users and wanted["gpus"]:
        remedy = "Check gres.conf, cgroup.conf (ConstrainDevices) and slurmd.log on the node."
        table.append(
            (
                "gpus",
                lambda: gpus(users[0], node_gpus(partition), partition, wanted["account"]),
                remedy,
            )
        )
    if len(users) > 1:
        table.append(("users apart", lambda: apart(users[0], users[1]), "chmod 0700 the homes."))
    return table


def main(wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Run all checks of this host."""
    results = []
    for name, check, remedy in checks(wanted):
        began = time.monotonic()
        skipped = False
        try:
            ok, detail = True, check()
        except Skipped as error:
            ok, skipped, detail = True, True, str(error)
        except Wrong as error:
            ok, detail = False, str(error)
        except Exception as error:
            ok, detail = False, f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - began, 2)
        result = {"name": name, "host": wanted["host"], "ok": ok, "skipped": skipped, "detail": detail}
        results.append(result | {"seconds": seconds, "remedy": "" if ok else remedy})
    return results


if __name__ == "__main__" and sys.argv[1] == "--partition":
    try:
        print(json.dumps(partition_nodes(sys.argv[2])))
    except Wrong as error:
        sys.exit(str(error))
elif __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
