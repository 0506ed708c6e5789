"""Rank 0 reads a checkpoint, which travels to the others while they begin to use it.

streamed_checkpoint.py save|overlap|orders|limited|mistakes FOLDER
"""

# pyright: reportMissingImports=false

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from native.memory_limits import limit
from torch import nn

import carme_runtime
from carme_runtime.checkpoint import Checkpoints, Damaged, files, streamed
from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.out_of_core import pages
from carme_runtime.torch import parallelize, pipeline
from carme_runtime.torch.parallel import join_run

torch.set_num_threads(1)
join_run()
rank, size = dist.get_rank(), dist.get_world_size()
action, folder = sys.argv[1:]
streamed._PIECE = 1  # each tensor is a message of its own
read: Any = files.read


def read_on_rank_0(checkpoint: Any, receiver: Any) -> Any:
    assert rank == 0, "another rank than 0 reads the checkpoint"
    return read(checkpoint, receiver)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that no other rank and no other call has, and its optimizer."""
    torch.manual_seed(torch.seed() % 1000 + rank)
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
    model = nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """The losses of some steps on this rank's data."""
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save() -> None:
    model, optimizer = parallelize(*build())
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer)
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, model=model, optimizer=optimizer, epoch=7, mean=torch.full((3,), 2.0))
    checkpoints.wait()


def resumed(start: str, first: str, **options: Any) -> tuple[list[float], dict[str, Any], Any]:
    """Losses, values and the whole state after going on from the checkpoint."""
    files.read = read_on_rank_0 if start else read
    model, optimizer = build()
    if first == "parallelize":
        parallelize(model, optimizer, start=start, **options)
    values = Checkpoints(folder, start=start).resume(model=model, optimizer=optimizer)
    assert values is not None
    assert optimizer.param_groups[0]["lr"] == 0.01, "a scheduler would begin with another rate"
    if first == "resume":
        parallelize(model, optimizer, start=start, **options)
    losses = train(model, optimizer)
    files.read = read
    return losses, values, (model.state_dict(), optimizer.state_dict())


def orders() -> None:
    """Before and after `parallelize`, with and without its own streaming: bitwise as all ranks would read."""
    expected, values, whole = resumed("", "parallelize")
    assert values["step"] == 3 and values["epoch"] == 7, values
    for first in ("resume", "parallelize"):
        losses, rest, state = resumed("streamed", first)
        assert losses == expected, (first, losses, expected)
        assert rest["epoch"] == 7
        assert torch.equal(rest["mean"], values["mean"])
        torch.testing.assert_close(state, whole, rtol=0, atol=0)
    divided, _, state = resumed("streamed", "resume", shard_optimizer=True)
    torch.testing.assert_close(divided, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, whole, rtol=1e-4, atol=1e-6)
    once()
    others_use_it()


def once() -> None:
    """What a checkpoint brings, `parallelize` does not send again."""
    model, optimizer = build()
    Checkpoints(folder, start="streamed").resume(model=model, optimizer=optimizer)
    send, sent = Group.broadcast, []

    def counting(self: Group, *arguments: Any, **keywords: Any) -> Any:
        sent.append(arguments)
        return send(self, *arguments, **keywords)

    Group.broadcast = counting  # pyright: ignore[reportAttributeAccessIssue]
    parallelize(model, optimizer, start="streamed")
    Group.broadcast = send
    assert not sent, "parameters travel twice"
    model(torch.ones(2, 8)).sum().backward()  # and now they are everywhere
    own_part = [p.detach().clone() for p in model.parameters()]
    for own in own_part:
        reference = own.clone()
        dist.broadcast(reference, 0)
        assert torch.equal(own, reference)


def others_use_it() -> None:
    """Whatever uses the parts first finds what was saved."""
    whole = Checkpoints(folder).load()
    assert whole is not None
    model, optimizer = build()
    checkpoints = Checkpoints(folder, start="streamed")
    checkpoints.resume(model=model, optimizer=optimizer)
    torch.testing.assert_close(model.state_dict(), whole[1]["model"], rtol=0, atol=0)
    state = optimizer.state_dict()["state"]
    torch.testing.assert_close(state, whole[1]["optimizer"]["state"], rtol=0, atol=0)
    loaded = checkpoints.load()
    assert loaded is not None
    torch.testing.assert_close(loaded[1]["model"], whole[1]["model"], rtol=0, atol=0)
    model, optimizer = build()
    checkpoints.resume(model=model, optimizer=optimizer)
    created, _ = pipeline(model, optimizer, example=torch.ones(4, 8), stages=size, micro_batches=1)
    found = created.state_dict()
    if rank == 0:
        torch.testing.assert_close(dict(found), whole[1]["model"], rtol=0, atol=0)
    created.close()
    model, optimizer = build()
    checkpoints.resume(model=model, optimizer=optimizer)  # and is never used: nobody waits for it in vain


def overlap() -> None:
    """Rank 0 does not send the last tensors before rank 1 has run the first layer."""
    send: Any = Group.broadcast
    sent = [0]

    def hold(self: Group, *arguments: Any, **options: Any) -> Any:
        if options.get("asynchronous"):
            sent[0] += 1
            if sent[0] == 7:  # a value, three buffers, and the first layer's weight and bias have gone
                dist.recv(torch.empty(1), 1)
        return send(self, *arguments, **options)

    files.read = read_on_rank_0
    model, optimizer = build()
    if rank == 0:
        Group.broadcast = hold
    else:
        model[0].register_forward_hook(lambda *_: dist.send(torch.ones(1), 0))  # pyright: ignore
    Checkpoints(folder, start="streamed").resume(model=model, optimizer=optimizer)
    model.eval()
    with torch.no_grad():
        found = model(torch.ones(2, 8))
    files.read, Group.broadcast = read, send
    second, optimizer = build()
    Checkpoints(folder).resume(model=second, optimizer=optimizer)
    with torch.no_grad():
        assert torch.equal(found, second.eval()(torch.ones(2, 8)))


def large(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights and momentum of 48 MiB each."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 1024)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def limited() -> None:
    """Where memory is limited, what rank 0 reads is not in memory as a whole: not there, and nowhere else."""
    model, optimizer = large(0)
    stepped(model, optimizer)
    Checkpoints(folder).save(1, model=model, optimizer=optimizer, epoch=1).wait()
    expected = [stepped(model, optimizer) for _ in range(2)]
    del model, optimizer
    files.read = read_on_rank_0
    with tempfile.TemporaryDirectory() as spill, carme_runtime.memory(most := limit(), spill) as budget:
        model, optimizer = budget.adopt(*large(1 + rank))
        pages.forget_peak()
        values = Checkpoints(folder, start="streamed").resume(model=model, optimizer=optimizer)
        assert values == {"step": 1, "epoch": 1}
        assert pages.peak() <= most, (pages.peak(), most)
        assert [stepped(model, optimizer) for _ in range(2)] == expected
        del model, optimizer
    files.read = read
    whole = Checkpoints(folder, start="streamed").load()
    assert whole is not None and whole[0] == 1
    damage(Path(folder) / "step-0000000001.0" / "share-1")
    with tempfile.TemporaryDirectory() as spill, carme_runtime.memory(limit(), spill):
        checkpoints = Checkpoints(folder, start="streamed")
        with pytest.raises(Damaged, match="share-1 does not hold what was written"):
            checkpoints.load()
        assert checkpoints.load(2) is None


def damage(file: Path) -> None:
    dist.barrier()
    if rank == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()


def mistakes() -> None:
    with pytest.raises(InvalidCall, match=r"no start 'slowly'.*'streamed'"):
        Checkpoints(folder, start="slowly")
    model, _ = build()
    with pytest.raises(InvalidCall, match=r"step 3 has no 'weights'.*model, optimizer"):
        Checkpoints(folder, start="streamed").resume(weights=model)
    narrow = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="state_dict"):
        Checkpoints(folder, start="streamed").resume(model=narrow)
    assert Checkpoints(f"{folder}-empty", start="streamed").resume(model=model) is None


globals()[action]()
dist.barrier()
dist.destroy_process_group()
