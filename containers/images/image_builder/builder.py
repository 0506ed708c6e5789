"""Builds images into the cache and publishes them to the folder that the platform reads."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .cache import Cache, Entry, replace
from .definitions import OWN_APPS, SOURCES, SUITE, Definition, debian_packages
from .digests import SKIPPED, file_digest, key_of, tree_digest
from .errors import BuildError
from .host import ca_bundle, debian_sources, may_raise_limits, pip_settings

#: The plain version on the Python package index is the CUDA build; builds without CUDA carry a local version.
TORCH = {"cpu": "torch==2.13.0+cpu", "cuda": "torch==2.13.0,!=2.13.0+cpu"}
#: The plain package carries CUDA only with its own extra.
TENSORFLOW = {"cpu": "tensorflow-cpu==2.21.*", "cuda": "tensorflow[and-cuda]==2.21.*"}
#: The Python that users have.
ENVIRONMENT = "opt/carme/env/lib"


@dataclass(frozen=True)
class Result:
    """What became of one image."""

    name: str
    file: str
    digest: str
    megabytes: float
    reused: bool
    seconds: float


class Builder:
    """Builds images into a cache and publishes them to the folder that the platform reads."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cache = Cache(options.cache)
        self.output: Path = options.output
        self.sources = debian_sources(options.mirror)
        self.started = time.monotonic()
        self.keys: dict[str, str] = {}
        self.arguments = {
            "torch_requirement": TORCH[options.torch],
            "torch_index": options.torch_index,
            "tensorflow_requirement": TENSORFLOW[options.tensorflow],
            "horovod": "yes" if options.horovod else "no",
        }

    def report(self, text: str) -> None:
        """Progress for people; standard output belongs to the result."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", file=sys.stderr, flush=True)

    def debian_key(self) -> str:
        return key_of(SUITE, self.sources, debian_packages())

    def key(self, definition: Definition) -> str:
        """A hash of all that goes into an image."""
        if definition.name not in self.keys:
            if definition.parent:
                parent = self.cache.find(definition.parent, self.keys[definition.parent], ".sif")
                below = parent.digest if parent else "none yet"
            else:
                below = self.debian_key()
            copied = {name: tree_digest(SOURCES[name]) for name in definition.sources}
            used = {name: value for name, value in self.arguments.items() if name in definition.arguments}
            authorities = file_digest(ca_bundle())
            program = tree_digest(Path(__file__).parent)
            self.keys[definition.name] = key_of(definition.text, below, copied, used, authorities, program)
        return self.keys[definition.name]

    def is_current(self, definition: Definition) -> bool:
        """Whether what is published is what a build would publish."""
        entry = self.cache.find(definition.name, self.key(definition), ".sif")
        return entry is not None and (definition.is_layer or self.is_published(definition, entry))

    def is_published(self, definition: Definition, entry: Entry) -> bool:
        image = self.output / f"{definition.name}.sif"
        try:
            manifest = json.loads(image.with_suffix(".json").read_text())
        except (OSError, ValueError):
            return False
        packages = manifest.pop("packages", None)
        wanted = definition.manifest(entry.digest, entry.built)
        same = manifest == wanted and packages is not None
        return same and image.is_file() and image.stat().st_size == entry.file.stat().st_size

    def build(self, definition: Definition) -> Result:
        """Build an image unless the cache has it, and publish it."""
        began = time.monotonic()
        name, key = definition.name, self.key(definition)
        entry = None if self.options.fresh else self.cache.find(name, key, ".sif")
        reused = entry is not None
        if entry is None:
            self.report(f"{name}: building")
            entry = self.make(definition, key)
        if not definition.is_layer:
            self.publish(definition, entry)
        seconds = time.monotonic() - began
        size = entry.file.stat().st_size / 1e6
        self.report(f"{name}: {'reused' if reused else 'built'}, {size:.0f} MB, {seconds:.0f} s")
        file = str(entry.file if definition.is_layer else self.output / f"{name}.sif")
        return Result(name, file, entry.digest, round(size, 1), reused, round(seconds, 1))

    def make(self, definition: Definition, key: str) -> Entry:
        arguments = dict(self.arguments)
        below: Entry | None = None
        if definition.parent:
            below = self.cache.find(definition.parent, self.keys[definition.parent], ".sif")
            if below is None:
                raise BuildError(f"The image '{definition.parent}' vanished from the cache. Build again.")
        known = {*arguments, definition.parent or "debian"}
        if unknown := definition.arguments - known:
            raise BuildError(
                f"{definition.name}.def uses {{{{ {min(unknown)} }}}}, which is unknown. "
                f"Known here: {', '.join(sorted(known))}."
            )
        with tempfile.TemporaryDirectory(prefix="carme-image-", dir=self.cache.folder) as temporary:
            folder = Path(temporary)
            binds = self.prepare(folder, definition)
            if definition.parent and below:
                arguments[definition.parent] = str(self.unpack(below.file, folder / "parent"))
            else:
                arguments["debian"] = str(self.debian())
            with self.cache.adding(definition.name, key, ".sif") as file:
                command = ["apptainer", "--quiet", "build", "--force"]
                command += ["--mksquashfs-args", "-comp zstd -Xcompression-level 3"]
                for source, target in binds:
                    command += ["--bind", f"{source}:{target}"]
                for name in sorted(definition.arguments):
                    command += ["--build-arg", f"{name}={arguments[name]}"]
                (folder / "unpacked").mkdir()
                self.run([*command, str(file), str(definition.file)], folder / "unpacked")
                self.check_entry_points(definition, file)
        return self.added(definition.name, key, ".sif")

    def check_entry_points(self, definition: Definition, image: Path) -> None:
        """See that the image has a program for each app that its labels offer."""
        listed = self.files_in(image, "opt/carme/apps")
        programs = {Path(line).name for line in listed if "/opt/carme/apps/" in line}
        missing = definition.entry_points.keys() - {*OWN_APPS, *programs}
        if missing:
            name = min(missing)
            raise BuildError(
                f"{definition.name}.def offers '{name}', but the image has no /opt/carme/apps/{name}. "
                "Install it in %post, or remove the label."
            )

    def files_in(self, image: Path, folder: str) -> list[str]:
        """All that lies below a folder of an image."""
        squashfs = ["unsquashfs", "-lc", "-offset", str(self.offset(image)), str(image), folder]
        return subprocess.run(squashfs, capture_output=True, text=True, check=False).stdout.splitlines()

    def packages(self, image: Path) -> dict[str, str]:
        """The Python packages of an image with their versions, as the names of their metadata have them.

        See the Python Packaging User Guide, "Recording installed projects".
        """
        metadata = re.compile(r"/site-packages/([^/]+)-([^/-]+)\.(?:dist|egg)-info(?:/|$)")
        found = {
            m[1].replace("_", "-"): m[2] for m in map(metadata.search, self.files_in(image, ENVIRONMENT)) if m
        }
        return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))

    def added(self, name: str, key: str, suffix: str) -> Entry:
        """What was just put into the cache."""
        entry = self.cache.find(name, key, suffix)
        if entry is None:
            raise BuildError(f"'{name}' cannot be read back from {self.cache.folder}. Check that disk.")
        return entry

    def offset(self, image: Path) -> int:
        """Where in the file the image's file system begins."""
        listing = subprocess.run(
            ["apptainer", "sif", "list", str(image)], capture_output=True, text=True, check=True
        )
        start = re.search(r"\|(\d+)-\d+\s*\|FS \(Squashfs/\*System", listing.stdout)
        if start is None:
            raise BuildError(f"{image} holds no file system that can be read. Build with --fresh.")
        return int(start[1])

    def unpack(self, image: Path, folder: Path) -> Path:
        """Unpack an image into a folder.

        Apptainer would do so itself, but not where root lacks a capability, as in many containers.
        """
        command = ["unsquashfs", "-quiet", "-no-progress", "-offset", str(self.offset(image))]
        self.run([*command, "-dest", str(folder), str(image)], folder.parent)
        return folder

    def debian(self) -> Path:
        """The tar of the Debian packages, from the cache if it is there."""
        key = self.debian_key()
        entry = None if self.options.fresh else self.cache.find("debian", key, ".tar")
        if entry:
            return entry.file
        self.report("debian: fetching and unpacking packages")
        with self.cache.adding("debian", key, ".tar") as file:
            command = [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                f"--include={','.join(debian_packages())}",
            ]
            for unwanted in ("man", "doc", "info", "locale"):
                command.append(f"--dpkgopt=path-exclude=/usr/share/{unwanted}/*")
            command += ["--dpkgopt=path-include=/usr/share/doc/*/copyright"]
            self.run([*command, SUITE, str(file), *self.sources], self.cache.folder)
        return self.added("debian", key, ".tar").file

    def prepare(self, folder: Path, definition: Definition) -> list[tuple[Path, str]]:
        """Fill the folder that the build sees as /mnt; return all binds, that folder's first.

        Local folders that pip's configuration names are bound below /mnt and the configuration is rewritten,
        so that no empty mount points stay behind in the image.
        """
        shown = folder / "mnt"
        (shown / "pip-cache").mkdir(parents=True)
        binds = [(shown, "/mnt")]
        (self.cache.folder / "pip").mkdir(exist_ok=True)
        binds.append((self.cache.folder / "pip", "/mnt/pip-cache"))
        for name in definition.sources:
            shutil.copytree(SOURCES[name], shown / "src" / name, ignore=SKIPPED)
        shutil.copyfile(ca_bundle(), shown / "ca.crt")
        npmrc = Path("~/.npmrc").expanduser()
        (shown / "npmrc").write_bytes(npmrc.read_bytes() if npmrc.is_file() else b"")

        targets: dict[Path, str] = {}

        def inside(place: str) -> str:
            """The same place as the build sees it."""
            path = unquote(urlsplit(place).path) if place.startswith("file://") else place
            if not path.startswith("/") or not Path(path).is_dir():
                return place
            # An index's pages refer to files beside them: bind the folder above the index.
            root = Path(path).resolve()
            top = root.parent if root.name == "simple" else root
            if top not in targets:
                targets[top] = f"/mnt/local/{len(targets)}"
                (shown / targets[top].removeprefix("/mnt/")).mkdir(parents=True)
                binds.append((top, targets[top]))
            mapped = str(Path(targets[top], root.relative_to(top)))
            return f"file://{mapped}" if place.startswith("file://") else mapped

        settings = pip_settings()
        for name in ("find-links", "index-url", "extra-index-url"):
            if name in settings:
                settings[name] = " ".join(inside(place) for place in settings[name].split())
        settings |= {
            "cert": "/mnt/ca.crt",
            "cache-dir": "/mnt/pip-cache",
            "disable-pip-version-check": "true",
            # The definitions compile at their end, with all processors.
            "no-compile": "true",
            # Else every index that lacks a package is a warning.
            "quiet": "2",
        }
        for unwanted in ("verbose", "user", "target", "prefix", "require-virtualenv", "client-cert"):
            settings.pop(unwanted, None)
        lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items())]
        (shown / "pip.conf").write_text("\n".join(lines) + "\n")
        return binds

    def run(self, command: list[str], temporary: Path) -> None:
        """Run a command with its output on standard error; temporary: a roomy folder for what it unpacks."""
        environment = dict(os.environ)
        # Apptainer and its %post get nothing of the caller's own environment but what /mnt holds.
        for name in list(environment):
            if name.startswith(("PIP_", "APPTAINER", "SINGULARITY", "PYTHON")):
                del environment[name]
        environment |= {
            "APPTAINER_TMPDIR": str(temporary),
            "TMPDIR": str(temporary),
            "DEBIAN_FRONTEND": "noninteractive",
        }
        if not may_raise_limits():
            environment["APPTAINER_DROP_CAPS"] = "CAP_SYS_RESOURCE"
        try:
            subprocess.run(command, check=True, env=environment, stdout=sys.stderr, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            raise BuildError(
                f"The program '{command[0]}' is not installed. Install the package of that name."
            ) from None
        except subprocess.CalledProcessError as error:
            raise BuildError(
                f"{command[0]} failed with exit code {error.returncode}. Its own messages above say why."
            ) from None

    def publish(self, definition: Definition, entry: Entry) -> None:
        """Put image and manifest where the platform reads them; nobody ever sees half a file."""
        if self.is_published(definition, entry):
            return
        self.output.mkdir(parents=True, exist_ok=True)
        image = self.output / f"{definition.name}.sif"
        unfinished = image.with_name(f".{image.name}.unfinished")
        shutil.copyfile(entry.file, unfinished)
        unfinished.chmod(0o644)
        unfinished.rename(image)
        manifest = definition.manifest(entry.digest, entry.built)
        manifest["packages"] = self.packages(entry.file)
        replace(image.with_suffix(".json"), (json.dumps(manifest, indent=2) + "\n").encode())
