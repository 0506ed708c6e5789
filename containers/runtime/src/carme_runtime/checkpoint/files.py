"""Checkpoints as folders: `step-0000000100.0` with an index and one file per rank that wrote it.

A checkpoint is written in a folder of another name, which rank 0 renames when all of it is on the disk. All
names that begin with a dot are of checkpoints that are being written or removed.
"""

import hashlib
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from carme_runtime.checkpoint.stream import Layout, pack, unpack
from carme_runtime.collectives.errors import GaspiError, Mismatch, Timeout

_NAME = re.compile(r"step-(\d+)\.(\d+)")
_FORMAT = 1
_DIGEST = hashlib.sha256
_PIECE = 4 << 20  # bytes read and hashed at once
_POLL_SECONDS = 0.02
_READERS = 4
INDEX = "index"
FAILED = "failed"


class Damaged(GaspiError):
    """A checkpoint does not hold what was written."""


def found(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the newest first."""
    named = [(match, entry) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))]
    return [entry for _, entry in sorted(named, key=lambda pair: _order(pair[0]), reverse=True)]


def step_of(checkpoint: Path) -> int:
    """The step at which it was written."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match
    return int(match[1])


def _order(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1]), int(match[2])


def write_share(partial: Path, rank: int, pieces: Iterable[np.ndarray], layout: Layout) -> None:
    """Write a rank's bytes, and then, in a second file, their digest and that of the layout."""
    partial.mkdir(exist_ok=True)
    digest = _DIGEST()

    def write(descriptor: int) -> None:
        for piece in pieces:
            digest.update(piece.data)
            _write_all(descriptor, piece.data)

    _write(partial / f"share-{rank}", write)
    message = f"{digest.hexdigest()} {layout.digest()}".encode()
    _write(partial / f"digest-{rank}", lambda descriptor: _write_all(descriptor, message))


def commit(partial: Path, step: int, packed: bytes, layout: Layout, ends: list[int], seconds: float) -> Path:
    """Wait until all ranks have written, and give the checkpoint its name.

    Args:
        partial: The folder that the ranks write into.
        step: Number of the step.
        packed: The structure around the tensors.
        layout: Where the tensors are.
        ends: By rank, the end of its range of the stream.
        seconds: To wait for the others.
    """
    message = _await_digests(partial, len(ends), seconds)
    for rank, (_, of_layout) in enumerate(message):
        if of_layout != layout.digest():
            raise Mismatch(
                f"Rank {rank} saved tensors of other shapes or types than rank 0 at step {step}.",
                "Save the same state on all ranks.",
            )
    body = pack(
        {
            "format": _FORMAT,
            "step": step,
            "structure": packed,
            "tensors": layout.tensors,
            "size": layout.size,
            "ends": ends,
            "digests": [digest for digest, _ in message],
        }
    )
    _write(partial / INDEX, lambda descriptor: _write_all(descriptor, _DIGEST(body).digest() + body))
    for rank in range(len(ends)):
        (partial / f"digest-{rank}").unlink()
    _sync(partial)
    numbers = [
        int(m[2]) for c in found(partial.parent) if (m := _NAME.fullmatch(c.name)) and int(m[1]) == step
    ]
    final = partial.parent / f"step-{step:010d}.{max(numbers, default=-1) + 1}"
    partial.rename(final)
    _sync(partial.parent)
    return final


class Receiver(Protocol):
    """What takes the bytes of a checkpoint."""

    def put(self, begin: int, piece: np.ndarray) -> None:
        """These bytes begin there."""
        ...


Received = TypeVar("Received", bound=Receiver)


def read(checkpoint: Path, receiver: Callable[[bytes, Layout], Received]) -> Received:
    """Read a checkpoint.

    Args:
        checkpoint: Its folder.
        receiver: Makes, of the packed structure and its layout, what takes the bytes, in this thread.

    Returns:
        What `receiver` has made.

    Raises:
        Damaged: Another digest, or a missing file.
    """
    try:
        raw = (checkpoint / INDEX).read_bytes()
        size = _DIGEST().digest_size
        if _DIGEST(raw[size:]).digest() != raw[:size]:
            raise _damaged(checkpoint / INDEX)
        index = unpack(raw[size:])
        received = receiver(index["structure"], Layout(index["tensors"], index["size"]))
        for begin, piece in _pieces(checkpoint, index):
            received.put(begin, piece)
    except OSError as error:
        raise Damaged(
            f"The checkpoint {checkpoint} cannot be read: {error.strerror}.", "Use an older one."
        ) from None
    return received


def _pieces(checkpoint: Path, index: dict[str, Any]) -> Iterator[tuple[int, np.ndarray]]:
    """The bytes of a checkpoint: several shares are read at a time, and at most a piece of each is ahead."""
    begins = [0, *index["ends"]]
    shares = iter(
        _share(checkpoint / f"share-{rank}", begins[rank], end, index["digests"][rank])
        for rank, end in enumerate(index["ends"])
    )
    with ThreadPoolExecutor(_READERS) as readers:
        first = [share for _, share in zip(range(_READERS), shares, strict=False)]
        reading = deque((share, readers.submit(next, share, None)) for share in first)
        while reading:
            share, ahead = reading.popleft()
            found = ahead.result()
            following = share if found else next(shares, None)
            if following:
                reading.append((following, readers.submit(next, following, None)))
            if found:
                yield found


def _share(file: Path, begin: int, end: int, expected: str) -> Iterator[tuple[int, np.ndarray]]:
    """The bytes of a rank's share in pieces. Raises Damaged where they are not those that were written."""
    digest = _DIGEST()
    with file.open("rb", buffering=0) as source:
        while begin < end:
            piece = np.empty(min(_PIECE, end - begin), np.uint8)
            count = source.readinto(piece.data)
            if not count:
                break
            digest.update(piece[:count].data)
            yield begin, piece[:count]
            begin += count
    if begin < end or digest.hexdigest() != expected:
        raise _damaged(file)


def prune(folder: Path, keep: int, newest: Path, overtaken: set[str]) -> None:
    """Remove all but `newest`, which was written last, and those with the highest steps: `keep` in all.

    Those named in `overtaken` with a higher step than `newest` go in any case: training has gone back behind
    them, and must not go on from them after it has ended.
    """
    earlier = [checkpoint for checkpoint in found(folder) if checkpoint.name != newest.name]
    valid = [c for c in earlier if c.name not in overtaken or step_of(c) <= step_of(newest)]
    for old in earlier:
        if old in valid[: keep - 1]:
            continue
        hidden = folder / f".old-{old.name}"
        old.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def clear(folder: Path, left: str, partial: Path) -> None:
    """Remove what has names like `left`, or was being removed when a run ended; but not `partial`."""
    for entry in (*folder.glob(left), *folder.glob(".old-*")):
        if entry.name != partial.name:
            shutil.rmtree(entry, ignore_errors=True)


def raise_if_given_up(partial: Path) -> None:
    """Raises Timeout where a rank has given the checkpoint up."""
    if (partial / FAILED).exists():
        raise Timeout("The checkpoint was given up by another rank.", "See what that one says.")


def _await_digests(partial: Path, ranks: int, seconds: float) -> list[list[str]]:
    end = time.monotonic() + seconds
    missing = set(range(ranks))
    while True:
        missing = {rank for rank in missing if not (partial / f"digest-{rank}").exists()}
        if not missing:
            return [(partial / f"digest-{rank}").read_text().split() for rank in range(ranks)]
        raise_if_given_up(partial)
        if time.monotonic() > end:
            raise Timeout(
                f"The checkpoint in {partial} was given up, for these ranks did not write their shares: "
                f"{', '.join(map(str, sorted(missing)))}.",
                "See what they say. All ranks must save the same steps, into a folder that all nodes share.",
            )
        time.sleep(_POLL_SECONDS)


def _damaged(file: Path) -> Damaged:
    return Damaged(f"The file {file} does not hold what was written.", "Use an older checkpoint.")


def _write(file: Path, write: Callable[[int], None]) -> None:
    """Let `write` fill a new file, which gets its name when it is on the disk."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    unfinished.rename(file)


def _write_all(descriptor: int, data: "memoryview | bytes") -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
