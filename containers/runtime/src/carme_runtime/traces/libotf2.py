"""libotf2, the library that reads and writes OTF2, called as it is.

PyPI's package `otf2` carries it whole, for many Pythons, and exports all its functions; a site that has
Score-P has `libotf2.so`. We call its writer instead of writing the format ourselves, because the format is
defined by that library: its files are compressed, chunked, and change between releases, and every tool
reads what it wrote. The package's own Python classes are not used, as they take 9 us for an event; the core
writes events through the same functions in less than 0.2 us (native/src/otf2_events.cpp), so that only
definitions go through ctypes.
"""

import ctypes
import ctypes.util
import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any

from carme_runtime.traces.errors import TraceError

_TYPES = {
    "p": ctypes.c_void_p, "s": ctypes.c_char_p, "b": ctypes.c_uint8, "i": ctypes.c_uint32,
    "l": ctypes.c_uint64, "q": ctypes.c_int64, "d": ctypes.c_double,
}  # fmt: skip
# What the functions take, from OTF2's manual; those that return a pointer are in capitals.
_FUNCTIONS = {
    "Archive_Open": "ssbllbb",
    "Archive_SetFlushCallbacks": "ppp",
    "Archive_SetSerialCollectiveCallbacks": "p",
    "Archive_SetCreator": "ps",
    "Archive_SetDescription": "ps",
    "Archive_OpenEvtFiles": "p",
    "Archive_CloseEvtFiles": "p",
    "Archive_OpenDefFiles": "p",
    "Archive_CloseDefFiles": "p",
    "Archive_GetEvtWriter": "pl",
    "Archive_CloseEvtWriter": "pp",
    "Archive_GetDefWriter": "pl",
    "Archive_CloseDefWriter": "pp",
    "Archive_GetGlobalDefWriter": "p",
    "Archive_CloseGlobalDefWriter": "pp",
    "Archive_Close": "p",
    "AttributeList_New": "",
    "AttributeList_Delete": "p",
    "DefWriter_WriteClockOffset": "plqd",
    "GlobalDefWriter_WriteClockProperties": "pllll",
    "GlobalDefWriter_WriteString": "pis",
    "GlobalDefWriter_WriteAttribute": "piiib",
    "GlobalDefWriter_WriteSystemTreeNode": "piiii",
    "GlobalDefWriter_WriteLocationGroup": "piibii",
    "GlobalDefWriter_WriteLocation": "plibli",
    "GlobalDefWriter_WriteRegion": "piiiibbiiii",
    "GlobalDefWriter_WriteGroup": "piibbiip",
    "GlobalDefWriter_WriteComm": "piiiii",
    "GlobalDefWriter_WriteRmaWin": "piiii",
    "GlobalDefWriter_WriteMetricMember": "piiibbbbqi",
    "GlobalDefWriter_WriteMetricClass": "pibpbb",
}
_POINTERS = {
    "Archive_Open", "Archive_GetEvtWriter", "Archive_GetDefWriter", "Archive_GetGlobalDefWriter",
    "AttributeList_New",
}  # fmt: skip
_EVENTS = (
    "EvtWriter_Enter", "EvtWriter_Leave", "EvtWriter_MpiSend", "EvtWriter_MpiRecv",
    "EvtWriter_MpiCollectiveBegin", "EvtWriter_MpiCollectiveEnd", "EvtWriter_RmaPut", "EvtWriter_RmaGet",
    "EvtWriter_RmaAtomic", "EvtWriter_RmaSync", "EvtWriter_RmaOpCompleteBlocking",
    "EvtWriter_RmaOpCompleteNonBlocking", "EvtWriter_Metric", "AttributeList_AddUint64",
)  # fmt: skip
_SINCE_3 = "OTF2_EvtWriter_NonBlockingCollectiveRequest"
# It would print errors that we put into sentences; returns the error.
_Silent = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int,
    ctypes.c_char_p, ctypes.c_void_p,
)  # fmt: skip
_silent = _Silent(lambda data, file, line, function, code, text, values: code)


def find() -> Path:
    """Where libotf2 is. Raises TraceError where there is none of release 3."""
    candidates = []
    package = importlib.util.find_spec("_otf2")
    for place in (package.submodule_search_locations or []) if package else []:
        candidates += [Path(place) / f"_otf2{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    system = ctypes.util.find_library("otf2")
    for candidate in [*filter(Path.is_file, candidates), *([Path(system)] if system else [])]:
        try:
            if hasattr(ctypes.CDLL(str(candidate)), _SINCE_3):
                return candidate
        except OSError:
            continue
    raise TraceError(
        "There is no libotf2 of release 3, which writes OTF2 archives.",
        "Install it with: pip install 'carme-runtime[trace]'; or use --trace html:FILE, which needs nothing.",
    )


class Library:
    """Its functions by name, without `OTF2_`. Errors become TraceError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(find()))
        self._library.OTF2_Error_RegisterCallback(_silent, None)
        self._library.OTF2_Error_GetDescription.restype = ctypes.c_char_p
        self._functions = {name: self._typed(name, takes) for name, takes in _FUNCTIONS.items()}

    def _typed(self, name: str, takes: str) -> Any:
        function = getattr(self._library, f"OTF2_{name}")
        function.argtypes = [_TYPES[letter] for letter in takes]
        function.restype = ctypes.c_void_p if name in _POINTERS else ctypes.c_int
        return function

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; what it returns, if that is a pointer. Raises TraceError."""
        result = self._functions[name](*arguments)
        if name in _POINTERS:
            if not result:
                raise TraceError(f"libotf2 could not do {name}.", "See that there is room on the disk.")
            return result
        if result:
            self.fail(result)
        return None

    def fail(self, code: int) -> None:
        """Raise TraceError with libotf2's words for an error."""
        reason = (self._library.OTF2_Error_GetDescription(code) or b"?").decode(errors="replace")
        raise TraceError(
            f"The archive could not be written (libotf2: {reason.rstrip('.')}).",
            "See that there is room on the disk, and that you may write there.",
        )

    def addresses(self) -> dict[str, int]:
        """Of what the core calls for events."""
        found = {}
        for name in _EVENTS:
            address = ctypes.cast(getattr(self._library, f"OTF2_{name}"), ctypes.c_void_p).value
            assert address
            found[name] = address
        return found
