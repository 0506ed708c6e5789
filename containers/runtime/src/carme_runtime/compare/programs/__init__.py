"""A training program for each way, between `# user: begin` and `# user: end` as a user writes it.

Each module has `prepare(work)`, which returns the step and what returns the first one's gradients, and
`VERSIONS`, the modules whose versions count. Where gradients are known from the weights alone, it has
`FROM_WEIGHTS`.
Where a step leaves work that its loss does not need, it has `settle()`, which waits for that.
Where steps can be predicted, it also has `profile(work, seconds)` and `machine(ranks_per_node)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from carme_runtime.compare.stored import COLD, MEMORY, Batches, Stored
from carme_runtime.compare.tasks import Task

if TYPE_CHECKING:
    import numpy as np

Mark = Callable[[str], None]  # says that the named part of the step has ended
Step = Callable[[int, Mark], float]  # makes the step of this number, returns its loss
# After the first step alone: its gradients over all ranks, by the names and in the shapes of the task's
# weights. One after the other, so that they need little memory on top.
Gradients = Callable[[], "Iterable[tuple[str, np.ndarray]]"]


@dataclass(frozen=True)
class Work:
    """What one rank's program is to do.

    Args:
        task: Weights and batches.
        rank: Of this process.
        ranks: In all.
        threads: That this rank may compute with.
        setting: Of the contestant.
        is_bf16: Whether it computes in bf16, by the framework's mixed precision, and not in float32.
        input: Where its steps take their batches from: one of `stored.INPUTS`.
        folder: For the files of these, unless they are in memory.
    """

    task: Task
    rank: int
    ranks: int
    threads: int
    setting: str = ""
    is_bf16: bool = False
    input: str = MEMORY
    folder: Path = Path()
    stored: list[Stored] = field(default_factory=list)

    def batches(self, values: np.ndarray) -> Batches:
        """What a program's step takes its batches from, when they are as the framework wants them.

        Raises CompareError where files cannot be read as `input` says.
        """
        if self.input == MEMORY:
            return values
        self.stored.append(Stored(values, self.folder, self.input == COLD))
        return self.stored[-1]
