"""Host tensors as the core takes them: flat, of types that it knows, and with what ranks compare of them."""

# As in backend.py.
# pyright: reportMissingImports=false

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives import forms
from carme_runtime.collectives.errors import InvalidCall

OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
REDUCIBLE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
_NARROW = (torch.int8, torch.int16)  # reduced as 32-bit integers
_OF_BITS = ("band", "bor", "bxor")

Finisher = Callable[[], None]


# -- what ranks compare

_stated = threading.local()


@contextlib.contextmanager
def stating(form: str | None) -> Iterator[None]:
    """Let ranks compare `form` in what this thread reduces meanwhile, instead of types and shapes.

    For who reduces several tensors as one, and for ranks that know no more than the number of elements.
    """
    _stated.form = form
    try:
        yield
    finally:
        _stated.form = None


def stated_form() -> str | None:
    """What this thread states just now, for another one that goes on with its call."""
    return getattr(_stated, "form", None)


def form_of(tensor: torch.Tensor, sent: torch.dtype = torch.uint8) -> str:
    """What ranks compare of a tensor that travels as elements of type `sent`, besides their number."""
    stated = stated_form()
    if stated is not None:
        return stated
    shape = forms.shape(tuple(tensor.shape))
    return shape if tensor.dtype == sent else f"{name_of(tensor.dtype)} {shape}".strip()


def form_of_all(tensors: Sequence[torch.Tensor]) -> str:
    """The same for tensors that travel together."""
    return forms.combined([form_of(tensor) for tensor in tensors])


def name_of(dtype: torch.dtype) -> str:
    """The name of a type, without torch's."""
    return str(dtype)[6:]


def check_types(*tensors: torch.Tensor) -> None:
    """Raise InvalidCall where tensors of one call differ in their types: bytes would be taken for others."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise InvalidCall(
                f"A collective got tensors of {name_of(tensors[0].dtype)} and of {name_of(tensor.dtype)}.",
                "Give it inputs and outputs of one type.",
            )


# -- memory


def check_host(*tensors: torch.Tensor) -> None:
    """Raise InvalidCall for tensors on another device."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise InvalidCall(
                f"A host tensor is needed here, and one on {tensor.device} was given.",
                "Give tensors of one device to a collective, on the host or on an NVIDIA GPU.",
            )


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in place where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Finisher | None]:
    """The bytes of a tensor, and what brings a changed copy of them back."""
    check_host(tensor)
    copy = flat(tensor)
    if tensor.is_contiguous():
        return copy, None
    return copy, lambda: assign(tensor, copy.view(tensor.dtype))


def assign(tensor: torch.Tensor, elements: torch.Tensor) -> None:
    """Bring flat elements into a tensor."""
    with torch.no_grad():
        tensor.copy_(elements.view(tensor.shape))


def all_of(finishers: Sequence[Callable[[], Any] | None]) -> Finisher | None:
    """One function that calls those that are there; None: there are none."""
    present = [finish for finish in finishers if finish]
    if not present:
        return None

    def run() -> None:
        for finish in present:
            finish()

    return run


# -- reductions


def reduction(opts: Any, *tensors: torch.Tensor) -> tuple[str, float | None]:
    """The core's name of the reduction, and a factor that each member's part has before it."""
    op: Any = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    for known, name in OPERATIONS.items():
        if op == known:
            if name in _OF_BITS and any(t.is_floating_point() or t.is_complex() for t in tensors):
                raise InvalidCall(
                    f"{name.upper()} was requested for floating-point numbers.", "Give integers."
                )
            return name, None
    if op == dist.ReduceOp.PREMUL_SUM:
        if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            raise InvalidCall("PREMUL_SUM was requested for integers.", "Give floating-point numbers.")
        _, factor = op.__getstate__()  # torch has no other way to it
        return "sum", float(factor)
    kind = getattr(op.__getstate__()[0], "name", "of this kind")
    raise InvalidCall(
        f"The carme backend has no reduction {kind}.", f"Choose from {', '.join(OPERATIONS.values())}."
    )


def averages_integers(tensor: torch.Tensor, name: str) -> bool:
    """Whether a mean is a sum that is divided afterwards and cut off, as NCCL does it."""
    if name == "mean" and tensor.dtype == torch.bool:
        raise InvalidCall("The mean of bool was requested.", "Use MAX or MIN, or give numbers.")
    return name == "mean" and not (tensor.is_floating_point() or tensor.is_complex())


def reducible(tensor: torch.Tensor, name: str, members: int) -> tuple[torch.Tensor, str, Finisher | None]:
    """A contiguous tensor of a type that the core reduces, the reduction, and what brings the result back."""
    check_host(tensor)
    tensor = tensor.detach()
    if tensor.is_complex():
        if name not in ("sum", "mean"):
            raise InvalidCall(f"Complex numbers have no {name}.", "Use sum or mean.")
        return reducible(torch.view_as_real(tensor), name, members)
    if averages_integers(tensor, name):
        # Sums of the narrow types would not fit into them.
        wide = tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.to(torch.int32)
        whole, _, _ = reducible(wide, "sum", members)

        def divide() -> None:
            assign(tensor, whole.div_(members, rounding_mode="trunc"))

        return whole, "sum", divide
    if tensor.dtype == torch.bool:
        name = {"sum": "max", "product": "min"}.get(name, name)
        copy = tensor.to(torch.uint8).contiguous()
    elif tensor.dtype in REDUCIBLE:
        if tensor.is_contiguous():
            return tensor.view(-1), name, None
        copy = tensor.contiguous()
    elif tensor.dtype in _NARROW:
        copy = tensor.to(torch.int32).contiguous()
    else:
        raise InvalidCall(
            f"Elements of type {tensor.dtype} cannot be reduced.",
            f"Convert to one of {', '.join(name_of(kind) for kind in REDUCIBLE)}.",
        )
    return copy.view(-1), name, lambda: assign(tensor, copy)


def tensors_in(argument: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a function is called with: in dictionaries, lists and tuples, however deep."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, dict):
        for part in argument.values():
            yield from tensors_in(part)
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from tensors_in(part)
