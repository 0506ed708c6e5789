"""The limit that `carme-run --memory-per-rank` sets for scripts that know nothing of it."""

import os
import sys
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.imports import first_in_path
from carme_runtime.out_of_core.environment import FOLDER, LIMIT, RECOMPUTE
from carme_runtime.out_of_core.plan import Recomputed


def variables(
    limit: int | None, folder: Path | None, path: str | None, *, recompute: bool = False
) -> dict[str, str]:
    """What ranks with this limit have in their environment; nothing where there is none.

    Args:
        limit: Bytes.
        folder: For what does not fit.
        path: The PYTHONPATH that they would have.
        recompute: Whether layers may compute their forward passes again.
    """
    if limit is None or folder is None:
        return {}
    own = {LIMIT: str(limit), FOLDER: str(folder.absolute()), "PYTHONPATH": first_in_path(path)}
    return own | {RECOMPUTE: "1"} if recompute else own


def start() -> None:
    """Let the limit of the environment hold from now until the process ends; nothing where there is none.

    Processes that this one starts do not have it: they are its helpers, not ranks. A limit that cannot hold
    ends the process with a sentence.
    """
    limit, folder = os.environ.pop(LIMIT, None), os.environ.pop(FOLDER, ".")
    again = os.environ.pop(RECOMPUTE, None)
    if limit is None:
        return
    from carme_runtime.out_of_core import keras_scripts
    from carme_runtime.out_of_core.budget import Budget

    try:
        budget = Budget(limit, folder).__enter__()
    except CarmeRuntimeError as error:
        sys.exit(f"carme-run: {error}")
    if again:
        keras_scripts.refuse_training()
        budget.recompute_called(_report)


def _report(found: Recomputed | str) -> None:
    """What became of --recompute: the first rank says it, as the script has no plan to print."""
    if os.environ.get("RANK", "0") == "0":
        print(f"carme-run: {found}", file=sys.stderr, flush=True)
