"""The backend `carme` on GPU tensors. Needs a GPU, and carme_runtime built with its native core."""

import pytest
from ranks import run

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("There is no GPU.", allow_module_level=True)
SHARED = torch.cuda.device_count() == 1


def test_one_rank_with_its_own_gpu_uses_nccl():
    (output,) = run("collectives", 1)
    assert "over NCCL" in output


@pytest.mark.skipif(not SHARED, reason="With several GPUs the two ranks have one each.")
def test_ranks_that_share_a_gpu_are_staged_through_host_memory():
    outputs = run("collectives", 2)
    assert all("over host memory" in output for output in outputs)


@pytest.mark.skipif(SHARED, reason="Needs two GPUs.")
def test_ranks_with_a_gpu_each_use_nccl():
    assert all("over NCCL" in output for output in run("collectives", 2))


def test_a_script_for_nccl_gets_the_backend_that_it_is_started_with():
    for output in run("unchanged", 2, CARME_TORCH_BACKEND="carme"):
        assert "PASSED ddp" in output
