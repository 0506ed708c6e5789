"""A node's own copies of the images, which spare a job the way to the shared folder.

A copy is as the catalogue's image if the manifest beside it, which is written last, names the same digest.
"""

import json
import os

#: Where a node keeps its copies.
COPIES = "/var/cache/carme/node-images"


def local_copy(image: str, copies: str = COPIES) -> str:
    """This node's copy of an image file, or the file itself where there is none with its digest.

    Args:
        image: A file of the catalogue.
        copies: The node's folder of copies.
    """
    copy = f"{copies}/{os.path.basename(image)}"
    wanted = digest_of(image)
    return copy if wanted and digest_of(copy) == wanted and os.path.isfile(copy) else image


def digest_of(image: str) -> str:
    """What the manifest beside an image says; empty if there is none."""
    try:
        with open(os.path.splitext(image)[0] + ".json", encoding="utf-8") as manifest:
            digest = json.load(manifest)["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return digest if isinstance(digest, str) else ""
