"""`carme-images`: keeps a node's own copies of the images equal to the catalogue.

Copies are root's; anyone who runs a job can read them and nothing else.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from carme import wording
from carme.config import load
from carme.errors import CarmeError
from carme.images.catalogue import Image, ImageCatalogue
from carme.launch.images import COPIES, digest_of

GIB = 1 << 30
_BLOCK = 4 << 20


def refresh(catalogue: ImageCatalogue, copies: Path, limit_bytes: int) -> list[str]:
    """Make the copies equal to the catalogue; what was done, one sentence each.

    A file that a job has open stays readable for it after it was replaced or removed.

    Args:
        catalogue: The site's images.
        copies: The node's folder; is made if it is missing.
        limit_bytes: What all copies together may take. The newest images come first, the rest is not copied.

    Raises:
        CarmeError: The folder does not belong to this user alone.
    """
    copies.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = copies.lstat()
    if copies.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CarmeError(
            f"Others than user {os.getuid()} may write to {copies}.",
            f"Make it a folder of root with mode 0755: chown root: {copies} && chmod 755 {copies}.",
        )
    done: list[str] = []
    images = sorted(
        (catalogue.get(name) for name in catalogue.names()),
        key=lambda image: image.built.timestamp() if image.built else 0.0,
        reverse=True,
    )
    saved: list[Image] = []
    room = limit_bytes
    for image in images:
        size = image.file.stat().st_size
        if size <= room:
            room -= size
            saved.append(image)
        else:
            done.append(f"{image.name}: no room for its {wording.size(size)}")
    wanted = {file for image in saved for file in (image.file.name, f"{image.name}.json")}
    for file in copies.iterdir():
        if file.name not in wanted:
            done.append(f"{file.name}: removed")
            # The manifest goes first: a copy without one is never used.
            file.with_suffix(".json").unlink(missing_ok=True)
            file.unlink(missing_ok=True)
    for image in saved:
        copy = copies / image.file.name
        if not copy.is_file() or digest_of(str(copy)) != image.digest:
            done.append(f"{image.name}: {_copy(image, copy)}")
    return done


def _copy(image: Image, copy: Path) -> str:
    manifest = copy.with_suffix(".json")
    manifest.unlink(missing_ok=True)
    unfinished = copy.with_name(f".{copy.name}")
    digest = hashlib.sha256()
    try:
        with image.file.open("rb") as source, unfinished.open("wb") as target:
            while block := source.read(_BLOCK):
                digest.update(block)
                target.write(block)
            os.fsync(target.fileno())
        if f"sha256:{digest.hexdigest()}" != image.digest:
            return "not copied, its file is not what its manifest says"
        unfinished.chmod(0o644)
        unfinished.rename(copy)
    finally:
        unfinished.unlink(missing_ok=True)
    unfinished = manifest.with_name(f".{manifest.name}")
    unfinished.write_text(json.dumps({"digest": image.digest}) + "\n", encoding="utf-8")
    unfinished.chmod(0o644)
    unfinished.rename(manifest)
    return f"copied, {wording.size(copy.stat().st_size)}"


def main(arguments: list[str] | None = None) -> int:
    """Bring this node's copies up to date; the exit code."""
    parser = argparse.ArgumentParser(
        prog="carme-images",
        description="Bring this node's copies of the job images up to date. Run it as root.",
    )
    parser.add_argument("--copies", type=Path, default=Path(COPIES), help="default: %(default)s")
    parser.add_argument(
        "--limit-gb", type=float, default=0.0, help="in GiB; 0: up to half of what is free there"
    )
    options = parser.parse_args(arguments)
    try:
        options.copies.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            descriptor = os.open(options.copies, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            limit = int(options.limit_gb * GIB) or _half_of_free(options.copies)
            for line in refresh(ImageCatalogue(load().images.directory), options.copies, limit):
                print(line, flush=True)
    except (CarmeError, OSError) as error:
        print(f"carme-images: {error}", file=sys.stderr)
        return 1
    return 0


def _half_of_free(copies: Path) -> int:
    held = sum(file.stat().st_size for file in copies.iterdir())
    return (shutil.disk_usage(copies).free + held) // 2
