"""Which GPUs a node has, also while some of them do not answer."""

import logging
from collections.abc import Collection

from carme_monitoring.gpus.reading import Gpu

__all__ = ["KnownGpus"]

_log = logging.getLogger("carme.monitoring")


class KnownGpus:
    """The GPUs of one library: those that have answered, and those that it counts and that never answered.

    A GPU that does not answer when the library is initialised does not report its name either. It has its
    number as a name then, until a later initialisation finds it.

    Args:
        vendor: The library's vendor.
    """

    def __init__(self, vendor: str) -> None:
        self._vendor = vendor
        self._named: dict[str, Gpu] = {}
        self._silent: dict[int, Gpu] = {}
        self._reported: set[int] = set()

    def begin(self) -> None:
        """The library is initialised anew, so GPUs that do not answer are to be named again."""
        self._reported, self._silent = set(self._silent), {}

    def add(self, gpu: Gpu) -> None:
        """A GPU that answers."""
        self._named[gpu.uuid] = gpu

    def add_silent(self, index: int, reason: Exception) -> None:
        """A GPU that does not answer.

        Args:
            index: Its number in the vendor's order.
            reason: What the library says instead.
        """
        self._silent[index] = Gpu(str(index), f"{self._vendor}:{index}")
        if index not in self._reported:
            _log.warning("GPU %d of %s does not answer: %s", index, self._vendor, reason)

    def is_complete(self, answering: Collection[str]) -> bool:
        """Whether all of them are among those with these names."""
        return not self._silent and self._named.keys() <= set(answering)

    def missing(self, present: Collection[str]) -> list[Gpu]:
        """Those that are not among these names. A silent one that answered before has the name of then."""
        gone = [gpu for uuid, gpu in self._named.items() if uuid not in present]
        numbers = {gpu.index for gpu in gone}
        return gone + [gpu for gpu in self._silent.values() if gpu.index not in numbers]
