"""Bringing the product onto the nodes: the head gets the source tree and runs the site's playbook."""

import contextlib
import hashlib
import io
import json
import os
import re
import runpy
import stat
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from .errors import DemoError
from .nodes import Nodes, tar_archive
from .podman import Podman
from .settings import USERS, Places, Settings, passwords, write_atomically
from .stages import Stages

SOURCE = "/opt/carme/src"
INVENTORY = "/opt/carme/inventory"
UNIT = "carme-demo-deploy"

#: What a site is made of. A change of anything else, such as tests, needs no deployment.
FOLDERS = (
    *("ansible", "carme", "containers", "monitoring", "spawner", "webui"),
    *("docs/pictures", "docs/users"),  # links in the portal lead there
)

# Waits for the package manager of an interrupted deployment, then lets it finish.
_FINISH_PACKAGES = """
import fcntl, subprocess
with open("/var/lib/dpkg/lock-frontend", "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
subprocess.run(["dpkg", "--configure", "-a"], check=True, stdin=subprocess.DEVNULL)
"""


def source_files(root: Path) -> list[Path]:
    """The source tree's files: what git knows or would add; without git, all that is not ignored."""
    if (root / ".git").exists():
        # Git trusts a checkout only as its owner.
        owner = root.stat().st_uid
        try:
            listed = subprocess.run(
                ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                cwd=root,
                capture_output=True,
                check=False,
                user=owner if os.geteuid() == 0 and owner else None,
            )
        except OSError:
            listed = None
        if listed is not None and listed.returncode == 0:
            names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
            return sorted(Path(name) for name in names if os.path.lexists(root / name))
    return sorted(_unignored(root))


def _unignored(root: Path) -> Iterator[Path]:
    patterns = [".git"]
    with contextlib.suppress(FileNotFoundError):
        for line in (root / ".gitignore").read_text().splitlines():
            if line.strip() and not line.startswith(("#", "!")):
                patterns.append(line.strip())

    def ignored(path: Path) -> bool:
        for pattern in patterns:
            bare = pattern.strip("/")
            if fnmatch(str(path), bare) or ("/" not in pattern.rstrip("/") and fnmatch(path.name, bare)):
                return True
        return False

    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = sorted(name for name in folders if not ignored(here / name))
        yield from (here / name for name in files if not ignored(here / name))


def source_archive(root: Path) -> tuple[bytes, str]:
    """What a site is made of, as a tar archive, and a digest of its names, modes and contents."""
    buffer = io.BytesIO()
    digest = hashlib.sha256()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in source_files(root):
            if not any(name.is_relative_to(folder) for folder in FOLDERS):
                continue
            path = root / name
            member = tarfile.TarInfo(str(name))
            content = b""
            try:
                status = path.lstat()
                if stat.S_ISLNK(status.st_mode):
                    member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
                elif stat.S_ISREG(status.st_mode):
                    content = path.read_bytes()
                    member.size = len(content)
                else:
                    continue
            except FileNotFoundError:
                continue  # an editor's temporary file that has gone meanwhile
            member.mode = 0o755 if status.st_mode & 0o100 else 0o644
            member.mtime = int(status.st_mtime)
            digest.update(f"{name}\0{member.mode}\0{member.linkname}\0{len(content)}\0".encode())
            digest.update(content)
            archive.addfile(member, io.BytesIO(content))
        # The head has no C compiler.
        for program in sorted(root.glob("*/native/compile.py")):
            built = runpy.run_path(str(program))
            place = program.parent.relative_to(root) / "built" / built["digest"]()
            for what in built["BUILD_OPTIONS"]:
                with tempfile.TemporaryDirectory() as folder:
                    output = Path(folder) / Path(what).name
                    try:
                        if not built["build"](what, output):
                            continue
                    except subprocess.CalledProcessError:
                        continue  # it has printed why; the demo does without
                    content = output.read_bytes()
                member = tarfile.TarInfo(str(place / output.name))
                member.size, member.mode = len(content), 0o755
                digest.update(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue(), digest.hexdigest()


def inventory(settings: Settings) -> dict[str, object]:
    """The hosts as Ansible reads them."""
    groups: dict[str, dict[str, dict[str, dict[str, str]]]] = {
        "head": {"hosts": {}},
        "compute": {"hosts": {}},
    }
    for node in settings.machines():
        facts = {"ansible_host": node.address}
        if node.is_head:
            facts["ansible_connection"] = "local"
        groups["head" if node.is_head else "compute"]["hosts"][node.name] = facts
    if settings.monitoring:
        groups["monitoring"] = {"hosts": {node.name: {} for node in settings.machines() if node.is_head}}
    return dict(groups)


def variables(settings: Settings, words: dict[str, str]) -> dict[str, object]:
    """What the demo passes to the playbook.

    Args:
        words: passwords by account.
    """
    return {
        "demo_gpus_per_node": settings.gpus,
        "site_url": settings.url,
        "images_names": list(settings.images),
        "images_horovod": settings.horovod,
        "demo_users": [{**user, "password": words[user["name"]]} for user in USERS],
    }


class Progress:
    """Reads Ansible's output and shows the stages: one line for each role, with its time."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._play = ""
        self._part = ""
        self._since = time.monotonic()
        self.task = ""
        self.failures: list[str] = []

    def feed(self, line: str) -> None:
        """Take one line of output."""
        if match := re.match(r"PLAY \[(.*)\] \*+$", line):
            self._play = match[1]
        elif match := re.match(r"(?:TASK|RUNNING HANDLER) \[(?:([\w.]+) : )?(.*)\] \*+$", line):
            self.task = f"{match[1]}: {match[2]}" if match[1] else match[2]
            self._enter(match[1] or self._play)
            self._stages.show(f"  {self.task}")
        elif match := re.match(r"(?:fatal|failed): \[([^\]]+)\]", line):
            self.failures.append(f"{self.task} (on {match[1].partition(' ')[0]})")
        elif line.startswith("...ignoring") and self.failures:
            self.failures.pop()
        elif line.startswith("PLAY RECAP"):
            self.end()

    def _enter(self, part: str) -> None:
        if part != self._part:
            self.end()
            self._part = part

    def end(self) -> None:
        """Print the part that was going on."""
        now = time.monotonic()
        if self._part:
            self._stages.line(f"  {self._part}", now - self._since)
        self._part, self._since = "", now


class Deployment:
    """The product on the nodes: what should be there, what is there, and how it gets there."""

    def __init__(self, root: Path, podman: Podman, places: Places, settings: Settings, nodes: Nodes) -> None:
        self.podman = podman
        self.places = places
        self.settings = settings
        self._nodes = nodes
        self._archive, self._source = source_archive(root)
        self._words = passwords(places)

    @property
    def log(self) -> Path:
        return self.places.log / "ansible.log"

    @property
    def _unfinished(self) -> Path:
        return self.places.state / "deploying"

    def wanted(self) -> str:
        """Digest of everything that the result of a deployment depends on."""
        parts = [
            self._source,
            self._nodes.identity(),
            inventory(self.settings),
            variables(self.settings, self._words),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def is_current(self) -> bool:
        """Whether the last deployment succeeded, and nothing has changed since."""
        try:
            return self.places.deployed.read_text().strip() == self.wanted()
        except OSError:
            return False

    def copy(self) -> None:
        """Put source tree and inventory on the head; the old tree stays until the new one is complete."""
        words = json.dumps(variables(self.settings, self._words), indent=2) + "\n"
        hosts = json.dumps(inventory(self.settings), indent=2) + "\n"
        files = {
            f"{INVENTORY}/hosts.yml".lstrip("/"): (hosts.encode(), 0o644),
            f"{INVENTORY}/settings.json".lstrip("/"): (words.encode(), 0o600),
        }
        self.podman.execute("head", "systemctl", "stop", f"{UNIT}.service", check=False, timeout=120)
        self.podman.execute("head", "tar", "--extract", "--directory=/", data=tar_archive(files), timeout=60)
        draft, old = f"{SOURCE}.new", f"{SOURCE}.old"
        self.podman.execute("head", "rm", "-rf", draft, old, timeout=60)
        self.podman.execute("head", "mkdir", "-p", draft, timeout=60)
        self.podman.execute(
            "head",
            "tar",
            "--extract",
            "--no-same-owner",
            f"--directory={draft}",
            data=self._archive,
            timeout=300,
        )
        if self.podman.execute("head", "test", "-e", SOURCE, check=False, timeout=60).returncode == 0:
            self.podman.execute("head", "mv", SOURCE, old, timeout=60)
        self.podman.execute("head", "mv", draft, SOURCE, timeout=60)
        self.podman.execute("head", "rm", "-rf", old, timeout=60)

    def play(self, stages: Stages) -> None:
        """Run the playbook on the head and record its success."""
        if self._unfinished.exists():
            for node in self.settings.machines():
                self.podman.execute(node.name, "python3", "-c", _FINISH_PACKAGES, check=False, timeout=900)
        self.places.deployed.unlink(missing_ok=True)
        write_atomically(self._unfinished, "", 0o644)
        wanted = self.wanted()
        progress = Progress(stages)
        self.places.log.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))
        process = subprocess.Popen(
            self.podman.inside("head", self.command(), terminal=False),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.podman.environment},
        )
        assert process.stdout is not None
        try:
            with self.log.open("w") as log:
                for raw in process.stdout:
                    line = raw.decode(errors="replace")
                    log.write(line)
                    log.flush()
                    progress.feed(line.rstrip())
            status = process.wait()
        except BaseException:
            process.kill()
            self.podman.execute("head", "systemctl", "stop", f"{UNIT}.service", check=False, timeout=120)
            raise
        progress.end()
        if status != 0:
            what = progress.failures[0] if progress.failures else "before its first task"
            raise DemoError(
                f"The playbook failed: {what}.",
                "Check ./demo logs ansible, then run the same command again; it continues from there.",
                self.log,
            )
        write_atomically(self.places.deployed, wanted + "\n", 0o644)
        self._unfinished.unlink(missing_ok=True)

    def command(self) -> list[str]:
        """ansible-playbook in a unit of its own: a demo that is killed leaves one thing to stop, by name."""
        variables = ["LANG=C.UTF-8", "HOME=/root", "ANSIBLE_NOCOLOR=1", "PYTHONUNBUFFERED=1"]
        return [
            *("systemd-run", "--quiet", "--collect", "--wait", "--pipe", f"--unit={UNIT}"),
            *(f"--setenv={variable}" for variable in variables),
            "--property=EnvironmentFile=-/etc/environment",
            f"--working-directory={SOURCE}/ansible",
            "ansible-playbook",
            *("-i", "inventories/demo", "-i", f"{INVENTORY}/hosts.yml"),
            *("-e", f"@{INVENTORY}/settings.json", "site.yml"),
        ]
