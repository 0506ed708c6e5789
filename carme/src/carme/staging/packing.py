"""A folder of many files as one image, which jobs mount."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.staging import tree
from carme.staging.comparing import compare
from carme.staging.digests import algorithm
from carme.staging.options import COMPRESSIONS, Options, Problem, Result
from carme.translation import message as _

__all__ = ["check_image", "pack_image"]

_COMPRESSING = {
    "zstd": ["-comp", "zstd", "-Xcompression-level", "3"],
    "lz4": ["-comp", "lz4"],
    "none": ["-noI", "-noD", "-noF", "-noX"],
}


def pack_image(
    source: str,
    image: str,
    compression: str,
    options: Options,
    *,
    notify: Callable[[Any], None] | None,
    workers: int,
) -> Result:
    """See carme.staging.pack."""
    start = time.monotonic()
    source, image, program = _checked(source, image, compression)
    writing = os.path.join(os.path.dirname(image), tree.partial_name(os.path.basename(image)))
    name, _factory = algorithm(options.hash, strong=True)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(writing)
        _make(program, source, writing, compression, workers)
        result, verified = _verified(source, writing, image, options, notify, workers)
        if not result.ok:
            raise CarmeError(
                _("The image differs from the folder; the differences are listed above."),
                _(
                    "If somebody changes the folder at the moment, wait until that is over, then run the "
                    "same command again."
                ),
            )
        about = {
            "name": os.path.basename(image),
            "source": os.fsencode(source).decode(errors="replace"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "size": os.stat(writing).st_size,
            "algorithm": name,
            "digest": _digest(writing, name),
            "files": result.counts.unchanged,
            "bytes": result.counts.bytes_unchanged,
            "compression": compression,
            "verified": verified,
        }
        _replace(f"{image}.json", json.dumps(about, indent=2) + "\n")
        os.rename(writing, image)
    except OSError as error:
        raise CarmeError(
            _("The image could not be written: {why}.", why=tree.reason(error)),
            _("Fix that, then run it again."),
        ) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(writing)
    result.counts.copied, result.counts.unchanged = result.counts.unchanged, 0
    result.counts.bytes_copied, result.counts.bytes_unchanged = result.counts.bytes_unchanged, 0
    result.hash = name
    result.seconds = time.monotonic() - start
    return result


def _checked(source: str, image: str, compression: str) -> tuple[str, str, str]:
    """The real paths of folder and image, and the program that packs. Raises CarmeError."""
    if compression not in COMPRESSIONS:
        raise InvalidRequest(
            _("There is no compression called {compression!r}.", compression=compression),
            _("Choose from {compressions}.", compressions=", ".join(COMPRESSIONS)),
        )
    source, image = os.path.realpath(source), os.path.realpath(image)
    if not os.path.isdir(source):
        raise NotFound(
            _("There is no folder {source}.", source=tree.shown(source)),
            _("Name the folder to pack."),
        )
    if os.path.isdir(image):
        raise InvalidRequest(
            _("The image {image} is a folder.", image=tree.shown(image)),
            _("Name the image's file, for example data.sqsh."),
        )
    if os.path.commonpath([source, image]) == source:
        raise InvalidRequest(
            _("The image {image} is inside the folder to pack.", image=tree.shown(image)),
            _("Name a file outside of it."),
        )
    program = shutil.which("mksquashfs")
    if program is None:
        raise CarmeError(_("Packing needs mksquashfs, which is not installed."), _("Install squashfs-tools."))
    return source, image, program


def _make(program: str, source: str, writing: str, compression: str, workers: int) -> None:
    """Run mksquashfs. Raises CarmeError."""
    packed = subprocess.run(
        [
            program, source, writing, "-noappend", "-no-progress", "-quiet", "-exit-on-error",
            "-processors", str(workers), *_COMPRESSING[compression],
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )  # fmt: skip
    if packed.returncode:
        message = [line.strip() for line in packed.stdout.splitlines() if line.strip()]
        last = tree.shown(message[-1] if message else "nothing")
        raise CarmeError(
            _("The image could not be made: mksquashfs reported: {last}.", last=last),
            _("Fix that, then run the same command again."),
        )


def check_image(image: str, *, notify: Callable[[Any], None] | None) -> Result:
    """Whether an image still has the digest that was written down when it was packed."""
    start = time.monotonic()
    try:
        with open(f"{image}.json", encoding="utf-8") as file:
            about = json.load(file)
        name, wanted = str(about["algorithm"]), str(about["digest"])
        result = Result(hash=name, workers=1)
        if _digest(image, name) != wanted:
            problem = Problem(os.path.basename(image), "it is not the image that was packed")
            result.problems.append(problem)
            result.counts.different += 1
            if notify:
                notify(problem)
        else:
            result.counts.unchanged = 1
            result.counts.bytes_unchanged = os.stat(image).st_size
    except FileNotFoundError as error:
        raise NotFound(
            _("There is no file {file}.", file=tree.shown(error.filename)),
            _("Name an image that carme data pack created, or a source and its copy."),
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = tree.reason(error) if isinstance(error, OSError) else "it is not what carme data pack writes"
        raise CarmeError(
            _("{image}.json cannot be used: {why}.", image=tree.shown(image), why=why),
            _("Pack the image again."),
        ) from None
    result.seconds = time.monotonic() - start
    return result


def _verified(
    source: str,
    writing: str,
    image: str,
    options: Options,
    notify: Callable[[Any], None] | None,
    workers: int,
) -> tuple[Result, bool]:
    """Compare the image with the folder and write its index; whether it could be mounted for that."""
    with contextlib.ExitStack() as opened, _partial(f"{image}.index") as file:

        def index(path: str, size: int, digest: str) -> None:
            # As in JSON of the command: bytes that are not UTF-8 become \udcXX.
            file.write(json.dumps({"path": path, "size": size, "digest": digest}) + "\n")

        place = opened.enter_context(_mounted(writing))
        result = compare(
            source, place or source, options, index, notify=notify, workers=workers, seconds=True
        )
    if place is None:
        result.warnings.append("the image was not compared with the folder: squashfuse is not installed")
    return result, place is not None


@contextlib.contextmanager
def _mounted(image: str) -> Iterator[str | None]:
    """The image's contents, as root by the kernel, else by squashfuse; None if it cannot be mounted."""
    commands = []
    if os.geteuid() == 0:
        commands.append((["mount", "-t", "squashfs", "-o", "loop,ro,nosuid,nodev"], ["umount"]))
    if shutil.which("squashfuse"):
        commands.append((["squashfuse"], ["fusermount", "-u"]))
    with tempfile.TemporaryDirectory(prefix="carme-pack-") as place:
        for mount, unmount in commands:
            if subprocess.run([*mount, image, place], capture_output=True).returncode == 0:
                try:
                    yield place
                finally:
                    subprocess.run([*unmount, place], check=True, capture_output=True)
                return
        yield None


@contextlib.contextmanager
def _partial(path: str) -> Iterator[Any]:
    """A text file that appears under its name when it is complete."""
    writing = os.path.join(os.path.dirname(path), tree.partial_name(os.path.basename(path)))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(writing)
    try:
        with open(writing, "x", encoding="ascii") as file:
            yield file
        os.rename(writing, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(writing)


def _replace(path: str, text: str) -> None:
    with _partial(path) as file:
        file.write(text)


def _digest(path: str, name: str) -> str:
    _name, make = algorithm(name)
    digest = make()
    with open(path, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidRequest(_("{path} is not a file.", path=tree.shown(path)), _("Name an image."))
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
