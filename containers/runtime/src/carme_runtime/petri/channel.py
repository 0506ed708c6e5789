"""Messages over sockets: a length, then a pickled object."""

import pickle
import struct
from typing import Any

HEAD = struct.Struct("<Q")


def encode(message: Any) -> bytes:
    """The bytes of a message."""
    payload = pickle.dumps(message, 5)
    return HEAD.pack(len(payload)) + payload


class Reader:
    """Makes messages of the bytes that come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are whole now."""
        if not self._data and len(data) >= 8 and len(data) == 8 + HEAD.unpack_from(data)[0]:
            return [pickle.loads(memoryview(data)[8:])]
        self._data += data
        found, start = [], 0
        while len(self._data) - start >= 8:
            end = start + 8 + HEAD.unpack_from(self._data, start)[0]
            if len(self._data) < end:
                break
            with memoryview(self._data) as view, view[start + 8 : end] as part:
                found.append(pickle.loads(part))
            start = end
        if start:
            del self._data[:start]
        return found
