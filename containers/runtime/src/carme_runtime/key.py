"""The job's key: reading it, and proving to a peer that one holds it without showing it.

Both sides send a random challenge; each answers with an HMAC-SHA256 over both challenges and its own role.
The role in the MAC makes a mirrored answer worthless, the protocol's name one from another conversation.
"""

import stat
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError

MINIMUM_KEY_BYTES = 16


def read_key(path: Path) -> bytes:
    """The key in `path`, which must be readable by its owner alone and hold at least 16 bytes."""
    key = read_private(path, "key file", "Name the file that holds the job's key.").strip()
    if len(key) < MINIMUM_KEY_BYTES:
        raise CarmeRuntimeError(
            f"The key file {path} holds {len(key)} bytes, a key has {MINIMUM_KEY_BYTES} or more.",
            "Write 64 random hex digits into it.",
        )
    return key


def read_private(path: Path, kind: str, remedy: str) -> bytes:
    """What the file `path`, a `kind`, holds. Raises CarmeRuntimeError when others can open it."""
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise CarmeRuntimeError(
                f"The {kind} {path} is open to other users, it must be readable by its owner alone.",
                f"Make a new one, and use: chmod 600 {path}",
            )
        return path.read_bytes()
    except OSError as error:
        raise CarmeRuntimeError(f"The {kind} {path} cannot be read: {error.strerror}.", remedy) from None


def proof(key: bytes, protocol: str, role: str, challenges: bytes) -> bytes:
    """What only a holder of `key` in this `role` of this `protocol` can answer to `challenges`."""
    import hashlib  # here, because an agent reads its key long before it proves anything
    import hmac

    return hmac.new(key, f"{protocol}\0{role}\0".encode() + challenges, hashlib.sha256).digest()
