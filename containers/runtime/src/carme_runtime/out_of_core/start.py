"""The limit that `carme-run --memory-per-rank` sets for scripts that know nothing of it."""

import os
import sys

from carme_runtime.errors import CarmeRuntimeError

LIMIT, FOLDER = "CARME_MEMORY_PER_RANK", "CARME_SPILL"


def start() -> None:
    """Let the limit of the environment hold from now until the process ends; nothing where there is none.

    Processes that this one starts do not have it: they are its helpers, not ranks. A limit that cannot hold
    ends the process with a sentence.
    """
    limit, folder = os.environ.pop(LIMIT, None), os.environ.pop(FOLDER, ".")
    if limit is None:
        return
    from carme_runtime.out_of_core.budget import Budget

    try:
        Budget(limit, folder).__enter__()
    except CarmeRuntimeError as error:
        sys.exit(f"carme-run: {error}")
