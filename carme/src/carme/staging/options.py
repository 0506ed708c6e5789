"""The options of a run, and its result.

Plain classes: to import dataclasses, with all that it needs, takes as long as to look at five thousand files.
"""

from __future__ import annotations

import os

from carme.errors import InvalidRequest
from carme.translation import message as _

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

__all__ = ["COMPRESSIONS", "Counts", "Options", "Problem", "Progress", "Result", "parse_size"]

#: A file of at least this size is copied in parts of this size, by several workers at once; in bytes.
PART = 64 << 20
#: A folder with more entries is shared among the workers, so many entries at a time.
BATCH = 2048
#: How often a file that changes while it is read is tried.
TRIES = 3
#: How many problems a result holds; all are reported as they come.
MOST_PROBLEMS = 10_000
#: What copies: see Options.
ENGINES = ("auto", "native", "python")
#: What images can be compressed with.
COMPRESSIONS = ("zstd", "lz4", "none")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """The number of bytes in `500M`, `1.5G` or `4096` (units of 1024).

    Raises:
        InvalidRequest: The text is no such number.
    """
    trimmed = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = trimmed[-1:] if trimmed[-1:] in _UNITS else ""
    try:
        size = int(float(trimmed.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise InvalidRequest(
            _("{text!r} is not a size.", text=text), _("Write a number of bytes, for example 500M or 1.5G.")
        )
    return size


class Options:
    """How to copy.

    Args:
        workers: Processes that copy; 0: as many as cores, four times that over a network file system.
        verify: `read` reads every copied byte back from the destination, which must have the digest that was
            made while the source was read; `device` first has it written to the device and dropped from this
            host's memory, so that it is read from the device; `none` neither hashes nor reads back.
        hash: Digest of contents and for manifests: `xxh3` (fast, the only one that the compiled part knows),
            `blake3` (strong), or `blake2b` (strong, slower, always there); empty: the first of these that is
            installed.
        contents: Compare contents instead of size and time to find what has changed.
        bandwidth: Bytes a second that are read and written at most; 0: no limit.
        operations: Files and parts a second at most; 0: no limit.
        attributes: Keep extended attributes and ACLs.
        estimate: Count the source in a process of its own, so that the progress reports totals.
        durable: Return only when the destination's file system has written everything to its device.
        engine: `native` uses the compiled part and is refused where that was not built; `python` does without
            it, slower; `auto` takes what is there.
        turn: From 0 to 1: begin so far into each folder and each large file, and end with what lies before.
            Several hosts that read the same at once, each with another one, read from different places.
    """

    def __init__(
        self,
        workers: int = 0,
        verify: Literal["read", "device", "none"] = "read",
        hash: str = "",
        contents: bool = False,
        bandwidth: int = 0,
        operations: int = 0,
        attributes: bool = True,
        durable: bool = False,
        estimate: bool = False,
        engine: Literal["auto", "native", "python"] = "auto",
        turn: float = 0.0,
    ) -> None:
        self.workers = workers
        self.verify: Literal["read", "device", "none"] = verify
        self.hash = hash
        self.contents = contents
        self.bandwidth = bandwidth
        self.operations = operations
        self.attributes = attributes
        self.durable = durable
        self.estimate = estimate
        self.engine: Literal["auto", "native", "python"] = engine
        self.turn = turn
        if self.workers < 0 or self.workers > 256:
            raise InvalidRequest(
                _("The number of workers must be 0 to 256, not {workers}.", workers=self.workers),
                field="workers",
            )
        if self.engine not in ENGINES:
            raise InvalidRequest(
                _(
                    "'engine' must be {engines}, not {engine!r}.",
                    engines=", ".join(ENGINES),
                    engine=self.engine,
                ),
                field="engine",
            )
        if self.verify not in ("read", "device", "none"):
            raise InvalidRequest(
                _("'verify' must be read, device or none, not {verify!r}.", verify=self.verify),
                field="verify",
            )


class Counts:
    """What a run did so far; sizes in bytes.

    `copied` and `unchanged` are files of all kinds but folders; `updated` had only their attributes set.
    """

    def __init__(
        self,
        folders: int = 0,
        copied: int = 0,
        unchanged: int = 0,
        updated: int = 0,
        removed: int = 0,
        different: int = 0,
        problems: int = 0,
        bytes_copied: int = 0,
        bytes_unchanged: int = 0,
    ) -> None:
        self.folders = folders
        self.copied = copied
        self.unchanged = unchanged
        self.updated = updated
        self.removed = removed
        self.different = different
        self.problems = problems
        self.bytes_copied = bytes_copied
        self.bytes_unchanged = bytes_unchanged

    def add(self, counts: Counts) -> None:
        """Add what another one counted."""
        for name, value in vars(counts).items():
            if value:
                setattr(self, name, getattr(self, name) + value)

    @property
    def files(self) -> int:
        """Files that were compared or copied."""
        return self.copied + self.unchanged + self.updated


class Problem:
    """A path below the source or the destination, and what was wrong with it.

    `path` may hold surrogates for bytes that are not UTF-8 (`os.fsencode` gives the bytes).
    """

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {self.reason!r})"


class Progress:
    """A moment of a run: what is done, what is known to be there in all (None: not yet), seconds so far."""

    def __init__(
        self, counts: Counts, seconds: float, total_files: int | None = None, total_bytes: int | None = None
    ) -> None:
        self.counts = counts
        self.seconds = seconds
        self.total_files = total_files
        self.total_bytes = total_bytes


class Result:
    """What a run did.

    `problems` are what could not be copied or, when verifying, what differs (the first 10,000 of them;
    `counts.problems` and `counts.different` count all). `warnings` say what was not kept and why. `hash`
    is the digest by which contents were verified; `bytes`: the compiled part compared byte by byte, as no
    library with xxh3 was there; empty: they were not, or nothing was copied. `engine` is what copied or
    compared: `native` or `python`; `hosts` are those that did, where there were several.
    """

    def __init__(
        self, *, workers: int = 0, hash: str = "", engine: str = "", hosts: list[str] | None = None
    ) -> None:
        self.counts = Counts()
        self.seconds = 0.0
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.resumed = False
        self.workers = workers
        self.hash = hash
        self.engine = engine
        self.hosts = hosts or []

    @property
    def ok(self) -> bool:
        """Whether everything was done, and nothing differs."""
        return not self.counts.problems and not self.counts.different


def shown(path: str) -> str:
    """A path for people: without bytes that would steer the terminal or break the line."""
    text = os.fsencode(path).decode(errors="replace")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
