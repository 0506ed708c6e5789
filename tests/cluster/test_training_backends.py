"""Ordinary scripts for PyTorch and for Horovod in a session over two nodes."""

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from carme.validation import NotebookKernel
from demo_site import ROOT, DemoSite

OPTIONS = {"nodes": "2", "gpus_per_node": "1", "minutes": "15", "title": "Backends"}
PROGRAMS = ROOT / "tests/native/programs"
COMPARE = """
import torch
one, two = torch.load("one.pt"), torch.load("two.pt")
assert all(torch.equal(weights, two["weights"][0]) for weights in two["weights"])
torch.testing.assert_close(two["weights"][0], one["weights"][0], rtol=1e-5, atol=1e-6)
print("RESULT", *two["places"])
"""


@contextmanager
def session(demo: DemoSite, script: Path, image: str = "torch") -> Iterator[NotebookKernel]:
    """A notebook in a session of two nodes, with a script in its folder."""
    content = base64.b64encode(script.read_bytes()).decode()
    with demo.visitor("user1") as visitor:
        name = visitor.start(OPTIONS | {"image": image})
        visitor.wait(name, "ready", timeout=120)
        with visitor.kernel(visitor.open(name)) as kernel:
            code = f"import base64; open('{script.name}', 'wb').write(base64.b64decode('{content}'))"
            assert kernel.run(code, timeout=60).ok
            yield kernel
            kernel.run(f"import os; os.unlink('{script.name}')", timeout=60)
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=60)


def trained(kernel: NotebookKernel, backend: str, how: str) -> str:
    """A hash of the trained model's bits."""
    cell = kernel.run(f"!carme-run -n 2 data_parallel.py {backend} {how}", timeout=300)
    found = re.search(r"RESULT ([0-9a-f]{64})", cell.output)
    assert found, cell.output[-3000:]
    return found[1]


def test_unmodified_scripts_train_to_the_same_bits_as_on_gloo(demo: DemoSite) -> None:
    with session(demo, PROGRAMS / "data_parallel.py") as kernel:
        for how in ("ddp", "fsdp"):
            # Of two summands the order does not matter, so not a bit may differ.
            assert trained(kernel, "carme", how) == trained(kernel, "gloo", how)


def test_an_unmodified_horovod_script_trains_as_in_one_process(demo: DemoSite) -> None:
    if demo.run("head", "test", "-f", "/srv/carme/images/horovod.sif", check=False).returncode:
        pytest.skip("the image horovod is not built here; ./demo up --images base,torch,horovod builds it")
    with session(demo, PROGRAMS / "horovod_itself.py", "horovod") as kernel:
        said = ""
        for ranks, name in ((1, "one.pt"), (2, "two.pt")):
            run = f"!carme-run --backend horovod -n {ranks} horovod_itself.py {name}"
            said += kernel.run(run, timeout=300).output
        cell = kernel.run(COMPARE, timeout=60)
        kernel.run("import os; os.unlink('one.pt'); os.unlink('two.pt')", timeout=60)
        # rank, size, local rank and size, cross rank and size
        assert "RESULT (0, 2, 0, 1, 0, 2) (1, 2, 0, 1, 1, 2)" in cell.output, said + cell.output + cell.error
