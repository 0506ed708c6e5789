"""The public C interface of GPI-2 (GASPI standard 17.1), by ctypes."""

import ctypes
import ctypes.util
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_ubyte, c_uint, c_ulong, c_ushort, c_void_p
from typing import Any

from carme_runtime.collectives.errors import GaspiError, InvalidCall, OutOfResources

LIBRARY = "CARME_GPI2_LIBRARY"
SUCCESS, TIMEOUT = 0, 1
_OUT_OF_RESOURCES = {2: "too many open files", 21: "too many segments", 28: "no memory"}
_BOTH_SIDES = (
    c_ubyte,
    c_ulong,
    c_ushort,
    c_ubyte,
    c_ulong,
    c_ulong,
)  # segment, offset, rank, and there; size
_LISTS = (c_uint, c_void_p, c_void_p, c_ushort, c_void_p, c_void_p, c_void_p)
_NOTICE = (c_uint, c_uint)  # identifier and value; the former was an unsigned short once, which passes alike


class Config(ctypes.Structure):
    """gaspi_config_t. Releases agree on what it begins with, and none is as long as this."""

    _fields_ = [("logger", c_uint), ("sn_port", c_uint), ("rest", c_ubyte * 1016)]


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "gaspi_config_get": (POINTER(Config),),
    "gaspi_config_set": (Config,),
    "gaspi_proc_init": (c_ulong,),
    "gaspi_proc_rank": (c_void_p,),
    "gaspi_proc_num": (c_void_p,),
    "gaspi_proc_kill": (c_ushort, c_ulong),
    "gaspi_barrier": (c_ubyte, c_ulong),
    "gaspi_segment_bind": (c_ubyte, c_void_p, c_ulong, c_int),
    "gaspi_segment_register": (c_ubyte, c_ushort, c_ulong),
    "gaspi_segment_delete": (c_ubyte,),
    "gaspi_segment_max": (c_void_p,),
    "gaspi_segment_size": (c_ubyte, c_ushort, c_void_p),
    "gaspi_write": (*_BOTH_SIDES, c_ubyte, c_ulong),
    "gaspi_read": (*_BOTH_SIDES, c_ubyte, c_ulong),
    "gaspi_write_notify": (*_BOTH_SIDES, *_NOTICE, c_ubyte, c_ulong),
    "gaspi_write_list": (*_LISTS, c_ubyte, c_ulong),
    "gaspi_read_list": (*_LISTS, c_ubyte, c_ulong),
    "gaspi_read_list_notify": (*_LISTS, c_ubyte, c_uint, c_ubyte, c_ulong),
    "gaspi_write_list_notify": (*_LISTS, c_ubyte, *_NOTICE, c_ubyte, c_ulong),
    "gaspi_notify": (c_ubyte, c_ushort, *_NOTICE, c_ubyte, c_ulong),
    "gaspi_notify_waitsome": (c_ubyte, c_uint, c_uint, c_void_p, c_ulong),
    "gaspi_notify_reset": (c_ubyte, c_uint, c_void_p),
    "gaspi_wait": (c_ubyte, c_ulong),
    "gaspi_queue_num": (c_void_p,),
    "gaspi_queue_size": (c_ubyte, c_void_p),
    "gaspi_queue_size_max": (c_void_p,),
    "gaspi_atomic_fetch_add": (c_ubyte, c_ulong, c_ushort, c_ulong, c_void_p, c_ulong),
    "gaspi_atomic_compare_swap": (c_ubyte, c_ulong, c_ushort, c_ulong, c_ulong, c_void_p, c_ulong),
    "gaspi_state_vec_get": (c_void_p,),
}


class Library:
    """The functions of libGPI2 by their names, and what they return as errors of this package.

    Raises:
        GaspiError: The library is not there, or lacks a function.
    """

    def __init__(self) -> None:
        name = os.environ.get(LIBRARY) or ctypes.util.find_library("GPI2") or "libGPI2.so"
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise GaspiError(
                f"The transport gpi2 was chosen, but GPI-2's library cannot be loaded ({error}).",
                f"Install GPI-2 as a shared library, name its file in {LIBRARY}, or use transport native.",
            ) from None
        missing = [function for function in _SIGNATURES if not hasattr(self._library, function)]
        if missing:
            raise GaspiError(
                f"GPI-2's library {name} has no {', '.join(missing)}.",
                "Install GPI-2 1.3 or a newer release.",
            )
        for function, arguments in _SIGNATURES.items():
            getattr(self._library, function).argtypes = arguments
        text = getattr(self._library, "gaspi_error_str", None)
        if text is not None:
            text.argtypes, text.restype = (c_int,), c_char_p
        self._text = text

    def raw(self, function: str, *arguments: Any) -> int:
        """What `gaspi_` + `function` returns."""
        return getattr(self._library, f"gaspi_{function}")(*arguments)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a local function. Raises GaspiError."""
        code = self.raw(function, *arguments)
        if code != SUCCESS:
            raise self.failure(function, code)

    def number(self, function: str, *arguments: Any) -> int:
        """What a local function gives by its last argument. Raises GaspiError."""
        # Zeroed and wide enough for whatever width a release gives the number (on little-endian hosts).
        value = c_ulong(0)
        self.call(function, *arguments, byref(value))
        return value.value

    def failure(self, function: str, code: int) -> GaspiError:
        """The error that stands for what a function returned."""
        message = (self._text(code) or b"").decode(errors="replace") if self._text else ""
        sentence = f"GPI-2's gaspi_{function} failed with error {code}{f' ({message})' if message else ''}."
        if code in _OUT_OF_RESOURCES:
            return OutOfResources(sentence, f"GPI-2 has run out of something: {_OUT_OF_RESOURCES[code]}.")
        if 8 <= code <= 24:
            return InvalidCall(sentence, "Give arguments that GPI-2 takes.")
        return GaspiError(sentence, "See what GPI-2 prints, and start the run again.")
