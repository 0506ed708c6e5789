"""Slurm's short form of lists of nodes."""

import re


def expand(nodes: str) -> list[str]:
    """The names in Slurm's short form of a list of nodes: `n[01-02,7],login` is n01, n02, n7 and login."""
    if "[" not in nodes:  # as thousands of jobs may have it
        return [name for name in nodes.split(",") if name]
    names = []
    for word in re.findall(r"(?:[^,\[]|\[[^]]*\])+", nodes):
        first, *rest = re.split(r"\[([^]]*)\]", word)
        expanded = [first]
        # What follows are brackets and the plain text after each, in turn.
        for ranges, text in zip(rest[::2], rest[1::2], strict=True):
            numbers = [number for part in ranges.split(",") for number in _numbers(part)]
            expanded = [name + number + text for name in expanded for number in numbers]
        names += expanded
    return names


def _numbers(part: str) -> list[str]:
    first, _, last = part.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        return [part]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
