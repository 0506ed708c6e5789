"""What a process may take, and what it takes besides its blocks."""

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core import pages
from carme_runtime.out_of_core.sizes import show_size
from carme_runtime.out_of_core.store import Store

_MARGIN = 16 << 20  # bytes that are left free for what grows between two looks
_EVERY = 32  # operations between two looks, at most
# While pages of libraries come back that are used: operations, the first of them with a look at each, and
# operations between two looks then.
_RETURNING, _FIRST, _BETWEEN = 4096, 512, 4
_ROUND = 1 << 20
_GROWTH = 1.06  # what a named limit leaves for what the process still loads, and for later operations


class Limit:
    """The limit of a process.

    Args:
        size: Bytes that it may take in all.

    Raises:
        CarmeRuntimeError: The process takes more already.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.outside = 0  # bytes that are not blocks
        self._checks = self._returning = 0
        self._of_files = self._private = 0  # the most bytes outside that are pages of files, and private ones
        self.drop_library_pages()
        if (now := pages.resident() + pages.page_tables()) + _MARGIN > size:
            raise CarmeRuntimeError(
                f"The limit of {show_size(size)} is too small: Python and its libraries already take "
                f"{show_size(now)}.",
                f"Use {show_size(now + 4 * _MARGIN)} or more.",
            )

    def check(self, store: Store, *, often: bool = True, anew: bool = False) -> None:
        """Give the store what the process leaves of the limit.

        Args:
            store: Of the blocks.
            often: Look at each call.
            anew: What was outside before is not.
        """
        self._checks += 1
        self._returning = max(self._returning - 1, 0)
        if not often and self._checks % self._between:
            return
        if anew:
            self.drop_library_pages()
        of_files = pages.of_files()
        self._of_files = max(self._of_files, of_files)
        # A step that goes as the last one went notices what is gone when it is.
        outside = store.outside(collects=often or anew)
        if outside is not None:
            private = outside - of_files
            private += pages.page_tables() if self._checks % _EVERY == 0 or anew or not self.outside else 0
            self._private = private if anew else max(self._private, private)
        elif not self.outside:
            return
        self.outside = self._of_files + self._private
        store.capacity = max(self.size - self.outside - _MARGIN, 0)

    @property
    def _between(self) -> int:
        """Operations between two looks, when a step goes as the last one went."""
        if self._returning > _RETURNING - _FIRST:
            return 1
        return _BETWEEN if self._returning else _EVERY

    def drop_library_pages(self) -> None:
        """Let only those pages of libraries count that are used from now on."""
        pages.drop_library_pages()
        self._of_files = 0
        self._returning = _RETURNING

    def least(self, blocks: int) -> int:
        """The limit that is needed for as many bytes of blocks at a time."""
        return -(-(blocks + self.outside + _MARGIN) // _ROUND) * _ROUND

    def too_small(self, blocks: int, name: str) -> CarmeRuntimeError:
        """What to say when an operation needs as many bytes of blocks."""
        return CarmeRuntimeError(
            f"The limit of {show_size(self.size)} is too small: {name} needs "
            f"{show_size(blocks)} at a time, and the process takes {show_size(self.outside)} besides.",
            f"Use {show_size(_GROWTH * self.least(blocks))} or more. Until a step has "
            "ended, a later operation may need more than this one.",
        )
