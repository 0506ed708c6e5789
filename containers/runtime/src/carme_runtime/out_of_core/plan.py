"""What a step costs with a limit of memory, and why."""

import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

from carme_runtime.out_of_core.sizes import show_size


@dataclass(frozen=True)
class Recomputed:
    """Forward passes that are computed again in the backward pass.

    Attributes:
        groups: Of layers whose are.
        of: Groups that there are.
        seconds: What that takes in a step.
        bytes: What they leave otherwise for their backward passes.
        instead_seconds: What it takes to move that to the disk and back.
        reason: Why none is; empty: some are.
    """

    groups: int = 0
    of: int = 0
    seconds: float = 0.0
    bytes: int = 0
    instead_seconds: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"No forward pass is computed again in the backward pass: {self.reason}."
        return (
            f"Of {self.of} groups of layers {self.groups} compute their forward pass again in the backward "
            f"pass. That takes {self.seconds:.2f} s. To move what they would leave, {show_size(self.bytes)}, "
            f"to the disk and back takes {self.instead_seconds:.2f} s."
        )


@dataclass(frozen=True)
class Plan:
    """The cost of one step. `print(plan)` explains it.

    Attributes:
        limit: Bytes that the process may take.
        least: The smallest limit that works for the recorded step.
        outside: Bytes that do not move: Python, libraries, small tensors, your data.
        room: Bytes for blocks: what is left of the limit.
        whole: Bytes that a step needs when nothing is moved, without `outside`.
        blocks: Bytes by kind: weights, gradients, optimizer, activations.
        read: Bytes that a step reads from the disk.
        written: Bytes that it writes to the disk.
        read_rate: Bytes in a second that the disk gives.
        write_rate: Bytes in a second that the disk takes.
        compute_seconds: What a step takes when all is in memory.
        seconds: Predicted duration.
        measured_seconds: What the last step took.
        measured_read: Bytes that the last step read.
        measured_written: Bytes that the last step wrote.
        place: Where blocks go.
        overhead: What does not move.
        both_ways: Whether reading and writing go on at a time without slowing each other down.
        late_step: Why the optimizer's step does not run during the backward pass; empty: it does.
        recomputed: What is computed again, instead of being moved.
    """

    limit: int
    least: int
    outside: int
    room: int
    whole: int
    blocks: dict[str, int]
    read: int
    written: int
    read_rate: float
    write_rate: float
    compute_seconds: float
    seconds: float
    measured_seconds: float
    measured_read: int
    measured_written: int
    place: str = "the disk"
    overhead: str = "Python, libraries and your data"
    both_ways: bool = False
    late_step: str = ""
    recomputed: Recomputed = field(default_factory=Recomputed)

    @property
    def others(self) -> str:
        """The earlier name of `overhead`."""
        warnings.warn("Plan.others is now called overhead.", DeprecationWarning, stacklevel=2)
        return self.overhead

    @property
    def transfer_seconds(self) -> float:
        """How long the disk, or the link, works for a step."""
        durations = self.read / self.read_rate, self.written / self.write_rate
        return max(durations) if self.both_ways else sum(durations)

    @property
    def floor_seconds(self) -> float:
        """What no order of transfers gets below: the longer one of computing and transferring."""
        return max(self.compute_seconds, self.transfer_seconds)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON, in which `overhead` has its earlier name `others`."""
        figures = asdict(self)
        figures["others"] = figures.pop("overhead")
        derived = {"transfer_seconds": self.transfer_seconds, "floor_seconds": self.floor_seconds}
        return figures | derived

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {show_size(size)}" for kind, size in self.blocks.items() if size)
        slower = self.place if self.transfer_seconds > self.compute_seconds else "computing"
        moves = (
            f"Each step reads {show_size(self.read)} and writes {show_size(self.written)}: "
            f"{self.transfer_seconds:.2f} s at {show_size(self.read_rate)}/s and "
            f"{show_size(self.write_rate)}/s."
            if self.read + self.written
            else "Everything fits: nothing is moved."
        )
        return "\n".join(
            (
                f"Limit {show_size(self.limit)}: {show_size(self.outside)} for {self.overhead}, "
                f"{show_size(self.room)} for blocks. A step needs {show_size(self.whole)} of blocks.",
                f"Blocks: {kinds}.",
                moves,
                f"Computing takes {self.compute_seconds:.2f} s, so a step takes at least "
                f"{self.floor_seconds:.2f} s ({slower} decides). Predicted: {self.seconds:.2f} s. "
                f"The last step took {self.measured_seconds:.2f} s, read {show_size(self.measured_read)} and "
                f"wrote {show_size(self.measured_written)}.",
                f"The optimizer's step runs after the backward pass: {self.late_step}."
                if self.late_step
                else "The optimizer's step runs during the backward pass, one parameter after the other.",
                str(self.recomputed),
                f"The smallest limit that works is {show_size(self.least)}.",
            )
        )
