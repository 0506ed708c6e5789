"""Datasets that come as one file: an archive that somebody has uploaded becomes a folder."""

import lzma
import os
import re
import shutil
import subprocess
import zipfile
import zlib
from pathlib import Path

from carme.errors import CarmeError, InvalidRequest
from carme.translation import message as _

__all__ = ["folder_of", "unpack"]

_ENDINGS = re.compile(r"\.(tar|tgz|tbz2?|txz|zip|tar\.(gz|bz2|xz))$", re.IGNORECASE)
#: What unpacking says of archives it cannot read; a RuntimeError is of those with a password, or packed in a
#: way that is unknown here.
_BROKEN = (zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)


def folder_of(archive: str) -> str:
    """The folder beside an archive that is named like it, without `.tar.gz` and the like."""
    return _ENDINGS.sub("", archive) if _ENDINGS.search(archive) else f"{archive}.data"


def unpack(archive: str, into: str = "") -> str:
    """Unpack a tar archive (plain, gzip, bzip2 or xz) or a zip archive.

    Nothing in it is written outside of the folder, and the folder is there whole or not at all. Where all of
    the archive is in one folder, that becomes the folder.

    Args:
        archive: The file.
        into: The folder, which must not be there yet; empty: `folder_of` the archive.

    Returns:
        The folder.

    Raises:
        CarmeError: It is no such archive, or damaged, or leads outside, or cannot be written.
    """
    into = os.path.realpath(into or folder_of(archive))
    if os.path.lexists(into):
        raise InvalidRequest(
            _("{into} already exists, so {archive} is not unpacked there.", into=into, archive=archive),
            _("Add that folder, or name another one with --into."),
            field="into",
        )
    draft = Path(f"{into}.unpacking-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        try:
            _extract(archive, draft)
            entries = list(draft.iterdir())
            alone = entries[0] if len(entries) == 1 and entries[0].is_dir() else None
            whole = alone if alone is not None and not alone.is_symlink() else draft
            whole.rename(into)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except _BROKEN as error:
        raise CarmeError(
            _("{archive} cannot be unpacked: {error}.", archive=archive, error=error or type(error).__name__),
            _("Pack it anew as tar (also with gzip, bzip2, xz) or zip, without a password, and upload that."),
        ) from None
    except OSError as error:
        raise CarmeError(
            _(
                "{archive} cannot be unpacked into {into}: {why}.",
                archive=archive,
                into=into,
                why=error.strerror or error,
            ),
            _("Check that there is enough space and that you may write there."),
        ) from None
    return into


def _extract(archive: str, draft: Path) -> None:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(draft)  # leaves out `..` and what makes a path absolute
        return
    # GNU tar refuses names with `..`, makes absolute ones relative, and lets nothing be written through the
    # archive's own links. Python's own can do so only since 3.11.4. A name with a colon is no other host.
    words = ["tar", "--extract", "--force-local", "--no-same-owner", "--no-same-permissions"]
    done = subprocess.run(
        [*words, f"--file={Path(archive).absolute()}", f"--directory={draft}"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        message = [line for line in done.stderr.splitlines() if "exiting now" not in line.lower()]
        raise EOFError((message or done.stderr.splitlines() or ["tar failed"])[0][:200].rstrip("."))
