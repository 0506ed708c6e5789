"""The frames of a journal: a length, a checksum, and a pickled list of entries.

What a killed program has not written whole is not a frame.
"""

import errno
import os
import pickle
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from carme_runtime.petri.errors import PetriError

_HEAD = struct.Struct("<QI")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def encode_frame(entries: list[Any]) -> bytes:
    """The bytes of a frame."""
    payload = pickle.dumps(entries, 5)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def frames_of(data: bytes) -> Iterable[tuple[list[Any], int]]:
    """The entries of each whole frame, with the offset of its end."""
    offset = 0
    while offset + _HEAD.size <= len(data):
        size, check = _HEAD.unpack_from(data, offset)
        payload = data[offset + _HEAD.size : offset + _HEAD.size + size]
        if len(payload) < size or zlib.crc32(payload) != check:
            return
        offset += _HEAD.size + size
        yield pickle.loads(payload), offset


def header_of(file: Path) -> dict[str, Any]:
    """What a journal says of its net.

    Raises:
        PetriError: It is damaged, or another user's.
    """
    for entries, _ in frames_of(bytes_of(file)):
        return entries[0][1]
    raise PetriError(f"The journal in {file.parent} is damaged: it has no beginning.", "Start a new run.")


def bytes_of(file: Path, kind: str = "journal") -> bytes:
    """All that a file has which is to be unpickled.

    Args:
        file: Of a journal, or of
        kind: What it is.

    Raises:
        PetriError: It cannot be read, or is another user's.
    """
    try:
        with file.open("rb") as opened:
            # What it holds is unpickled, which may run anything that its owner has written there.
            if os.fstat(opened.fileno()).st_uid != os.getuid():
                raise PetriError(
                    f"The {kind} in {file.parent} belongs to another user.",
                    "Ask its owner for what it says.",
                )
            return opened.read()
    except OSError as error:
        raise unusable_journal(file.parent, error, kind) from error


def unusable_journal(folder: Path, error: OSError, kind: str = "journal") -> PetriError:
    """What to say of a journal that an operation of the system failed on."""
    if error.errno in _FULL:
        return PetriError(
            f"The disk under the journal in {folder} is full; the run stands as it was last written.",
            "Free some room and resume it.",
        )
    return PetriError(
        f"The {kind} in {folder} cannot be used: {error.strerror or error}.",
        "See that the folder is there and yours, and resume the run.",
    )
