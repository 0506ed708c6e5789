"""What a job's page says of where the job began: its image's digest, and the revision of its working folder.

Written as the job's owner into the job's folder. Git is not run, as nodes may have none: the few files that
name the revision are read. See `gitrepository-layout(5)`.
"""

import json
import os
import re

NAME = "facts.json"
_MOST = 4096
_MOST_REFERENCES = 16 << 20
_REVISION = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def write(folder: str, image: str | None, digest: str, workdir: str | None, login: str = "") -> None:
    """Write the facts; a job never fails for want of them.

    Args:
        folder: The job's.
        image: The image's name.
        digest: What its manifest says.
        workdir: The working folder that was requested.
        login: What its owner's login files did wrong; empty: nothing.
    """
    found = {"image": image or "", "digest": digest, **(revision(workdir) if workdir else {})}
    if login:
        found["login"] = login
    try:
        with open(f"{folder}/{NAME}", "w", encoding="utf-8") as file:
            json.dump(found, file)
    except OSError:
        pass


def revision(folder: str) -> dict[str, str]:
    """The repository that a folder is in, its branch and its revision; nothing when it is in none."""
    top = os.path.abspath(folder)
    while not os.path.lexists(f"{top}/.git"):
        if os.path.dirname(top) == top:
            return {}
        top = os.path.dirname(top)
    try:
        place = _git_folder(top)
        head = _read(f"{place}/HEAD")
        reference = head.removeprefix("ref: ") if head.startswith("ref: ") else ""
        found = _resolved(place, reference) if reference else head
    except (OSError, ValueError):
        return {}
    if not _REVISION.fullmatch(found):
        return {}
    return {"repository": top, "branch": reference.removeprefix("refs/heads/"), "revision": found}


def _git_folder(top: str) -> str:
    place = f"{top}/.git"
    if os.path.isdir(place):
        return place
    # A worktree or a submodule: a file that names the folder.
    return os.path.join(top, _read(place).removeprefix("gitdir: "))


def _resolved(place: str, reference: str) -> str:
    try:
        common = os.path.join(place, _read(f"{place}/commondir"))
    except OSError:
        common = place
    for folder in (place, common):
        try:
            return _read(f"{folder}/{reference}")
        except OSError:
            continue
    with open(f"{common}/packed-refs", encoding="utf-8") as file:
        for line in file.read(_MOST_REFERENCES).splitlines():
            found, _, name = line.partition(" ")
            if name == reference:
                return found
    return ""


def _read(path: str) -> str:
    # O_NONBLOCK: opening a FIFO must not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        return file.read(_MOST).strip()
