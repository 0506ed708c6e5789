"""Copy a few changed files at once: to start workers and a journal would take longer than that."""

from __future__ import annotations

import os
from collections.abc import Callable

from carme.staging import tree
from carme.staging.attributes import DEFAULT, AttributeCopier, attribute_names
from carme.staging.native import ChangedFolder, Native
from carme.staging.options import Options
from carme.staging.state import State

__all__ = ["MOST_FILES", "copy_changed", "is_eligible"]

#: More changed files than these go to workers.
MOST_FILES = 1000


def is_eligible(options: Options) -> bool:
    """Whether the compiled part alone can copy as requested."""
    return not options.bandwidth and not options.operations and options.hash in ("", "xxh3")


def copy_changed(
    native: Native,
    copier: AttributeCopier,
    source: int,
    destination: int,
    path: str,
    found: list[ChangedFolder],
    notify: Callable[[int, int], None],
) -> list[ChangedFolder]:
    """Copy what has changed in folders, where that is only the contents of plain small files.

    Args:
        native: The compiled part.
        copier: For the folders' own attributes.
        source: Descriptor of the source's top.
        destination: Descriptor of the destination's top.
        path: The destination.
        found: What has changed.
        notify: Called with how many files were copied and their bytes.

    Returns:
        What is left to those who know all cases.

    Raises:
        CarmeError: Another run copies to this destination.
    """
    try:
        state = State(os.path.join(path, tree.STATE))
    except OSError:
        # Reported when it fails there, too.
        return found
    finished = False
    try:
        if state.resumed:
            return found
        if state.whole_seconds():
            finished = True
            return found
        rest: list[ChangedFolder] = []
        for each in found:
            rest += _copy(native, copier, source, destination, each, notify)
        finished = True
        return rest
    finally:
        state.close(finished=finished)


def _copy(
    native: Native,
    copier: AttributeCopier,
    source: int,
    destination: int,
    found: ChangedFolder,
    notify: Callable[[int, int], None],
) -> list[ChangedFolder]:
    entries = found.entries
    if entries is None or found.parts or found.surplus:
        return [found]
    new = entries.of("n")
    if len(new) < len(entries):
        return [found]
    try:
        with (
            tree.folder(source, found.path) as source_folder,
            tree.folder(destination, found.path) as target_folder,
        ):
            if DEFAULT in attribute_names(target_folder):
                return [found]
            status = os.fstat(source_folder)
            writing = "".join(f"{tree.partial_name(name)}\0" for _, name in new).encode()
            if left := native.copy(source_folder, target_folder, new, writing, False, notify):
                return [ChangedFolder(found.path, left)]
            # The top comes last: until then the record is in it.
            if found.path:
                copier.settle(source_folder, target_folder, status)
    except OSError:
        return [found]
    return []
