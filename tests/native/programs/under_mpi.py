"""What a launcher has started is one run for us, and with the argument `mpi` also for MPI."""

import socket
import sys

import numpy as np

from carme_runtime import gaspi

world = None
if "mpi" in sys.argv:
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    world = MPI.COMM_WORLD
with gaspi.init(60) as process:
    ranks = np.array([process.rank, 1], np.int64)
    process.allreduce(ranks)
    assert list(ranks) == [process.size * (process.size - 1) // 2, process.size]
    if world:
        assert (world.Get_rank(), world.Get_size()) == (process.rank, process.size)
        assert world.allreduce(process.rank) == ranks[0]
    hosts = np.zeros(process.size, np.int64)
    number = socket.gethostname().lstrip("node")  # of n1, or of node1
    hosts[process.rank] = int(number) if number.isdecimal() else 0
    process.allreduce(hosts)
    if process.rank == 0:
        print("RANKS", process.size, "HOSTS", *hosts, "MPI" if world else "NO-MPI", flush=True)
