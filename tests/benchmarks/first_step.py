"""Times the start over a link of 1 Gbit/s: rank 0's parameters travel, the first forward pass runs.

Its rows are part of `pipeline.py`. Two nodes (see two_nodes.py) with a rank and a core each; all ranks begin
with another model, and a turn ends when the slowest rank has the first loss, which must be the same number
everywhere. `floor` is the longer of two times: the parameters on the wire, and the forward pass alone, whose
batch is so large that both take about as long. Rows first_loss_* are judged; rows first_step_* are until the
first step of the optimizer is over, when gradients have used the same link, too.

Contestants: `parallelize(start="streamed")`, which is ours; `parallelize` without it (carme_at_once); DDP on
Gloo; and Horovod, over MPI where its own is installed, else over Gloo.
"""

import contextlib
import importlib.util
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allreduce import Contestant, Scene, admit, has_horovod, start, start_horovod
from allreduce_ranks import come_in, pin, read_line
from report import row
from two_nodes import TwoNodes, can_be_made

__all__ = ["first_steps"]

CARME, AT_ONCE, DDP, HOROVOD = "carme_streamed", "carme_at_once", "gloo_ddp", "horovod"
GBIT, WIDTH = 1.0, 1024
MOST, LEAST = 1.15, 1.8  # times the floor; times faster than Horovod
_PROBE_SAMPLES = 64
_stores: list[Any] = []  # one, as long as its process
_LAYERS = "CARME_BENCHMARK_LAYERS"
_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


def first_steps(quick: bool, turns: int | None = None) -> list[dict[str, Any]]:
    """The rows, of a model of 100 MB; a third of that with `quick`. None where two nodes cannot be made."""
    if not can_be_made():
        print("Two nodes need root, ip and tc: first steps are left out.", file=sys.stderr)
        return []
    layers, turns = (8 if quick else 24), turns or (3 if quick else 5)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = stack.enter_context(TwoNodes(GBIT, folder))
        contestants = _start_all(stack, folder, nodes, layers)
        wire = (nodes.wire_us(layers * (WIDTH + 1) * WIDTH * 4) or 0.0) / 1000
        return _measure(contestants, wire, layers, turns)


def _start_all(
    stack: contextlib.ExitStack, folder: Path, nodes: TwoNodes, layers: int
) -> dict[str, Contestant]:
    """The contestants that could be started; `stack` ends them."""
    door, scene = folder / "door", Scene("1gbit", 2, gbit=GBIT)
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(str(door))
    listener.listen(16)
    program, more = Path(__file__), {_LAYERS: str(layers)}
    contestants = {name: start(scene, name, door, nodes, program, more) for name in (CARME, AT_ONCE, DDP)}
    if has_horovod():
        contestants[HOROVOD] = start_horovod(scene, door, nodes, program, more)
    elif importlib.util.find_spec("horovod"):
        by_gloo = _GLOO | {"HOROVOD_GLOO_IFACE": nodes.device}
        contestants[HOROVOD] = start(scene, HOROVOD, door, nodes, program, more | by_gloo)
        contestants[HOROVOD].rests = False
    for each in contestants.values():
        stack.callback(each.end)
    if absent := admit(contestants, listener):
        logs = [(folder / f"{name}.log").read_text(errors="replace")[-2000:] for name in absent]
        message = f"These did not start: {', '.join(absent)}\n" + "\n".join(logs)
        if not {CARME, DDP} <= contestants.keys():
            raise SystemExit(message)
        print(message, file=sys.stderr)
    return contestants


def _measure(
    contestants: dict[str, Contestant], wire: float, layers: int, turns: int
) -> list[dict[str, Any]]:
    """Rows of `turns` turns; one more warms up."""

    def forward(samples: int) -> float:
        return max(each["forward"] for each in contestants[CARME].order({"forward": samples}))

    forward(_PROBE_SAMPLES)
    samples = max(1, round(_PROBE_SAMPLES * wire / forward(_PROBE_SAMPLES)))
    alone: list[float] = []
    times: dict[str, dict[str, list[float]]] = {"loss": {}, "step": {}}
    for turn in range(turns + 1):
        took = forward(samples)
        losses = set()
        for name, contestant in contestants.items():
            answers = contestant.order({"start": samples})
            losses |= {answer["value"] for answer in answers}
            for kind in times if turn else ():
                slowest = max(answer[kind] for answer in answers)
                times[kind].setdefault(name, []).append(slowest)
        if len(losses) > 1:
            raise SystemExit(f"The first losses differ: {sorted(losses)}")
        alone += [took] if turn else []
    medians = {
        kind: {name: statistics.median(each) for name, each in found.items()} for kind, found in times.items()
    }
    return _rows(
        medians, wire, statistics.median(alone), {"samples": samples, "layers": layers, "all": times}
    )


def _rows(
    medians: dict[str, dict[str, float]], wire: float, forward: float, more: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of medians in milliseconds, by what ends a turn and by contestant."""
    loss, step = medians["loss"], medians["step"]
    floor, measured = max(wire, forward), loss[CARME]
    peer = HOROVOD if HOROVOD in loss else DDP
    note = "" if peer == HOROVOD else ", in place of Horovod, which is not installed"
    return [
        row(
            "first_loss_ms_mlp_2_1gbit",
            "ms",
            measured,
            peers={name: value for name, value in loss.items() if name != CARME},
            floor=floor,
            aim=f"at most {MOST}x the floor; at least {LEAST}x {peer}{note}",
            holds=measured <= MOST * floor and loss[peer] >= LEAST * measured,
            wire_ms=wire,
            forward_ms=forward,
            of_floor=measured / floor,
            faster={name: value / measured for name, value in loss.items() if name != CARME},
            **more,
        ),
        row(
            "first_step_ms_mlp_2_1gbit",
            "ms",
            step[CARME],
            peers={name: value for name, value in step.items() if name != CARME},
        ),
    ]


# A rank


def work(name: str, door: str) -> None:
    """One rank of a contestant: begins to train as often as an order comes, until the door closes."""
    if name != DDP:
        pin()
    import torch
    from torch import nn

    torch.set_num_threads(1)
    rank, wait_for_all, begin = _joined(name)
    if name == DDP:  # whose threads may run beside it
        pin()
    connection = come_in(name, rank, door)
    while True:
        try:
            order = json.loads(read_line(connection))
        except (EOFError, OSError):
            os._exit(0)
        torch.manual_seed(rank)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(int(os.environ[_LAYERS]))]
        model: Any = nn.Sequential(*layers)
        samples = order.get("forward") or order["start"]
        inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(0))
        answer = {}
        if "forward" in order:
            wait_for_all()
            began = time.perf_counter()
            model(inputs).square().mean()
            answer["forward"] = 1000 * (time.perf_counter() - began)
        else:
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
            wait_for_all()
            began = time.perf_counter()
            model, optimizer = begin(model, optimizer)
            loss = model(inputs).square().mean()
            answer["value"] = loss.item()
            answer["loss"] = 1000 * (time.perf_counter() - began)
            loss.backward()
            optimizer.step()
            answer["step"] = 1000 * (time.perf_counter() - began)
            wait_for_all()
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _joined(name: str) -> tuple[int, Callable[[], Any], Callable[[Any, Any], tuple[Any, Any]]]:
    """This rank, a barrier of all, and what makes a model and its optimizer train together."""
    if name == HOROVOD:
        return _joined_by_horovod()
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo" if name == DDP else "carme")
    if name == DDP:
        return dist.get_rank(), dist.barrier, lambda m, o: (DistributedDataParallel(m), o)
    from carme_runtime.torch import parallelize

    chosen = "streamed" if name == CARME else ""
    return dist.get_rank(), dist.barrier, lambda m, o: parallelize(m, o, start=chosen)


def _joined_by_horovod() -> tuple[int, Callable[[], Any], Callable[[Any, Any], tuple[Any, Any]]]:
    if os.environ["HOROVOD_CONTROLLER"] == "gloo":
        _meet_by_gloo()
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    hvd.init()

    def begin(model: Any, optimizer: Any) -> tuple[Any, Any]:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    return hvd.rank(), hvd.barrier, begin


def _meet_by_gloo() -> None:
    """What `horovodrun` gives ranks: rank 0 has the server at which they meet."""
    from horovod.runner.common.util.hosts import SlotInfo  # pyright: ignore[reportMissingImports]
    from horovod.runner.http.http_server import RendezvousServer  # pyright: ignore[reportMissingImports]
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    # By the name of this node, which is its own (see TwoNodes.on), Gloo looks for its address.
    socket.sethostname(os.environ["CARME_ADDRESS"])
    rank, size, first = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    store = TCPStore(first, int(os.environ["MASTER_PORT"]), size, rank == 0)
    if rank == 0:
        server = RendezvousServer()
        port = server.start()
        server.init([SlotInfo(f"node{each}", each, 0, each, size, 1, size) for each in range(size)])
        store.set("port", str(port))
    os.environ |= {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": first,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": store.get("port").decode(),
        "HOROVOD_HOSTNAME": f"node{rank}",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": str(size),
    }
    _stores.append(store)


if __name__ == "__main__":
    work(*sys.argv[sys.argv.index("--worker") + 1 :])
