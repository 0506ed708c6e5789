"""Training an ONNX model without waiting for each other: samples until it is right, time beside a slow rank.

    ./test bench onnx_training --quick
    ./test bench onnx_training --json result.json

Two ranks train a network on the digits of scikit-learn, once with the gradients of all ranks averaged before
each step (sync), once without waiting (async), in turns. `samples_ratio`: the fewest epochs after which 97 %
of the digits that were held back are right, async over sync. `slowed_time_ratio`: the time of the same epochs
where one rank takes four times as long for a sample, async over sync.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import print_table, row, write_json

#: Aims: of samples until so many digits are right, and of the time beside a rank so many times as slow.
SAMPLES, TIME, RIGHT, SLOWER = 1.2, 0.6, 0.97, 4
#: Seconds that a sample takes at least, so that the network's size does not matter; of a batch; of epochs.
SAMPLE_SECONDS, BATCH, MOST_EPOCHS = 0.0004, 64, 30
START_SECONDS = 1800


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="one round")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.worker:
        return work(arguments.worker, 1 if arguments.quick else 5)
    with tempfile.TemporaryDirectory() as folder:
        worker = [__file__, "--worker", folder, *(["--quick"] if arguments.quick else [])]
        command = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "2", *worker]
        subprocess.run(command, check=True, timeout=START_SECONDS)
        found = json.loads((Path(folder) / "result.json").read_text())
    rows = []
    for name, unit, key, aim in (
        ("samples_ratio", "x", "epochs", SAMPLES),
        ("slowed_time_ratio", "x", "seconds", TIME),
    ):
        measured, reference = (statistics.median(found[mode][key]) for mode in ("async", "sync"))
        ratio = measured / reference
        more = {"ours_" + key: measured, "sync_" + key: reference}
        rows.append(row(name, unit, ratio, aim=f"<= {aim}", holds=ratio <= aim, **more))
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows)
    return None


def model(seed: int) -> Any:
    """Two layers for digits of 8 x 8 pixels."""
    import numpy
    from onnx import TensorProto, helper, numpy_helper

    chance = numpy.random.default_rng(seed)
    sizes = {"w1": (64, 64), "b1": (64,), "w2": (64, 10), "b2": (10,)}
    tensors = [
        numpy_helper.from_array((0.1 * chance.standard_normal(shape)).astype(numpy.float32), name)
        for name, shape in sizes.items()
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "digits", [given], [result], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def work(folder: Path, rounds: int) -> None:
    """Of one rank."""
    import os

    import numpy
    import torch
    from sklearn.datasets import load_digits

    import carme_runtime.onnx

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    digits: Any = load_digits()
    order = numpy.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images.reshape(-1, 64) / 16).astype("float32")[order], digits.target[order]
    seen, held = slice(0, 1500), slice(1500, None)
    wait = 0.0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(wait * len(targets))
        return torch.nn.functional.cross_entropy(outputs, targets)

    def fit(mode: str, seed: int, epochs: int) -> tuple[float, float]:
        """The share of held back digits that are right, and seconds."""
        cuts = range(0, 1500, BATCH)
        data = [(images[seen][at : at + BATCH], labels[seen][at : at + BATCH]) for at in cuts]
        began = time.perf_counter()
        trained = carme_runtime.onnx.fit(
            model(seed), data, loss=loss, mode=mode, epochs=epochs, learning_rate=0.1, momentum=0.9
        )
        took = time.perf_counter() - began
        with torch.no_grad():
            right = trained.module(torch.from_numpy(images[held])).argmax(1).numpy() == labels[held]
        return float(right.mean()), took

    found: dict[str, dict[str, list[float]]] = {
        mode: {"epochs": [], "seconds": []} for mode in ("sync", "async")
    }
    for seed in range(rounds):
        for mode in found if seed % 2 else reversed(found):
            wait = 0.0
            epochs = next((n for n in range(1, MOST_EPOCHS) if fit(mode, seed, n)[0] >= RIGHT), MOST_EPOCHS)
            found[mode]["epochs"].append(epochs)
            wait = SAMPLE_SECONDS * (SLOWER if rank == 0 else 1)
            found[mode]["seconds"].append(fit(mode, seed, 5)[1])
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
