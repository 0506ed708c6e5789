"""A node's own copies of the images, which spare a job the way to the shared folder.

A copy is as the catalogue's image if the manifest beside it, which is written last, names the same digest.
"""

import json
from pathlib import Path

#: Where a node keeps its copies.
COPIES = Path("/var/cache/carme/node-images")


def local_copy(image: Path, copies: Path = COPIES) -> Path:
    """This node's copy of an image file, or the file itself where there is none with its digest.

    Args:
        image: A file of the catalogue.
        copies: The node's folder of copies.
    """
    copy = copies / image.name
    wanted = digest_of(image)
    return copy if wanted and digest_of(copy) == wanted and copy.is_file() else image


def digest_of(image: Path) -> str:
    """What the manifest beside an image says; empty if there is none."""
    try:
        digest = json.loads(image.with_suffix(".json").read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return digest if isinstance(digest, str) else ""
