"""The example notebooks of the launcher, each run by nbclient in a session over two nodes, as it is."""

import re

import pytest

from demo_site import DemoSite
from patience import HANG

#: One rank on each node. With less memory the example of large models trains on two nodes alone.
OPTIONS = {"image": "torch", "nodes": "2", "gpus_per_node": "0", "memory_mb_per_node": "3072"}
#: What each prints that shows that it ran to its end; the first four name both nodes or ranks.
PRINTED = {
    "01-first-steps": [r"rank 0 of 2 on n1", r"rank 1 of 2 on n2"],
    "02-pytorch-in-two-lines": [r"epoch 5: loss", r"accuracy [\d.]+% with 2 rank\(s\)"],
    "03-keras-in-two-lines": [r"accuracy [\d.]+% with 2 rank\(s\)"],
    "04-large-models": [r"rank 0\] step 3: loss", r"rank 1\] step 3: loss"],
    "05-data-staging": [r"20 files"],
    "06-checkpoints": [r"epoch 2: loss"],
    "07-profile": [r"compute"],
}
#: Needs no node but a portal, and a token: tests/unit/webui/test_example_notebooks.py.
ELSEWHERE = {"08-booking"}
#: Runs an example in a folder that both nodes see, and prints what its cells print.
RUN = """
import os, tempfile
import nbformat
from nbclient import NotebookClient
with tempfile.TemporaryDirectory(dir=os.path.expanduser("~")) as folder:
    notebook = nbformat.read("/opt/carme/examples/{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout={limit}, resources={{"metadata": {{"path": folder}}}})
    client.execute()
    left = os.listdir(folder)
for cell in notebook.cells:
    for part in cell.get("outputs", []):
        print(part.get("text", ""))
assert not left, left
"""


@pytest.mark.timeout(10 * HANG)  # seven of them, one after the other
def test_each_example_runs_on_two_nodes(demo: DemoSite) -> None:
    with demo.visitor(demo.user) as visitor:
        name = visitor.start(OPTIONS | {"minutes": "60", "title": "Examples"})
        visitor.wait(name, "ready", timeout=HANG)
        server = visitor.open(name)
        offered = visitor.http.get(f"{server}carme/home").json()["examples"]
        assert {example["name"] for example in offered} == PRINTED.keys() | ELSEWHERE
        with visitor.kernel(server) as kernel:
            for example, wanted in PRINTED.items():
                cell = kernel.run(RUN.format(name=example, limit=int(2 * HANG)), timeout=3 * HANG)
                assert cell.ok, f"{example}: {cell.output}{cell.error}"
                for words in wanted:
                    assert re.search(words, cell.output), f"{example} printed no {words}: {cell.output}"
