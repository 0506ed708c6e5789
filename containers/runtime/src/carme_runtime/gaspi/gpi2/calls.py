"""Calls of collectives, as members compare them and as errors name them."""

import json
import time
from collections.abc import Sequence
from typing import Any

BARRIER, ALLREDUCE, BROADCAST, REDUCE_SCATTER, ALLGATHER, ALLTOALL = range(1, 7)
NAMES = {
    BARRIER: "barrier", ALLREDUCE: "allreduce", BROADCAST: "broadcast", REDUCE_SCATTER: "reduce_scatter",
    ALLGATHER: "allgather", ALLTOALL: "alltoall",
}  # fmt: skip
TYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
SIZES = (4, 8, 2, 2, 4, 8, 1)
REDUCTION_NAMES = ("sum", "mean", "min", "max", "product", "band", "bor", "bxor")
WIRE_NAMES = ("", " as bf16", " as int8")


class Call:
    """What one member has called.

    `summary` is what its messages say of it. Members agree if that is the same but for the last part, which
    says in words what is being done where that is not a collective of a user's.
    """

    def __init__(
        self,
        kind: int,
        *,
        source: int = 0,
        output: int = 0,
        count: int = 0,
        element: int = 0,
        reduction: int = 0,
        root: int = 0,
        send_sizes: Sequence[int] = (),
        receive_sizes: Sequence[int] = (),
        label: str = "",
        timeout: int = -1,
        wire: int = 0,
        doing: str = "",
    ) -> None:
        self.kind, self.input, self.output, self.count = kind, source, output, count
        self.type, self.reduction, self.root, self.wire = element, reduction, root, wire
        self.send_sizes, self.receive_sizes = list(send_sizes), list(receive_sizes)
        self.timeout = timeout
        self.deadline: float | None = None
        shape: list[Any] = [] if kind == BARRIER else [count, element, reduction, root, wire]
        if kind == ALLGATHER:
            shape.append(self.receive_sizes)
        self.summary = json.dumps([kind, *shape, label, doing]).encode()
        self.doing = self.described(self.summary)

    @classmethod
    def of(
        cls,
        kind: int,
        source: int,
        output: int,
        count: int,
        element: int,
        reduction: int,
        root: int,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        label: str,
        timeout: int,
        wire: int,
    ) -> "Call":
        """From the arguments of the native core's `Group.execute`."""
        return cls(
            kind,
            source=source,
            output=output,
            count=count,
            element=element,
            reduction=reduction,
            root=root,
            send_sizes=send_sizes,
            receive_sizes=receive_sizes,
            label=label,
            timeout=timeout,
            wire=wire,
        )

    def begin(self) -> None:
        """Its time begins."""
        self.deadline = None if self.timeout < 0 else time.monotonic() + self.timeout / 1000

    def agrees(self, summary: bytes) -> bool:
        """Whether another member called the same."""
        if summary == self.summary:
            return True
        *peer_call, _ = json.loads(summary)
        *own_call, _ = json.loads(self.summary)
        return peer_call == own_call

    @staticmethod
    def described(summary: bytes) -> str:
        """For people."""
        kind, *shape, label, doing = json.loads(summary)
        if doing:
            return doing
        if kind == BARRIER:
            return "barrier"
        count, element, reduction, root, wire = shape[:5]
        named = f" '{label}'" if label else ""
        if kind == ALLTOALL:
            return f"alltoall of {TYPE_NAMES[element]}{named}"
        name = (
            f"{NAMES[kind]} ({REDUCTION_NAMES[reduction]})"
            if kind in (ALLREDUCE, REDUCE_SCATTER)
            else NAMES[kind]
        )
        detail = f" from member {root}" if kind == BROADCAST else WIRE_NAMES[wire]
        return f"{name} of {count} x {TYPE_NAMES[element]}{named}{detail}"
