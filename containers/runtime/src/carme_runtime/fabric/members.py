"""Which nodes of the job are there."""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Member:
    """A node whose agent is part of the fabric."""

    number: int  # 0 is the job's first node; the others are numbered as they join
    host: str
    address: str  # at which the other nodes reach it
    devices: int  # GPUs that the job was given on it
    cpus: int  # cores that the job was given on it
    interface: str = ""  # the network interface that has the address, where it is known
    key_file: str = ""  # where the job's key is on it


@dataclass(frozen=True)
class Members:
    """The nodes that are there, those that were lost, and how many the job has."""

    present: tuple[Member, ...]  # in the order of their node ranks
    lost: tuple[str, ...]
    expected: int

    @classmethod
    def of(cls, present: list[Member], lost: list[str], expected: int) -> "Members":
        """Put the first node first, and the others in the natural order of their names (n2 before n10)."""
        ordered = sorted(
            present, key=lambda member: (member.number != 0, _natural(member.host), member.number)
        )
        return cls(tuple(ordered), tuple(lost), expected)

    def without_devices(self) -> "Members":
        """The same nodes, as if the job had no GPUs on them."""
        present = tuple(replace(member, devices=0) for member in self.present)
        return replace(self, present=present)

    def as_json(self) -> dict[str, Any]:
        """The form in which agents and clients pass it on."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Members":
        """The inverse of `as_json`."""
        present = tuple(Member(**member) for member in data["present"])
        return cls(present, tuple(data["lost"]), data["expected"])


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
