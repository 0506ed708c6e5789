"""Sizes of memory as people write them and read them."""

import re

from carme_runtime.errors import CarmeRuntimeError

# As Slurm's --mem has it: K, M, G and T are powers of 1024, with and without iB.
_UNITS = {
    "": 1, "b": 1, "k": 2**10, "kib": 2**10, "kb": 10**3, "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9, "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*")


def parse_size(size: int | str) -> int:
    """Bytes of a size such as 2147483648, "2GiB", "2G" or "512 MB".

    Raises:
        CarmeRuntimeError: It is not a size, or not above 0.
    """
    found = _SIZE.fullmatch(str(size))
    if found is None or found[2].lower() not in _UNITS or (number := float(found[1])) <= 0:
        raise CarmeRuntimeError(f"'{size}' is not a size of memory.", "Write it like 2GiB, 512M or 1.5G.")
    return int(number * _UNITS[found[2].lower()])


def show_size(count: float) -> str:
    """Bytes for people, such as 1.50 GiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.{2 if unit == 'GiB' else 1 if unit == 'MiB' else 0}f} {unit}"
    return f"{count:.0f} B"
