"""Tensors are in memory where a program looks at them past PyTorch's operations."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]

import carme_runtime
from patience import HANG

from .memory_limits import MIB, limit

pytestmark = pytest.mark.timeout(4 * HANG)
FLOATS = MIB // 4  # of a tensor


def last_by_address(tensor: torch.Tensor) -> float:
    return ctypes.c_float.from_address(tensor.data_ptr() + 4 * (FLOATS - 1)).value


LAST: dict[str, Callable[[torch.Tensor], float]] = {
    "numpy": lambda tensor: tensor.numpy()[-1],
    "asarray": lambda tensor: numpy.asarray(tensor)[-1],
    "dlpack": lambda tensor: numpy.from_dlpack(tensor)[-1],
    "list": lambda tensor: tensor.tolist()[-1],
    "address": last_by_address,
}


@pytest.mark.parametrize("access", LAST)
def test_what_is_on_the_disk_comes_for_it(tmp_path: Path, access: str) -> None:
    with carme_runtime.memory(limit(), tmp_path) as budget:
        tensors = [torch.full((FLOATS,), float(i)) for i in range(100)]
        assert budget._operations is not None and budget._operations.store.written
        assert [LAST[access](each) for each in tensors[:8]] == list(range(8))
        del tensors


def test_what_arrays_were_made_of_is_whole_after_the_limit(tmp_path: Path) -> None:
    message = "do not fit into the memory limit and are gone"
    with pytest.warns(UserWarning, match=message), carme_runtime.memory(limit(), tmp_path):
        tensors = [torch.full((FLOATS,), float(i)) for i in range(100)]
        arrays = [each.numpy() for each in tensors[:4]]
        del arrays
        more = [torch.full((FLOATS,), float(i)) for i in range(100)]  # so that they leave
        assert more[0][0] == 0
    assert [each[-1].item() for each in tensors[:4]] == [0, 1, 2, 3]
    assert any(not each.untyped_storage().nbytes() for each in (*tensors, *more))


def test_an_access_that_pytorch_refuses_keeps_nothing_in_memory(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(), tmp_path) as budget:
        tensor = torch.ones(FLOATS, requires_grad=True)
        with pytest.raises(RuntimeError, match="requires grad"):
            tensor.numpy()
        assert budget._operations is not None
        block = budget._operations.block_of(tensor)
        assert block is not None and not block.pins


def test_an_array_keeps_its_tensor_in_memory(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(), tmp_path):
        tensor = torch.full((FLOATS,), 7.0)
        array = tensor.numpy()
        rest = [torch.full((FLOATS,), float(i)) for i in range(100)]
        array[-1] = 8
        assert rest[0][0] == 0 and array[0] == 7 and tensor[-1] == 8


COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "other type": lambda tensor: numpy.asarray(tensor, dtype="float64"),
    "forced": lambda tensor: torch.view_as_complex(tensor.view(-1, 2)).conj().numpy(force=True),
}


@pytest.mark.parametrize("copy", COPIES)
def test_an_array_that_is_a_copy_keeps_nothing_in_memory(tmp_path: Path, copy: str) -> None:
    with carme_runtime.memory(limit(), tmp_path) as budget:
        tensor = torch.ones(FLOATS)
        array = COPIES[copy](tensor)
        later = torch.ones(FLOATS)  # what is let go is so before the next operation
        assert budget._operations is not None
        block = budget._operations.block_of(tensor)
        assert block is not None and not block.pins
        assert array.flat[-1] in (1, 1 - 1j) and later[0] == 1


def test_hooks_of_backward_passes_may_look_as_well(tmp_path: Path) -> None:
    seen: list[float] = []
    with carme_runtime.memory(limit(), tmp_path):
        model: Any = nn.Linear(512, 512)
        model.weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.numpy().max()))
        model(torch.ones(4, 512)).sum().backward()
    assert seen == [4.0]


def test_methods_of_tensors_are_pytorchs_own_but_for_the_limit(tmp_path: Path) -> None:
    before = dict(vars(torch.Tensor))
    with carme_runtime.memory(limit(), tmp_path):
        assert vars(torch.Tensor) != before
        assert not _get_current_function_mode_stack()  # which would slow down every function
    assert dict(vars(torch.Tensor)) == before
