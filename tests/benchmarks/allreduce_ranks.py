"""Ranks of the allreduce benchmark: each carries out commands with its library.

What ranks of other benchmarks share with them is here, too: where they run, and how they come in.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["KIB", "MIB", "come_in", "pin", "read_line", "work"]

KIB, MIB = 1024, 1024 * 1024


def pin() -> None:
    """Keep this rank, no matter who started it, to one core, as Intel MPI does anyhow."""
    known = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    rank = next(int(os.environ[name]) for name in known if name in os.environ)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise EOFError
        line += part
    return line


def come_in(name: str, rank: int, door: str) -> socket.socket:
    """The connection by which this rank gets its commands."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(door)
    network = Path("/proc/self/ns/net").stat().st_ino
    hello = {"name": name, "rank": rank, "network": network, "pid": os.getpid()}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return connection


def work(name: str, door: str) -> None:
    """One rank of a contestant: carries out commands until the connection closes."""
    # Threads have the cores of the one that starts them: Gloo's would be in the way of the one that waits.
    if name != "gloo":
        pin()
    import numpy as np

    rank, ranks, prepare = {"carme": as_carme, "gloo": as_gloo, "horovod": as_horovod}.get(name, as_mpi)()
    if name == "gloo":
        pin()
    connection = come_in(name, rank, door)
    while True:
        try:
            order = json.loads(read_line(connection))
        except (EOFError, OSError):
            os._exit(0)
        count = order["size"] // 4
        array, operate, reset = prepare(order["mode"], count)
        right = True
        if order["check"] and array.size == count:
            pattern = np.arange(count, dtype=np.float32) % 61  # sums are exact in bfloat16, too
            array[:] = pattern + rank
            reset()
            operate()
            right = bool((array == pattern * ranks + ranks * (ranks - 1) // 2).all())
        array[:] = 1  # and not 0: ours leaves out what is zero. Whatever it grows to takes as long to add
        reset()
        operate()
        begin = time.perf_counter()
        for _ in range(order["repeats"]):
            operate()
        took = (time.perf_counter() - begin) / order["repeats"] * 1e6
        del array, operate
        connection.sendall(json.dumps({"us": took, "right": right}).encode() + b"\n")


def as_carme() -> tuple[int, int, Callable[[str, int], Any]]:
    import numpy as np

    from carme_runtime import gaspi

    process = gaspi.init()
    segment = process.segment_create(0, 256 * MIB)
    wires: list[socket.socket] = []

    def prepare(mode: str, count: int) -> Any:
        if mode == "floor":
            # What a rank must do at least: read its part of all buffers, write it back, wait for nobody.
            part = count // process.size
            buffers = [np.zeros(part, np.float32) for _ in range(process.size)]
            step = 16 * KIB

            def operate() -> None:
                for begin in range(0, part, step):
                    total = buffers[0][begin : begin + step]
                    for second in buffers[1:]:
                        np.add(total, second[begin : begin + step], out=total)
                    for second in buffers[1:]:
                        second[begin : begin + step] = total

            return np.zeros(1, np.float32), operate, process.barrier
        if mode == "meeting":
            return np.zeros(1, np.float32), process.group_all.barrier, process.barrier
        if mode == "wire":
            # What nobody can get below on this link: the same bytes both ways, received into little memory.
            wire = wires[0] if wires else connect_two(process.rank, process.group_all)
            wires[:] = [wire]
            data = np.zeros(count, np.float32).data.cast("B")
            room = memoryview(bytearray(min(len(data), 256 * KIB)))
            return np.zeros(1, np.float32), lambda: both_ways(wire, data, room), process.group_all.barrier
        array = segment.array("float32", 0, count) if mode == "segment" else np.empty(count, np.float32)
        plan = process.group_all.plan_allreduce(array, wire="bf16" if mode == "bf16" else "")
        return array, plan.run, process.group_all.barrier

    return process.rank, process.size, prepare


def connect_two(rank: int, everyone: Any) -> socket.socket:
    """A plain connection between two ranks on two nodes."""
    import numpy as np

    where = np.zeros(5, np.int64)
    if rank == 0:
        listener = socket.create_server((os.environ["CARME_ADDRESS"], 0))
        where[:] = [*map(int, os.environ["CARME_ADDRESS"].split(".")), listener.getsockname()[1]]
        everyone.broadcast(where, 0)
        connection = listener.accept()[0]
        listener.close()
    else:
        everyone.broadcast(where, 0)
        connection = socket.create_connection((".".join(map(str, where[:4])), int(where[4])))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection


def both_ways(connection: socket.socket, data: memoryview, room: memoryview) -> None:
    """Send all of `data` and receive as much; what comes is not kept."""
    sent = came = 0
    while sent < len(data) or came < len(data):
        with contextlib.suppress(BlockingIOError):
            if sent < len(data):
                sent += connection.send(data[sent:])
        with contextlib.suppress(BlockingIOError):
            if came < len(data):
                came += connection.recv_into(room, min(len(room), len(data) - came))


def as_gloo() -> tuple[int, int, Callable[[str, int], Any]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def prepare(_: str, count: int) -> Any:
        tensor = torch.empty(count)
        return tensor.numpy(), lambda: dist.all_reduce(tensor), dist.barrier

    return dist.get_rank(), dist.get_world_size(), prepare


def as_horovod() -> tuple[int, int, Callable[[str, int], Any]]:
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]
    import torch

    hvd.init()

    def prepare(_: str, count: int) -> Any:
        tensor = torch.empty(count)
        return tensor.numpy(), lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="x"), hvd.barrier

    return hvd.rank(), hvd.size(), prepare


def as_mpi() -> tuple[int, int, Callable[[str, int], Any]]:
    import numpy as np
    from mpi4py import MPI as mpi  # pyright: ignore[reportMissingImports]

    world = mpi.COMM_WORLD

    def prepare(_: str, count: int) -> Any:
        array = np.empty(count, np.float32)
        return array, lambda: world.Allreduce(mpi.IN_PLACE, array), world.Barrier

    return world.Get_rank(), world.Get_size(), prepare
