"""How ranks begin: with all of rank 0's values, or while they still travel."""

from carme_runtime.collectives.errors import InvalidCall

__all__ = ["STREAMED", "check_start"]

STREAMED = "streamed"


def check_start(start: str) -> None:
    """Raise InvalidCall for a start that there is not."""
    if start not in ("", STREAMED):
        raise InvalidCall(f"There is no start '{start}'.", f"Give '{STREAMED}', or leave it out.")
