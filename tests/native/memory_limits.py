"""Limits of memory for the process of the tests."""

import torch._dynamo  # noqa: F401 - large, and other tests may load it: `limit` counts it in whichever comes first

import carme_runtime.out_of_core.budget  # noqa: F401 - likewise
from carme_runtime.out_of_core import pages

MIB = 1 << 20
RETURNING = 24  # MiB of pages of libraries that a step uses, about


def limit(room: int = 40) -> int:
    """Bytes that leave about so many MiB for blocks in this process."""
    assert pages.map_large_blocks(1 << 17)
    pages.free(pages.fill_heap(1 << 17))  # what earlier tests left free goes back to the kernel
    pages.drop_library_pages()
    return pages.resident() + pages.page_tables() + (room + 20 + RETURNING) * MIB
