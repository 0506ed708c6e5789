"""The digests that large files, manifests and images are known by."""

from __future__ import annotations

from carme.errors import InvalidRequest
from carme.translation import message as _

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Digest(Protocol):
        """What all of them have in common."""

        def update(self, data: bytes | bytearray | memoryview, /) -> object: ...
        def digest(self) -> bytes: ...
        def hexdigest(self) -> str: ...


__all__ = ["ALGORITHMS", "algorithm"]

ALGORITHMS = ("xxh3", "blake3", "blake2b")


def algorithm(name: str = "", *, strong: bool = False) -> tuple[str, Callable[[], Digest]]:
    """A digest's name and what makes one.

    Args:
        name: One of ALGORITHMS; empty: the fastest that is installed.
        strong: With no name given, one that nobody can forge.

    Raises:
        InvalidRequest: There is no such digest, or its package is not installed.
    """
    from importlib.machinery import PathFinder

    wanted = (name,) if name else (("blake3", "blake2b") if strong else ALGORITHMS)
    for each in wanted:
        if each not in ALGORITHMS:
            raise InvalidRequest(
                _("There is no digest called {each!r}.", each=each),
                _("Choose from {algorithms}.", algorithms=", ".join(ALGORITHMS)),
                field="hash",
            )
        if each == "blake2b" or PathFinder.find_spec(_PACKAGES[each]):
            return each, _MAKERS[each]
    raise InvalidRequest(
        _("The digest {name} needs a Python package that is not installed here.", name=name),
        _("Install carme[staging], or choose blake2b."),
        field="hash",
    )


# Each is imported only when something is hashed: a run that finds nothing changed does not wait for it.


def _xxh3() -> Digest:
    import xxhash  # pyright: ignore[reportMissingImports]

    return xxhash.xxh3_128()


def _blake3() -> Digest:
    import blake3  # pyright: ignore[reportMissingImports]

    return blake3.blake3()


def _blake2b() -> Digest:
    import hashlib

    return hashlib.blake2b(digest_size=32)


_PACKAGES = {"xxh3": "xxhash", "blake3": "blake3"}
_MAKERS: dict[str, Callable[[], Digest]] = {"xxh3": _xxh3, "blake3": _blake3, "blake2b": _blake2b}
