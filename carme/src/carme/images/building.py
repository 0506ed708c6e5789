"""`carme-build-image`: builds a user's own image, in a batch job of that user's and with no more rights.

A definition may do what it likes: its `%setup` runs on the node, its `%post` in a user namespace, both as the
user. So nothing that comes out of a build is trusted: anyone who starts a job in the image gets its digest.
"""

import configparser
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from carme.errors import CarmeError, InvalidRequest
from carme.images.catalogue import ImageCatalogue
from carme.launch.images import local_copy
from carme.wording import size

__all__ = ["MAXIMUM_TEXT", "Built", "ImageRecipe", "build_command", "check_text", "main"]

MAXIMUM_TEXT = 64 * 1024
#: The file of the request that says what is to be built.
RECIPE = "image.json"
#: Programs of the images' base that every job in a container begins with.
NEEDED = ("carme-agent", "carme-singleuser")
_PROGRAM = "carme-build-image"
_BLOCK = 4 << 20
_CERTIFICATES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
#: The same steps as in the site's own definitions; the requirements are a file, never part of a command.
_REQUIREMENTS = """\
Bootstrap: localimage
From: {{{{ {base} }}}}

%post
    set -e
    export PIP_CONFIG_FILE=/mnt/pip.conf SSL_CERT_FILE=/mnt/ca.crt
    /opt/carme/env/bin/pip install --no-cache-dir --requirement /mnt/requirements.txt
    /opt/carme/finish
"""


class ImageRecipe(BaseModel):
    """What is to be built.

    Attributes:
        text: The definition, or the lines of a requirements file for pip.
        base: The image of the site on which requirements are installed.
        file: Where the image goes; nothing is replaced there.
        shared: Whether others than the owner shall be able to read it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["definition", "requirements"]
    text: str = Field(min_length=1, max_length=MAXIMUM_TEXT)
    base: str = ""
    file: str
    shared: bool = False


#: Short enough for a table, and one line.
_Words = Annotated[str, Field(max_length=200)]


class Built(BaseModel):
    """What a build leaves as its job's result; the job's owner could have written anything here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0, lt=2**63)
    description: Annotated[str, Field(max_length=500)] = ""
    entry_points: Annotated[dict[_Words, _Words], Field(max_length=50)] = {}
    packages: Annotated[dict[_Words, _Words], Field(max_length=5000)] = {}


def build_command() -> list[str]:
    """The command of the job that builds; it is where `carme-job` is, too."""
    # Isolated, because the job's environment is its owner's.
    return [sys.executable, "-I", str(Path(sysconfig.get_path("scripts")) / _PROGRAM)]


def check_text(kind: str, text: str) -> None:
    """See that a text can be a definition or a list of requirements. Raises InvalidRequest."""
    if not text.strip() or len(text) > MAXIMUM_TEXT or "\0" in text:
        raise InvalidRequest(
            f"The text is empty, or has more than {MAXIMUM_TEXT} characters, or is not text.",
            "Write a definition, or a requirement in each line.",
            field="text",
        )
    if kind == "definition" and not re.search(r"(?im)^\s*bootstrap\s*:", text):
        raise InvalidRequest(
            "A definition begins with a line that names its source ('Bootstrap:'), but this one has none.",
            "Begin it with: Bootstrap: localimage, and in the next line From: {{ base }}.",
            field="text",
        )


def main() -> int:
    """Build what the job's folder says; the exit code."""
    folder = Path(os.environ.get("CARME_JOB_FOLDER", "."))
    try:
        recipe = ImageRecipe.model_validate_json((folder / "files" / RECIPE).read_bytes())
        from carme.config import load

        built = build(recipe, ImageCatalogue(load().images.directory))
        (folder / "result").write_text(built.model_dump_json(), encoding="utf-8")
    except (CarmeError, OSError, ValidationError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(f"{_PROGRAM}: {recipe.file} is ready, {size(built.size)}, {built.digest}.")
    return 0


def build(recipe: ImageRecipe, catalogue: ImageCatalogue) -> Built:
    """Build an image and put it where it belongs.

    Raises:
        CarmeError: The build failed, or the image cannot be put there.
    """
    target = Path(recipe.file)
    with tempfile.TemporaryDirectory(prefix="carme-image-") as temporary:
        folder = Path(temporary)
        image = folder / "image.sif"
        _report_step("building")
        _run_build(recipe, catalogue, folder, image)
        _report_step("looking at what is in it")
        _check_programs(image)
        labels = _labels(image)
        packages = _packages(image)
        _report_step(f"copying it to {target}")
        digest = _put(image, target, shared=recipe.shared)
        return Built(
            digest=digest,
            size=image.stat().st_size,
            description=labels.get("carme.description", "")[:500],
            entry_points=_entry_points(labels, image),
            packages=packages,
        )


def _run_build(recipe: ImageRecipe, catalogue: ImageCatalogue, folder: Path, image: Path) -> None:
    text = recipe.text if recipe.kind == "definition" else _REQUIREMENTS.format(base=recipe.base)
    (folder / "image.def").write_text(text, encoding="utf-8")
    arguments: list[str] = []
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for name in sorted(set(re.findall(r"\{\{\s*([\w.-]+)\s*\}\}", code)) & set(catalogue.names())):
        arguments += ["--build-arg", f"{name}={local_copy(str(catalogue.get(name).file))}"]
    shown = folder / "mnt"
    shown.mkdir()
    (shown / "requirements.txt").write_text(
        recipe.text + "\n" if recipe.kind == "requirements" else "", encoding="utf-8"
    )
    certificates = next((path for path in _certificates() if Path(path).is_file()), None)
    if certificates:
        shutil.copyfile(certificates, shown / "ca.crt")
    (shown / "pip.conf").write_text(_pip_configuration(Path("/etc/pip.conf")), encoding="utf-8")
    (folder / "tmp").mkdir()
    # mksquashfs would take a quarter of the machine's memory and all its processors, the job has less.
    squash = f"-comp zstd -Xcompression-level 3 -mem 512M -processors {len(os.sched_getaffinity(0))}"
    command = [
        *["apptainer", "build", "--force", "--mksquashfs-args", squash, "--bind", f"{shown}:/mnt"],
        *arguments,
        *[str(image), str(folder / "image.def")],
    ]
    environment = os.environ | {"APPTAINER_TMPDIR": str(folder / "tmp"), "TMPDIR": str(folder / "tmp")}
    environment["APPTAINER_CACHEDIR"] = str(folder / "cache")
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise CarmeError(
            f"Apptainer cannot be started on {socket.gethostname()}: {error.strerror}.",
            "Tell an administrator.",
            code="image",
        ) from None
    if done.returncode or not image.is_file():
        raise CarmeError(
            f"The build failed with exit code {done.returncode}.",
            "The lines above say why: correct the text, and build again.",
            code="image",
        )


def _certificates() -> list[str]:
    return [*filter(None, [os.environ.get("SSL_CERT_FILE")]), *_CERTIFICATES]


def _pip_configuration(file: Path) -> str:
    """What a build needs of the node's configuration of pip: where packages are, but no folders."""
    known = configparser.RawConfigParser()
    with contextlib.suppress(configparser.Error):
        known.read(file)
    saved = {"cert": "/mnt/ca.crt", "disable-pip-version-check": "true", "root-user-action": "ignore"}
    for name in ("index-url", "extra-index-url", "find-links", "trusted-host", "timeout", "retries"):
        words = known.get("global", name, fallback="").split()
        places = [word for word in words if "/" not in word or word.startswith(("http://", "https://"))]
        if places:
            saved[name] = " ".join(places)
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in saved.items())]) + "\n"


def _inside(image: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = ["apptainer", "-q", "exec", "--contain", "--cleanenv", "--no-home", "--pwd", "/", str(image)]
    return subprocess.run(
        [*words, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _check_programs(image: Path) -> None:
    missing = [
        name
        for name in NEEDED
        if _inside(image, "sh", "-c", 'command -v "$1" >/dev/null', "sh", name).returncode
    ]
    if missing:
        raise CarmeError(
            f"The image has no {missing[0]}, without which nothing starts in it.",
            "Build it from an image of the site: Bootstrap: localimage, From: {{ base }}.",
            code="image",
        )


def _labels(image: Path) -> dict[str, str]:
    done = subprocess.run(
        ["apptainer", "inspect", "--json", "--labels", str(image)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found = json.loads(done.stdout)["data"]["attributes"]["labels"] or {}
        return {str(name): str(value) for name, value in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _entry_points(labels: dict[str, str], image: Path) -> dict[str, str]:
    """The apps that the labels offer and that are there; `lab` and `terminal` are the server's own."""
    prefix = "carme.entry-point."
    offered = {name.removeprefix(prefix): title for name, title in labels.items() if name.startswith(prefix)}
    listed = _inside(image, "ls", "/opt/carme/apps").stdout.split()
    saved = {
        name: title[:200]
        for name, title in sorted(offered.items())
        if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) and name in ("lab", "terminal", *listed)
    }
    return dict(list(saved.items())[:50]) or {"lab": "JupyterLab"}


def _packages(image: Path) -> dict[str, str]:
    done = _inside(image, "python", "-s", "-m", "pip", "list", "--format=json", "--disable-pip-version-check")
    try:
        rows = json.loads(done.stdout)
        found = {str(row["name"])[:200]: str(row["version"])[:200] for row in rows}
    except (ValueError, KeyError, TypeError):
        return {}
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower())[:5000])


def _put(image: Path, target: Path, *, shared: bool) -> str:
    """Copy the image, which appears there whole or not at all; its digest."""
    partial = target.with_name(f".{target.name}.partial")
    digest = hashlib.sha256()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with image.open("rb") as source, os.fdopen(os.open(partial, flags, 0o600), "wb") as copy:
            while block := source.read(_BLOCK):
                digest.update(block)
                copy.write(block)
            os.fchmod(copy.fileno(), 0o644 if shared else 0o600)
            os.fsync(copy.fileno())
        os.link(partial, target)  # unlike a rename, it replaces nothing
    except OSError as error:
        raise CarmeError(
            f"The image cannot be put to {target}: {error.strerror}.",
            "Choose another folder, or check that there is space left.",
            code="image",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return f"sha256:{digest.hexdigest()}"


def _report_step(what: str) -> None:
    print(f"{_PROGRAM}: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
