"""Some of the ranks, which do an operation without the others."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.horovod import world as joined
from carme_runtime.horovod.world import world

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "init", "members_of", "remove_process_set"]


class ProcessSet:
    """Ranks that do an operation together; all ranks of the run must know it (`add_process_set`).

    Args:
        ranks: Their numbers, or a list of them. None: all of the run.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self.ranks: list[int] | None = None if ranks is None else sorted(ranks)
        self.process_set_id: int | None = None if ranks is not None else 0
        self._group: Any = None

    def size(self) -> int:
        """How many ranks it has."""
        return world().size if self.ranks is None else len(self.ranks)

    def included(self) -> bool:
        """Whether this rank is one of them."""
        return self.ranks is None or world().rank in self.ranks

    def rank(self) -> int:
        """The number of this rank among them."""
        return _members_of(self).rank

    def __repr__(self) -> str:
        return f"ProcessSet({'all ranks' if self.ranks is None else self.ranks})"

    def form(self, number: int) -> None:
        """Make its group; all ranks of the run call this."""
        self.process_set_id, self._group = number, dist.new_group(self.ranks)

    def forget(self) -> None:
        """Let go of its group."""
        self.process_set_id = self._group = None

    @property
    def group(self) -> Any:
        """That of torch.distributed; None stands for all ranks."""
        return self._group


global_process_set = ProcessSet()


class Members:
    """What an operation needs to know of a set: torch's group, its size, and who this rank is in it."""

    def __init__(self, group: Any, ranks: list[int], rank: int) -> None:
        self.group, self.ranks, self.rank = group, ranks, rank

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)

    def number_of(self, rank: int, argument: str) -> int:
        """The number in the set of a rank of the run. Raises InvalidCall where it is not in it."""
        if rank not in self.ranks:
            raise InvalidCall(
                f"There is no rank {rank} among {self.ranks}.", f"Choose a {argument} that there is."
            )
        return self.ranks.index(rank)


def members_of(process_set: ProcessSet | None) -> Members:
    """Raises InvalidCall for a set that ranks do not know, or to which this rank does not belong."""
    return _members_of(process_set or global_process_set)


def _members_of(process_set: ProcessSet) -> Members:
    run = world()
    if process_set.ranks is None:
        return Members(None, list(range(run.size)), run.rank)
    if process_set.process_set_id is None:
        raise InvalidCall(
            f"{process_set} is not known.", "Call hvd.add_process_set with it on all ranks first."
        )
    if run.rank not in process_set.ranks:
        raise InvalidCall(
            f"Rank {run.rank} is not in {process_set}.",
            "Let only its ranks call: if process_set.included().",
        )
    return Members(process_set.group, process_set.ranks, process_set.ranks.index(run.rank))


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks known; all ranks of the run call this, with the same ranks.

    Raises:
        InvalidCall: A set without ranks, with ranks that there are not, or that is known already.
    """
    run = world()
    members = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = members.ranks
    if not ranks or len(set(ranks)) != len(ranks) or not 0 <= ranks[0] <= ranks[-1] < run.size:
        raise InvalidCall(
            f"A process set cannot be {members} in a run of {run.size} ranks.",
            f"Name ranks from 0 to {run.size - 1}, each once.",
        )
    if any(known.ranks == ranks for known in run.process_sets.values()):
        raise InvalidCall(f"{members} is known already.", "Use the one that add_process_set gave before.")
    run.process_sets_created += 1
    members.form(run.process_sets_created)
    run.process_sets[run.process_sets_created] = members
    return members


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set; all ranks call this. False: there was nothing to forget."""
    known = world().process_sets.pop(process_set.process_set_id or 0, None)
    if known is None:
        return False
    process_set.forget()
    return True


def init(comm: None = None, process_sets: Sequence[ProcessSet] = ()) -> None:
    """Join the run that carme-run, torchrun or the like describes in the environment; again: nothing.

    Args:
        comm: Of no use: MPI's communicators and lists of ranks are refused.
        process_sets: Made known at once, as by `add_process_set`.
    """
    if comm is not None:
        raise InvalidCall("hvd.init got a communicator.", "Leave comm out, and use process sets.")
    if not joined.is_initialized():
        joined.init()
        for process_set in process_sets:
            add_process_set(process_set)
