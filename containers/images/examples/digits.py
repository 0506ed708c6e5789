"""Train a small network on handwritten digits, with as many ranks as there are.

    python digits.py                         one process
    carme-run -n 4 digits.py --epochs 6      four ranks, wherever the job has room for them

The data come with scikit-learn. Every step uses the same global batch whatever the number of ranks,
split evenly among them, so the losses do not depend on it.
"""

import argparse
import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train, and let rank 0 print the progress and write the report."""
    options = parse()
    torch.set_num_threads(1)  # the ranks of a node share its cores, and one thread sums in one order
    torch.manual_seed(0)  # the same first weights in every rank

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if options.batch % world:
        raise SystemExit(
            f"A batch of {options.batch} cannot be split evenly among {world} ranks. Change --batch."
        )
    device = choose_device()
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    images, labels = load(device)
    train, test = slice(0, 1437), slice(1437, None)
    model: nn.Module = build_model().to(device)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    losses: list[float] = []
    for epoch in range(options.epochs):
        for batch in global_batches(epoch, train.stop, options.batch):
            share = batch.view(world, -1)[rank].to(device)
            loss = cross_entropy(model(images[share]), labels[share])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(mean_over_ranks(loss.detach(), world))
        if rank == 0:
            print(f"epoch {epoch + 1}/{options.epochs}: loss {losses[-1]:.4f}", flush=True)

    with torch.no_grad():
        correct = model(images[test]).argmax(1) == labels[test]
    accuracy = correct.double().mean().item()
    hosts = gather(socket.gethostname(), world)
    if rank == 0:
        print(f"test accuracy {accuracy:.1%} with {world} rank(s) on {len(set(hosts))} host(s)", flush=True)
        if options.report:
            report = {"world_size": world, "hosts": hosts, "losses": losses, "accuracy": accuracy}
            options.report.write_text(json.dumps(report))
    if world > 1:
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks (default: 64)")
    parser.add_argument("--report", type=Path, help="file for a JSON report")
    return parser.parse_args()


def choose_device() -> torch.device:
    """This rank's GPU, where there is one that works for every rank of the node."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def load(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images of 8 x 8 pixels and their labels, in a fixed random order."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(images, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16
    return pixels.to(device), torch.tensor(labels)[order].to(device)


def build_model() -> nn.Module:
    """Two convolutions and a linear layer. No batch norm: its statistics would depend on the split."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def global_batches(epoch: int, count: int, size: int) -> list[torch.Tensor]:
    """The epoch's batches, the same in every rank; the rest that does not fill a batch is left out."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1 + epoch))
    return [batch for batch in order.split(size) if len(batch) == size]


def mean_over_ranks(value: torch.Tensor, world: int) -> float:
    """The mean over the ranks' equal shares is the mean over the global batch."""
    if world > 1:
        dist.all_reduce(value)
        value /= world
    return value.item()


def gather(name: str, world: int) -> list[str]:
    """Every rank's name, by rank."""
    if world == 1:
        return [name]
    names = [""] * world
    dist.all_gather_object(names, name)
    return names


if __name__ == "__main__":
    main()
