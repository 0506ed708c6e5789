"""Which processes Linux ends first when memory runs out: the `oom_score_adj` of ranks and of kernels.

Linux ends the process that has the most memory, and adds to what each one has so many thousandths of the
limit (of the job's memory, or of the node's). Sometimes it ends a second process before the memory of the
first one is free. A session's server and its node agent stay at the value that Slurm gave them, ranks and
kernels raise theirs, so that the session outlives both. Raising needs no privilege; children inherit it.

Source: proc_pid_oom_score_adj(5).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

#: Ranks, the programs beside them, and what cleans up after them: before all that has less than half of it.
RANK = 500
#: Kernels of notebooks: before the session's server, after ranks.
KERNEL = 100

_OWN = Path("/proc/self/oom_score_adj")


def raise_own(value: int) -> None:
    """Raise this process's value to at least `value`; it stays where /proc cannot be written."""
    with contextlib.suppress(OSError):
        if int(_OWN.read_text()) < value:
            _OWN.write_text(str(value))


@contextlib.contextmanager
def children_at(value: int) -> Iterator[None]:
    """What this process starts within has at least `value`, from its first moment.

    The value is the process's, so that threads must start nothing else meanwhile. Without privilege it can be
    lowered again to what a privileged process wrote last, and so to where it was.
    """
    try:
        before = _OWN.read_text()
    except OSError:
        yield
        return
    raise_own(value)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _OWN.write_text(before)
