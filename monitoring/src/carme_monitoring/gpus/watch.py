"""Reads all GPU libraries without ever being held up by one that hangs."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from carme_monitoring.gpus.reading import (
    GpuLibrary,
    GpuLibraryFailed,
    GpuLibraryMissing,
    GpuReading,
    LibraryState,
)

__all__ = ["GpuWatch", "Snapshot"]

_log = logging.getLogger("carme.monitoring")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One pass over a library: its state, the GPUs, and the seconds that it took."""

    state: LibraryState
    readings: Sequence[GpuReading]
    seconds: float


class _Reader:
    """One library and the thread that alone touches it: a driver that hangs holds up just this thread."""

    def __init__(self, library: GpuLibrary) -> None:
        self.library = library
        self._wanted = threading.Semaphore(0)
        self._done = threading.Condition()
        self._requested = self._answered = 0
        self._snapshot = Snapshot(LibraryState.MISSING, (), 0.0)
        self._last_report: object = None
        threading.Thread(target=self._run, name=f"gpus-{library.vendor}", daemon=True).start()

    def read(self, limit: float) -> Snapshot:
        """A new snapshot, or the state HANGING when it takes longer than `limit` seconds."""
        with self._done:
            if self._requested == self._answered:
                self._requested += 1
                self._wanted.release()
            wanted = self._requested
            if self._done.wait_for(lambda: self._answered >= wanted, limit):
                return self._snapshot
        self._report(LibraryState.HANGING, f"did not answer within {limit:g} s")
        return Snapshot(LibraryState.HANGING, (), limit)

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            start = time.monotonic()
            try:
                readings, state, message = self.library.read(), LibraryState.OK, ""
            except GpuLibraryMissing as error:
                readings, state, message = [], LibraryState.MISSING, str(error)
            except GpuLibraryFailed as error:
                readings, state, message = [], LibraryState.FAILED, str(error)
            except Exception as error:
                _log.exception("Reading the GPUs through %s failed.", self.library.vendor)
                readings, state, message = [], LibraryState.FAILED, repr(error)
            with self._done:
                self._snapshot = Snapshot(state, readings, time.monotonic() - start)
                self._answered += 1
                self._done.notify_all()
            self._report(state, message)

    def _report(self, state: LibraryState, message: str) -> None:
        if (state, message) != self._last_report:
            self._last_report = (state, message)
            level = logging.INFO if state in (LibraryState.OK, LibraryState.MISSING) else logging.WARNING
            _log.log(
                level,
                "GPU library of %s: %s%s",
                self.library.vendor,
                state,
                f" ({message})" if message else "",
            )


class GpuWatch:
    """All libraries of this node.

    Args:
        libraries: One of each vendor.
        limit: Seconds that a snapshot may take before the library counts as hanging.
    """

    def __init__(self, libraries: Sequence[GpuLibrary], limit: float = 5.0) -> None:
        self._readers = [_Reader(library) for library in libraries]
        self._limit = limit

    def snapshots(self) -> dict[str, Snapshot]:
        """A new snapshot of each vendor's GPUs, by vendor."""
        end = time.monotonic() + self._limit
        return {
            reader.library.vendor: reader.read(max(0.0, end - time.monotonic())) for reader in self._readers
        }
