"""What a notebook's user has at hand in a session: data on every node's disk."""

import json
import os

import pytest

from demo_site import DemoSite
from patience import HANG

OPTIONS = {"image": "base", "gpus_per_node": "0", "minutes": "10"}
#: Names the nodes on which the staged folder holds the bytes of the source, from a cell of a notebook.
COMPARE = """
import json, subprocess
def sums(folder):
    return f"cd {{folder}} && sha256sum * | sha256sum"
wanted = subprocess.check_output(sums({source!r}), shell=True, text=True)
nodes = {{}}
for node in ("n1", "n2"):
    look = ["carme-remote", node, f"hostname; {{sums(data)}}"]
    done = subprocess.run(look, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    nodes[node] = done.stdout == f"{{node}}\\n{{wanted}}" or done.stdout + done.stderr
print(json.dumps(nodes))
"""


@pytest.mark.alone  # both nodes must have room
def test_a_notebook_stages_data_to_the_disk_of_each_of_its_nodes(demo: DemoSite) -> None:
    source = f"/scratch/staged-{os.urandom(4).hex()}"
    demo.run(
        "head", "sh", "-c", f"mkdir {source} && head -c 300000 /dev/urandom | split -b 1000 - {source}/part"
    )
    try:
        with demo.visitor(demo.user) as visitor:
            name = visitor.start(OPTIONS | {"nodes": "2", "title": "Stage"})
            visitor.wait(name, "ready", timeout=HANG)
            with visitor.kernel(visitor.open(name)) as kernel:
                staged = kernel.run(f"data = %carme_stage {source}", timeout=HANG)
                assert staged.ok, staged.output
                compared = kernel.run(COMPARE.format(source=source), timeout=HANG)
        assert compared.ok, compared.output
        assert json.loads(compared.output) == {"n1": True, "n2": True}
    finally:
        demo.run("head", "rm", "-rf", source)
