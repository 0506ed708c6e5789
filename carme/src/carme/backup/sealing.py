"""Encryption of a backup, piece by piece, so that it needs no room of its size.

A file is `MAGIC`, a salt of 16 bytes, and pieces. Each piece is its length in 4 bytes and AES-256-GCM of at
most `PIECE` bytes. The nonce is the piece's number and whether it is the last one, so nothing can be cut off,
moved or added without being noticed. The key is derived from the key file and the salt.
"""

import os
from pathlib import Path
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from carme.errors import CarmeError

__all__ = ["Opened", "Sealed", "make_key", "read_key"]

MAGIC = b"CARME-BACKUP-1\n"
PIECE = 1 << 20
TAG = 16
SALT = 16
LEAST_KEY = 32  # bytes


def make_key(path: Path) -> None:
    """Write a new key that only its owner can read. Raises CarmeError when the file is there already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise CarmeError(f"The key {path} cannot be made: {error.strerror}.", "Name another file.") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(os.urandom(LEAST_KEY).hex() + "\n")


def read_key(path: Path) -> bytes:
    """The key in a file. Raises CarmeError when it cannot be read, is short, or others can read it."""
    try:
        with path.open("rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read().strip()
    except OSError as error:
        raise CarmeError(
            f"The key {path} cannot be read: {error.strerror}.", "Make one with: carme-backup key FILE"
        ) from None
    if len(key) < LEAST_KEY:
        raise CarmeError(
            f"The key {path} has {len(key)} bytes; a safe one has {LEAST_KEY} or more.",
            "Make one with: carme-backup key FILE",
        )
    if mode & 0o077:
        raise CarmeError(f"Others can read the key {path}.", f"Use: chmod 600 {path}")
    return key


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), 32, salt, b"carme-backup").derive(key))


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11) + bytes([last])


class Sealed:
    """Encrypts what is written to it into `file`."""

    def __init__(self, file: BinaryIO, key: bytes) -> None:
        salt = os.urandom(SALT)
        self._file, self._cipher = file, _cipher(key, salt)
        self._held, self._number = bytearray(), 0
        file.write(MAGIC + salt)

    def write(self, data: bytes) -> int:
        """Take some bytes."""
        self._held += data
        # One piece stays held, as the last one is marked.
        while len(self._held) > PIECE:
            self._put(bytes(self._held[:PIECE]), last=False)
            del self._held[:PIECE]
        return len(data)

    def close(self) -> None:
        """Write the last piece; the file itself stays open."""
        self._put(bytes(self._held), last=True)

    def _put(self, piece: bytes, last: bool) -> None:
        sealed = self._cipher.encrypt(_nonce(self._number, last), piece, MAGIC)
        self._file.write(len(sealed).to_bytes(4) + sealed)
        self._number += 1


class Opened:
    """Decrypts what is read of `file`. Raises CarmeError for another key, and for a file that was changed."""

    def __init__(self, file: BinaryIO, key: bytes) -> None:
        if file.read(len(MAGIC)) != MAGIC:
            raise CarmeError("This is not a backup of Carme.", "Name a file that carme-backup create made.")
        self._file, self._cipher = file, _cipher(key, file.read(SALT))
        self._held, self._number, self._ended = bytearray(), 0, False

    def read(self, size: int = -1) -> bytes:
        """The next bytes; fewer than `size` only at the end."""
        while not self._ended and (size < 0 or len(self._held) < size):
            self._read_piece()
        size = len(self._held) if size < 0 else size
        part = bytes(self._held[:size])
        del self._held[:size]
        return part

    def _read_piece(self) -> None:
        length = int.from_bytes(self._file.read(4))
        sealed = self._file.read(length) if TAG <= length <= PIECE + TAG else b""
        for last in (False, True):
            try:
                self._held += self._cipher.decrypt(_nonce(self._number, last), sealed, MAGIC)
            except (InvalidTag, ValueError):
                continue
            self._number, self._ended = self._number + 1, last
            return
        raise CarmeError(
            "The backup cannot be opened: it has another key, or the file is not complete.",
            "Use the key that it was made with, or another backup.",
            code="sealed",
        )
