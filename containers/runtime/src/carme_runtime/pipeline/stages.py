"""What each stage of a plan does and holds, and what a stage does that does not fit into memory."""

from dataclasses import dataclass

from carme_runtime.graph.show import size_text


@dataclass(frozen=True)
class Disk:
    """Where a rank moves what does not fit into its memory.

    Args:
        read_rate: Bytes in a second that it gives.
        write_rate: Bytes in a second that it takes.
    """

    read_rate: float
    write_rate: float

    def milliseconds(self, size: float) -> float:
        """How long as many bytes take there and back."""
        return 1000 * size * (1 / self.read_rate + 1 / self.write_rate)


@dataclass(frozen=True)
class Stage:
    """What one rank of a pipeline does and holds.

    Args:
        rank: Within the pipeline.
        operators: How many it runs.
        layers: The first and the last layer.
        forward_ms: All its micro-batches in one step.
        backward_ms: The same.
        parameter_bytes: Of its parameters and buffers.
        memory_bytes: With gradients, optimizer state, activations, messages and workspace.
        sent_bytes: In one step, forward and back.
        recomputed_ms: Of forward passes that it computes again in one step, instead of holding activations.
        spilled_bytes: Of `memory_bytes`, what is on the disk at a time.
        spilling_ms: What that takes in one step beyond the time of computing.
    """

    rank: int
    operators: int
    layers: tuple[str, str]
    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    memory_bytes: int
    sent_bytes: int
    recomputed_ms: float = 0.0
    spilled_bytes: int = 0
    spilling_ms: float = 0.0

    @property
    def present_bytes(self) -> int:
        """Of `memory_bytes`, what is in memory at a time."""
        return self.memory_bytes - self.spilled_bytes

    @property
    def busy_ms(self) -> float:
        """What it computes and moves in one step."""
        return self.forward_ms + self.backward_ms + self.recomputed_ms + self.spilling_ms


@dataclass(frozen=True)
class StageFit:
    """How a stage may fit into memory, and what that costs.

    Args:
        recomputes: Whether it computes its forward passes again.
        needed_bytes: Of memory, for all that it holds then.
        recomputed_ms: See `Stage`.
        spilled_bytes: See `Stage`.
        spilling_ms: See `Stage`.
    """

    recomputes: bool
    needed_bytes: int
    recomputed_ms: float = 0.0
    spilled_bytes: int = 0
    spilling_ms: float = 0.0

    @property
    def milliseconds(self) -> float:
        """What it costs in one step."""
        return self.recomputed_ms + self.spilling_ms

    def __str__(self) -> str:
        parts = []
        if self.recomputes:
            parts.append(f"computing forward passes again takes {self.recomputed_ms:.2f} ms a step")
        if self.spilled_bytes:
            parts.append(
                f"moving {size_text(self.spilled_bytes)} to the disk and back takes "
                f"{self.spilling_ms:.2f} ms a step beyond computing"
            )
        return " and ".join(parts)


def sentence(rank: int, whole: int, memory: int, taken: StageFit, alternatives: list[StageFit]) -> str:
    """Why a stage does what it does.

    Args:
        rank: Of the stage.
        whole: Bytes that it needs if it does nothing.
        memory: Bytes that there are.
        taken: What it does.
        alternatives: What it could do as well.
    """
    done = []
    if taken.recomputes:
        done.append("computes its forward passes again during the backward pass")
    if taken.spilled_bytes:
        done.append("moves a part of its memory to the disk and back")
    text = (
        f"Stage {rank} {' and '.join(done)}: it needs {size_text(whole)} otherwise, and a rank has "
        f"{size_text(memory)}. {_capital(str(taken))}."
    )
    return " ".join([text, *(f"Instead, {alternative}." for alternative in alternatives)])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
