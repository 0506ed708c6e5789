"""A machine of its own kernel, with version 2 of control groups and Slurm on its only node, for a test.

It is emulated: a KVM that hangs looks like one that works. Debian 12 with systemd starts slurmctld, slurmd
and `carme-node-exporter` from the units and files that the Ansible roles write. Nothing of the host is
shared.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from carme_monitoring.certificates import make

__all__ = ["PACKAGES", "SUITE", "Machine", "cached_root", "machine", "missing"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ROLES = ROOT / "ansible/roles"
SUITE = "bookworm"  # version 2 is its default, and Slurm 22.05 the oldest that is supported
PACKAGES = [
    "systemd-sysv",
    "dbus",
    "udev",
    "procps",
    "munge",
    "slurmctld",
    "slurmd",
    "slurm-client",
    "python3",
]
PACKAGES += ["linux-image-cloud-amd64", "initramfs-tools", "qemu-guest-agent"]
EMULATOR = "qemu-system-x86_64"
ADDRESS, HOST = "10.0.2.15", "10.0.2.2"  # of the machine and of the host, in the emulator's own network
NAME = "node1"
_TIME_LIMIT = 600.0  # an emulated machine on a busy host

_UNITS = "etc/systemd/system"
_FILES = {
    "slurm_common/templates/slurm.conf.j2": "etc/slurm/slurm.conf",
    "slurm_common/templates/cgroup.conf.j2": "etc/slurm/cgroup.conf",
    "slurm_common/templates/job_container.conf.j2": "etc/slurm/job_container.conf",
    "job_hooks/templates/prolog.j2": "etc/slurm/prolog.sh",
    "job_hooks/templates/epilog.j2": "etc/slurm/epilog.sh",
    "slurm_node/templates/processes.conf.j2": f"{_UNITS}/slurmd.service.d/processes.conf",
    "node_exporter/templates/carme-node-exporter.service.j2": f"{_UNITS}/carme-node-exporter.service",
    "base/templates/tmpfiles.conf.j2": "etc/tmpfiles.d/carme.conf",
}
_SETTINGS = {
    "carme_head_address": HOST,
    "base_revision": "test",
    "slurm_node_address": ADDRESS,
    "slurm_node_cpus": 2,
    "slurm_node_memory_mb": 1500,
    "slurm_common_memory_mb_per_cpu": 200,
    "slurm_common_settings": {
        "AccountingStorageType": "accounting_storage/none",
        "MpiDefault": "none",
        "SelectTypeParameters": "CR_CPU_Memory",
        "MessageTimeout": 60,  # an emulated processor is slow
        "SlurmdTimeout": 600,
    },
}
_PLAY = """
- hosts: slurm_node
  connection: local
  gather_facts: false
  vars:
    ansible_become: false
  roles:
    - {role: carme, when: false}
    - {role: base, when: false}
    - {role: slurm_common, when: false}
    - {role: slurm_node, when: false}
    - {role: node_exporter, when: false}
  tasks:
    - ansible.builtin.copy:
        dest: "{{ output }}"
        content: "{{ texts | to_json }}"
      vars:
        role_path: "{{ folder_of_roles }}/node_exporter"
        texts:
"""
_STARTER = """#!/opt/carme/venv/bin/python
import sys

from carme_monitoring.node.exporter import main

sys.exit(main())
"""
_NETWORK = f"[Match]\nType=ether\n[Network]\nAddress={ADDRESS}/24\nLinkLocalAddressing=no\n"


def cached_root() -> Path:
    """Where `install_cgroup_v2.py` puts the machine's root folder; made anew when its inputs change."""
    key = hashlib.sha256(f"{SUITE} {PACKAGES}".encode() + (HERE / "install_cgroup_v2.py").read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "carme"
    return cache / f"cgroup-v2-{key.hexdigest()[:16]}"


def missing() -> str:
    """What this machine lacks for the test, or an empty text."""
    if shutil.which(EMULATOR) is None:
        return f"{EMULATOR} is not there. Install qemu-system-x86 to run this."
    return "" if cached_root().is_dir() else "There is no root folder. Run tests/install_cgroup_v2.py first."


class Machine:
    """A running machine.

    Args:
        agent: The socket of the agent in it.
        port: Of this host; leads to the exporter.
        reader: The folder with the certificate of a reader.
    """

    def __init__(self, agent: socket.socket, port: int, reader: Path) -> None:
        self._lines = agent.makefile("rwb")
        self._url = f"https://127.0.0.1:{port}/metrics"
        self._context = ssl.create_default_context(cafile=str(reader / "ca.crt"))
        self._context.load_cert_chain(reader / "tls.pem")

    def _ask(self, what: str, **arguments: Any) -> Any:
        """One question to the agent (QEMU Guest Agent Protocol Reference)."""
        self._lines.write(json.dumps({"execute": what, "arguments": arguments}).encode() + b"\n")
        self._lines.flush()
        answer = json.loads(self._lines.readline())
        assert "error" not in answer, f"{what}: {answer['error']}"
        return answer["return"]

    def run(self, *command: str, user: str = "root", data: str = "", check: bool = True) -> str:
        """Run a program in the machine; return its output, which an error has as its text."""
        if user != "root":
            command = ("runuser", "-u", user, "--", *command)
        pid = self._ask(
            "guest-exec",
            path="/usr/bin/env",
            arg=["-C", "/home/" + user if user != "root" else "/root", *command],
            **{"input-data": base64.b64encode(data.encode()).decode(), "capture-output": True},
        )["pid"]
        pause = 0.05
        while not (status := self._ask("guest-exec-status", pid=pid))["exited"]:
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
        message = [base64.b64decode(status.get(name, "")).decode() for name in ("out-data", "err-data")]
        assert not check or status.get("exitcode") == 0, f"{command}: {status.get('exitcode')}: {message}"
        return message[0]

    def scrape(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Scrape the exporter; return its values by name and labels."""
        answer = httpx.get(self._url, verify=self._context, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    def answers(self) -> bool:
        """Whether the exporter has begun to listen."""
        try:
            return bool(self.scrape())
        except httpx.TransportError:
            return False

    def values(self, job_id: int) -> dict[str, float]:
        """What the exporter reports of a job: `NAME` or, where there are more labels, `NAME LABEL ...`."""
        found = {}
        for (name, labels), value in self.scrape().items():
            rest = dict(labels)
            if rest.pop("jobid", "") == str(job_id):
                assert rest.pop("account") is not None
                found[" ".join((name, *(rest[label] for label in sorted(rest))))] = value
        return found

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        """Wait until `holds` returns a true value; return that."""
        end = time.monotonic() + _TIME_LIMIT
        while time.monotonic() < end:
            if found := holds():
                return found
            time.sleep(1)
        raise AssertionError(f"In {_TIME_LIMIT:.0f} s it did not come true that {what}")


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """A machine that runs until the end; its console is written to `folder/console.log`."""
    tree, disk = folder / "root", folder / "disk.img"
    # Links instead of copies: what is the site's is put beside them, and replaces none.
    subprocess.run(["cp", "-al", cached_root(), tree], check=True)
    try:
        reader = _install(tree, folder)
        (kernel,) = (tree / "boot").glob("vmlinuz-*")
        (first,) = (tree / "boot").glob("initrd.img-*")
        shutil.copy(kernel, folder / "kernel")
        shutil.copy(first, folder / "initrd")
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", tree, disk, "2G"], check=True)
    finally:
        shutil.rmtree(tree)
    control, agent = folder / "control", folder / "agent"
    command = [
        EMULATOR, "-machine", "pc", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
        "-m", "2048", "-nodefaults", "-display", "none", "-no-reboot",
        "-serial", f"file:{folder / 'console.log'}",
        "-kernel", folder / "kernel", "-initrd", folder / "initrd",
        "-append", "root=/dev/vda rw console=ttyS0 mitigations=off systemd.show_status=yes",
        "-drive", f"file={disk},format=raw,if=virtio,cache=unsafe",
        "-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:0-{ADDRESS}:9750",
        "-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-serial",
        "-chardev", f"socket,path={agent},server=on,wait=off,id=agent",
        "-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
        "-chardev", f"socket,path={control},server=on,wait=off,id=control",
        "-mon", "chardev=control,mode=control",
    ]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)))
    try:
        with socket.socket(socket.AF_UNIX) as to_agent:
            port = _forwarded(control, process)
            to_agent.settimeout(_TIME_LIMIT)
            to_agent.connect(str(agent))
            machine = Machine(to_agent, port, reader)
            machine._ask("guest-ping")
            yield machine
    finally:
        process.terminate()
        process.wait(60)


def _forwarded(control: Path, process: "subprocess.Popen[bytes]") -> int:
    """The port of this host that the emulator has taken for the exporter's."""
    while not control.exists():
        assert process.poll() is None, "the emulator has ended"
        time.sleep(0.1)
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(60)
        channel.connect(str(control))
        lines = channel.makefile("rwb")
        lines.readline()  # its greeting
        reported = {}
        for question in (
            {"execute": "qmp_capabilities"},
            {"execute": "human-monitor-command", "arguments": {"command-line": "info usernet"}},
        ):
            lines.write(json.dumps(question).encode() + b"\n")
            lines.flush()
            while "return" not in (reported := json.loads(lines.readline())):
                assert "error" not in reported, reported
    found = re.search(r"TCP\[HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)", reported["return"])
    assert found, reported
    return int(found[1])


def _install(tree: Path, folder: Path) -> Path:
    """Put the checkout's parts into the machine as the roles would; the folder of a reader's certificate."""
    for name, text in _rendered(folder).items():
        _write(tree / name, text, 0o755 if name.endswith(".sh") else 0o644)
    _write(tree / "etc/hostname", f"{NAME}\n")
    _write(tree / "etc/hosts", f"127.0.0.1 localhost\n{ADDRESS} {NAME}\n")
    _write(tree / "etc/systemd/network/10-net.network", _NETWORK)
    _write(tree / "opt/carme/venv/bin/carme-node-exporter", _STARTER, 0o755)
    libraries = tree / "opt/carme/venv/lib/python3.11/site-packages"
    for part in ("carme/src/carme", "monitoring/src/carme_monitoring"):
        shutil.copytree(
            ROOT / part, libraries / Path(part).name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in (
        "srv/carme/images",
        "var/cache/carme/data/jobs",
        "var/cache/carme/data/users",
        "var/lib/slurm/job-tmp",
    ):
        (tree / name).mkdir(parents=True)
    wants = tree / "etc/systemd/system/multi-user.target.wants/carme-node-exporter.service"
    wants.symlink_to("/etc/systemd/system/carme-node-exporter.service")
    certificates = folder / "certificates"
    make(certificates, [
        {"name": "node", "group": "root", "hosts": ["127.0.0.1"]},
        {"name": "reader", "group": "root", "client": True},
    ])  # fmt: skip
    found = re.search(r"^carme-exporter:x:(\d+):", (tree / "etc/group").read_text(), re.MULTILINE)
    assert found
    place = tree / "etc/carme/monitoring/node"
    shutil.copytree(certificates / "node", place)
    for path in (place, *place.iterdir()):
        os.chown(path, 0, int(found[1]))
    return certificates / "reader"


def _write(file: Path, text: str, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # a link to the cached one
    file.write_text(text)
    file.chmod(mode)


def _rendered(folder: Path) -> dict[str, str]:
    """The files that the roles write, by where they belong."""
    output, inventory, settings, play = (
        folder / name for name in ("files.json", "hosts.json", "settings.json", "play.yml")
    )
    groups = {"head": "head"}
    groups |= dict.fromkeys(("slurm_controller", "slurm_database", "slurm_node", "compute"), NAME)
    inventory.write_text(
        json.dumps({"all": {"children": {group: {"hosts": {host: {}}} for group, host in groups.items()}}})
    )
    settings.write_text(json.dumps(_SETTINGS | {"output": str(output), "folder_of_roles": str(ROLES)}))
    texts = (
        f"          {to}: \"{{{{ lookup('template', folder_of_roles ~ '/{name}') }}}}\"\n"
        for name, to in _FILES.items()
    )
    play.write_text(_PLAY + "".join(texts))
    environment = os.environ | {
        "ANSIBLE_HOME": str(folder / "ansible"),
        "ANSIBLE_ROLES_PATH": str(ROLES),
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        "LC_ALL": "C.UTF-8",
    }
    command = [sys.executable, "-m", "ansible", "playbook", "-i", inventory, "-e", f"@{settings}", play]
    done = subprocess.run(command, cwd=ROOT / "ansible", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    files = json.loads(output.read_text())
    # The machine has nothing to enforce it with, and Slurm has no option for that.
    configuration = files["etc/slurm/slurm.conf"].splitlines(keepends=True)
    files["etc/slurm/slurm.conf"] = "".join(
        line for line in configuration if not line.startswith("AccountingStorageEnforce=")
    )
    return files
