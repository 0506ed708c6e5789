"""The comment of a Slurm job that makes it one of ours: `carme/1 kind=session image=torch key=HEX`.

Slurm keeps it, so the broker needs no database of its own.
"""

import re
from typing import Literal, NamedTuple, Self

_LABEL = re.compile(
    r"carme/1 kind=(?P<kind>session|batch) image=(?P<image>[A-Za-z0-9_.@-]*) key=(?P<key>[0-9a-f]{32})"
)


class Label(NamedTuple):
    """What the comment says; anybody can write one into their own jobs, so it proves nothing."""

    kind: Literal["session", "batch"]
    image: str | None
    key: str

    @classmethod
    def read(cls, comment: str) -> Self | None:
        """The label in a comment, None when it is not ours."""
        match = _LABEL.fullmatch(comment)
        if match is None:
            return None
        kind: Literal["session", "batch"] = "session" if match["kind"] == "session" else "batch"
        return cls(kind, match["image"] or None, match["key"])

    def __str__(self) -> str:
        return f"carme/1 kind={self.kind} image={self.image or ''} key={self.key}"
