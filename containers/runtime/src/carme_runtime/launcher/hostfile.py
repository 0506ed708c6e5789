"""A file that names the nodes of a run, as MPI launchers read it."""

import re
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.members import Member, Members

_LINE = re.compile(r"(?P<host>[^\s:=]+)(?:\s*:\s*(?P<after>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?")


def read(path: Path) -> list[tuple[str, int]]:
    """The hosts of each line, and how many ranks they may have; 0: not given.

    Lines are `host`, `host slots=4` or `host:4`. What follows # is a comment.

    Raises:
        CarmeRuntimeError: It cannot be read, names no host, or has a line that is none of these.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CarmeRuntimeError(f"The hostfile {path} cannot be read: {reason}.", "Check its name.") from None
    hosts: list[tuple[str, int]] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if not match:
            raise CarmeRuntimeError(
                f"Line {number} of the hostfile {path} is '{text}'.",
                "Write 'host', 'host slots=4' or 'host:4'.",
            )
        hosts.append((match["host"], int(match["after"] or match["slots"] or 0)))
    if not hosts:
        raise CarmeRuntimeError(f"The hostfile {path} names no host.", "Write one host to a line.")
    return hosts


def choose(members: Members, hosts: list[tuple[str, int]]) -> tuple[Members, list[int]]:
    """The nodes of the job that a hostfile names, in its order, and how many ranks each may have.

    A node that is named several times may have the sum: files with one line for each rank mean that.
    """
    # Names may carry a domain on one side and not on the other.
    known = {member.host.partition(".")[0]: member for member in members.present}
    known |= {name: member for member in members.present for name in (member.host, member.address)}
    named = [(known.get(host) or known.get(host.partition(".")[0]), host, slots) for host, slots in hosts]
    missing = [host for member, host, _ in named if member is None]
    if missing:
        present = ", ".join(member.host for member in members.present)
        raise CarmeRuntimeError(
            f"The hostfile names {', '.join(missing)}, but the nodes of this job are: {present}.",
            "Name nodes of the job.",
        )
    room: dict[Member, int] = {}
    for member, _, slots in named:
        assert member
        room[member] = (room[member] or 1) + (slots or 1) if member in room else slots
    return Members(tuple(room), members.lost, len(room)), list(room.values())
