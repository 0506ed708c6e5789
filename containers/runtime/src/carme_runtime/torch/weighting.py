"""How gradients are weighted, so that their mean over ranks is that over the samples of the global batch.

Batches seldom change their size: gradients are weighted for that of the batch before, the true size travels
in the first bucket, and a difference is put right afterwards.
"""

# As in backend.py.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.torch.buckets import Bucket

__all__ = ["Weighting"]


class Weighting:
    """Samples of this rank and of all.

    Args:
        size: Ranks.
    """

    def __init__(self, size: int) -> None:
        self._size, self._in_bucket = size, False  # whether the first bucket has the number of samples
        self._window = 0  # samples of the passes since the last step,
        self._batch = 0  # and of the one that comes
        self.counted = True  # or no pass has begun that has samples to be counted
        self._counts: torch.Tensor | None = None
        self._counting: Any = None
        self._expected = 0  # samples of the global batch before this one
        self._stated: tuple[int, int] | None = None
        self.correction = 1.0  # of what was weighted for another size than the batch has

    def count_in(self, first: Sequence[Bucket]) -> None:
        """Let this bucket have how many samples all ranks had, if it can and there is one.

        Not where it travels with fewer bits: what the last step lost travels with the gradients, in the units
        of the mean over samples. It would be multiplied too, and what this step loses would not.
        """
        exact = (torch.float32, torch.float64)
        self._in_bucket = any(b.memory.device.type == "cpu" and b.memory.dtype in exact for b in first)
        self._expected = 0

    @property
    def samples(self) -> int:
        """Of this rank, since the last step."""
        return self._window + self._batch

    def state(self, samples: int, total: int) -> None:
        """From now on a pass is over `samples` of a global batch of `total`; nothing is counted."""
        self._stated = (samples, total)

    def begin_pass(self, samples: int) -> None:
        """A pass over so many samples comes."""
        self._batch, self.counted = samples, False

    def end_pass(self, stepped: bool) -> None:
        """A pass is over; `stepped`: it was the last before a step."""
        self._window = 0 if stepped else self.samples

    def begin_window(self) -> None:
        """What was counted since the last step does not count any more."""
        self._window = 0

    def end_early(self) -> None:
        """No pass comes any more before the step."""
        self._batch = 0
        self.count()

    def count(self) -> None:
        """Begin to count the samples of all ranks, where the first bucket does not."""
        self.counted = True
        if self._size > 1 and not self._stated and not (self._in_bucket and self._expected):
            # Counted now, needed when the first bucket is full.
            self._counts = torch.tensor([self.samples], dtype=torch.int64)
            self._counting = dist.all_reduce(self._counts, async_op=True)

    def scale(self, accumulate: int) -> float | None:
        """What makes the mean over ranks the mean over samples, divided by the passes; None: nothing."""
        if self._counting is not None:
            self._counting.wait()
            self._counting = None
        if self._stated:
            samples, total = self._stated
        elif self._counts is not None:
            samples, total = self.samples, int(self._counts.item())
            if self._in_bucket:
                self._expected, self._counts = total, None
        elif self._expected:
            samples, total = self.samples, self._expected
        else:
            return None if accumulate == 1 else 1 / accumulate
        share = samples * self._size / total if total else 0.0
        scale = share / accumulate
        return None if scale == 1 else scale

    def correct(self, first: Bucket) -> None:
        """Take from the reduced first bucket how many samples there were."""
        self.correction = 1.0
        if self._expected and not self._stated:
            total = first.samples(self._size)
            if total != self._expected and total:
                self.correction = self._expected / total
                self._expected = total
