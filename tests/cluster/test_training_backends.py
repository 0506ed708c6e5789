"""Ordinary PyTorch scripts in a session over two nodes: with our backend they train as they do with Gloo."""

import base64
import re

from carme.validation import NotebookKernel
from demo_site import ROOT, DemoSite

OPTIONS = {"image": "torch", "nodes": "2", "gpus_per_node": "1", "minutes": "15", "title": "Backends"}
SCRIPT = ROOT / "tests/native/programs/data_parallel.py"


def trained(kernel: NotebookKernel, backend: str, how: str) -> str:
    """A hash of the trained model's bits."""
    cell = kernel.run(f"!carme-run -n 2 data_parallel.py {backend} {how}", timeout=300)
    found = re.search(r"RESULT ([0-9a-f]{64})", cell.output)
    assert found, cell.output[-3000:]
    return found[1]


def test_unmodified_scripts_train_to_the_same_bits_as_on_gloo(demo: DemoSite) -> None:
    content = base64.b64encode(SCRIPT.read_bytes()).decode()
    with demo.visitor("user1") as visitor:
        name = visitor.start(OPTIONS)
        visitor.wait(name, "ready", timeout=120)
        with visitor.kernel(visitor.open(name)) as kernel:
            code = f"import base64; open('data_parallel.py', 'wb').write(base64.b64decode('{content}'))"
            assert kernel.run(code, timeout=60).ok
            for how in ("ddp", "fsdp"):
                # Of two summands the order does not matter, so not a bit may differ.
                assert trained(kernel, "carme", how) == trained(kernel, "gloo", how)
            kernel.run("import os; os.unlink('data_parallel.py')", timeout=60)
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=60)
