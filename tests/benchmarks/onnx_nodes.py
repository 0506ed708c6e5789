"""Five networks on the demo's two nodes with four workers each: LeNet, AlexNet, VGG19, ResNet-50 and U-Net.

    ./test bench onnx_nodes
    ./test bench onnx_nodes --only lenet --keep traces
    ./test bench onnx_nodes --picture docs/pictures/onnx-nodes.svg

A Slurm job of two nodes runs `carme onnx run` with `--workers job:4` for each network, which is cut into
tasks through which micro-batches go. `overlap_<network>`: the share of the time from the first firing to the
last in which workers are at work on two or more micro-batches, from the trace; in the JSON also the share
with both nodes at work, the largest difference from ONNX Runtime and the seconds. The demo's nodes share the
processors of this machine, so the seconds say nothing of two real nodes. Needs root and the demo.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx_picture import Firing, firings, picture
from report import print_table, row, tidy_up_when_ended, write_json

from carme_demo.settings import DEFAULT_NAME, Places
from demo_site import ROOT, DemoSite, wait_until
from onnx_models import model as built
from onnx_models import weights
from real_models import REAL, distance, expected

USER, UID = "user6", 2016
#: Workers on each node, and the memory of each node's part in MiB.
WORKERS, MEMORY = 4, 7000
#: Into how many tasks each network is cut, and how many micro-batches go through them.
NETWORKS = {"lenet": (4, 64), "alexnet": (8, 16), "vgg19": (8, 8), "resnet50": (8, 12), "unet": (8, 12)}
TITLES = dict(zip(NETWORKS, ("LeNet", "AlexNet", "VGG19", "ResNet-50", "U-Net"), strict=True))
_LIGHT = {"alexnet": "bvlc_alexnet", "vgg19": "vgg19", "resnet50": "resnet50"}
#: Aim: of the time, at least so much with several micro-batches in work; and the difference from the oracle.
OVERLAP, EQUAL = 0.5, 1e-4
JOB_SECONDS = 3600
_PYTHON = "3.11"  # of the site's image
_IMAGE = "torch"
_PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxruntime", "otf2")
_SCRIPT = """set -e
cd "$(dirname "$0")"
own=$(python -c 'import carme_runtime; print(carme_runtime.__path__[0])')
[ -e site/carme_runtime/_core* ] || cp -r "$own" site/
cp -r source/. site/carme_runtime/
export PYTHONPATH=$PWD/site
workers=$1
shift
for network in "$@"; do
  set -- $network
  python -m carme_runtime.onnx run $1.onnx --input $1.in.npz --output $1.out.npz \\
    --workers job:$workers --tasks $2 --trace otf2:$1.otf2 --trace html:$1.html --json >$1.json
done
"""


class _Graph:
    """A network that is written down layer by layer."""

    def __init__(self, *shape: int) -> None:
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.shape, self.name = shape, "x"

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node after the last one, or of these inputs; the value that it gives."""
        name = f"{kind.lower()}{len(self.nodes)}"
        given = list(inputs) or [self.name]
        self.nodes.append(helper.make_node(kind, given, [name], name=f"node_{name}", **attributes))
        self.name = name
        return name

    def layer(self, kind: str, *shape: int, **attributes: Any) -> str:
        """A node with weights and a bias of its own."""
        label, count = f"{len(self.nodes)}", shape[1] if kind == "ConvTranspose" else shape[0]
        self.tensors += [weights(f"w{label}", *shape), weights(f"b{label}", count)]
        return self.add(kind, self.name, f"w{label}", f"b{label}", **attributes)

    def convolution(self, out: int, of: int, size: int = 3) -> str:
        """Convolution of the same size, and ReLU."""
        self.layer("Conv", out, of, size, size, pads=[size // 2] * 4)
        return self.add("Relu")

    def proto(self) -> Any:
        """The model."""
        return built(self.nodes, {"x": self.shape}, [self.name], self.tensors)


def lenet() -> Any:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max pooling."""
    graph = _Graph(1, 1, 28, 28)
    for out, of in ((6, 1), (16, 6)):
        graph.convolution(out, of, 5)
        graph.add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    graph.add("Flatten")
    for out, of in ((120, 784), (84, 120), (10, 84)):
        graph.layer("Gemm", out, of, transB=1)
        if out > 10:
            graph.add("Relu")
    return graph.proto()


def unet(size: int = 128, width: int = 16, depth: int = 3) -> Any:
    """U-Net (Ronneberger et al., 2015), narrower and with padding: skips over all of its depth."""
    graph, skips, of = _Graph(1, 3, size, size), [], 3
    for level in range(depth + 1):
        out = width << level
        graph.convolution(out, of)
        skip = graph.convolution(out, out)
        of = out
        if level < depth:
            skips.append((skip, out))
            graph.add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    for skip, out in reversed(skips):
        up = graph.layer("ConvTranspose", of, out, 2, 2, strides=[2, 2])
        graph.add("Concat", skip, up, axis=1)
        graph.convolution(out, 2 * out)
        graph.convolution(out, out)
        of = out
    graph.layer("Conv", 2, of, 1, 1)
    return graph.proto()


def proto_of(name: str) -> Any:
    """A network's model, with random weights."""
    if name in _LIGHT:
        return next(each for each in REAL if each.file.endswith(f"light_{_LIGHT[name]}.onnx")).load().proto
    return {"lenet": lenet, "unet": unet}[name]()


def prepare(name: str, folder: Path) -> dict[str, Any]:
    """Write the model and its input; what ONNX Runtime gives for it."""
    import carme_runtime.onnx as carme_onnx

    proto = proto_of(name)
    onnx.save(proto, folder / f"{name}.onnx")
    model = carme_onnx.load(folder / f"{name}.onnx")
    ((given, example),) = carme_onnx.example_of(model).items()
    count = NETWORKS[name][1]
    x = np.random.default_rng(0).standard_normal((count, *example.shape[1:])).astype(np.float32)
    arrays: dict[str, Any] = {given: x}
    np.savez(folder / f"{name}.in.npz", **arrays)
    with tempfile.TemporaryDirectory() as scratch:
        results = [expected(model, {given: x[k : k + 1]}, Path(scratch)) for k in range(count)]
    return {output: np.concatenate([each[output] for each in results]) for output in model.outputs}


def shares(fired: list[Firing]) -> tuple[float, float, int]:
    """Shares of the time with two or more micro-batches in work, and with both nodes at work.

    Args:
        fired: What the workers did.

    Returns:
        Both shares, and how many workers have fired.
    """
    changes: list[tuple[int, int, Firing]] = []
    for each in fired:
        changes += [(each.begin, 1, each), (each.begin + each.took, -1, each)]
    changes.sort(key=lambda change: change[:2])
    batches, nodes = Counter[int](), Counter[str]()
    both = several = 0
    for (at, sign, firing), (then, *_) in pairwise(changes):
        batches[firing.batch] += sign
        nodes[firing.node] += sign
        several += (then - at) * (sum(1 for count in batches.values() if count) > 1)
        both += (then - at) * (sum(1 for count in nodes.values() if count) > 1)
    length = max(changes[-1][0] - changes[0][0], 1)
    return several / length, both / length, len({each.worker for each in fired})


def install(folder: Path) -> None:
    """Put what the image lacks into a folder, and the runtime of this tree."""
    if not (folder / "site").is_dir():
        binary = ["--only-binary", ":all:", "--python-version", _PYTHON]
        words = ["-m", "pip", "install", "--quiet", *binary, "--target", str(folder / "site"), *_PACKAGES]
        subprocess.run([sys.executable, *words], check=True)
    source = ROOT / "containers/runtime/src/carme_runtime"
    shutil.copytree(source, folder / "source", dirs_exist_ok=True)


def run(demo: DemoSite, names: list[str], folder: Path) -> None:
    """Run the networks in one job."""
    (folder / "run.sh").write_text(_SCRIPT)
    demo.run("head", "chown", "-R", f"{USER}:", f"/home/{USER}/{folder.name}")
    options = ["--image", _IMAGE, "--nodes", "2", "--cpus", str(WORKERS), "--memory", str(MEMORY)]
    command = ["bash", f"/home/{USER}/{folder.name}/run.sh", str(WORKERS)]
    command += [f"{n} {NETWORKS[n][0]}" for n in names]
    options += ["--time", str(JOB_SECONDS // 60), "--name", "onnx-nodes", "--json"]
    words = ["submit", *options, "--", *command]
    job = json.loads(demo.carme(*words, user=USER).stdout)
    number = str(job["job_id"] if "job_id" in job else job["id"])
    try:

        def over() -> bool:
            return not demo.run("head", "squeue", "-h", "-j", number, check=False).stdout.strip()

        wait_until("the job has ended", over, timeout=JOB_SECONDS)
    finally:
        demo.run("head", "scancel", number, check=False)
    missing = [name for name in names if not (folder / f"{name}.out.npz").exists()]
    if missing:
        log = demo.carme("logs", number, user=USER, check=False).stdout
        raise SystemExit(f"The job {number} left no results of {', '.join(missing)}. Its log:\n{log}")


def title(name: str) -> str:
    """Of a network's picture."""
    tasks, batches = NETWORKS[name]
    return f"{TITLES[name]}: {tasks} tasks, {batches} micro-batches"


def measured(name: str, wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The row of a network."""
    found = np.load(folder / f"{name}.out.npz")
    difference = max(distance(found[output], array) for output, array in wanted.items())
    overlap, nodes, workers = shares(firings(folder / f"{name}.html"))
    seconds = json.loads((folder / f"{name}.json").read_text())["seconds"]
    aim = f">= {OVERLAP}, and ONNX Runtime's results to {EQUAL} (are to {difference:.1e})"
    holds = overlap >= OVERLAP and difference <= EQUAL
    more = {"both_nodes": nodes, "workers": workers, "difference": difference, "seconds": seconds}
    more |= {"tasks": NETWORKS[name][0], "micro_batches": NETWORKS[name][1]}
    return row(f"overlap_{name}", "", overlap, aim=aim, holds=holds, **more)


def main() -> int:
    """Measure; 1: an aim is missed."""
    parser = argparse.ArgumentParser(description="Five networks on two nodes with four workers each.")
    parser.add_argument("--only", choices=NETWORKS, action="append", help="this network; may be repeated")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="gets the traces and timelines")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="gets a drawing of the traces")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args()
    tidy_up_when_ended()
    demo = DemoSite(USER)
    demo.onboard(USER, UID)
    places = Places(os.environ.get("CARME_DEMO", DEFAULT_NAME))
    folder = places.shared / "home" / USER / "onnx-nodes"
    names = options.only or list(NETWORKS)
    try:
        folder.mkdir(exist_ok=True)
        install(folder)
        wanted = {name: prepare(name, folder) for name in names}
        run(demo, names, folder)
        rows = [measured(name, wanted[name], folder) for name in names]
        if options.keep:
            options.keep.mkdir(exist_ok=True)
            for name in names:
                shutil.copytree(folder / f"{name}.otf2", options.keep / f"{name}.otf2", dirs_exist_ok=True)
                shutil.copy(folder / f"{name}.html", options.keep)
        if options.picture:
            drawn = [(title(name), firings(folder / f"{name}.html")) for name in names]
            options.picture.write_text(picture(drawn))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(rows)
    if options.json:
        write_json(options.json, rows)
    return 0 if all(each["holds"] is not False for each in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
