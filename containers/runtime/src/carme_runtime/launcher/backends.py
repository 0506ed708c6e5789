"""What `--backend` sets, starts and stops for each framework: one entry of `BACKENDS` each."""

import importlib.util
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric
from carme_runtime.fabric.members import Member
from carme_runtime.launcher import dask, gaspi, horovod, mpi, ray
from carme_runtime.launcher.placement import Place, is_spread
from carme_runtime.launcher.programs import Process, Program
from carme_runtime.launcher.run_setup import Setup

Variables = dict[int, dict[str, str]]
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")  # that gRPC reads
PORT_TRIES = 20  # per port: a node may name one twice, as nothing listens there yet


@dataclass(frozen=True)
class Backend:
    """A framework as carme-run knows it.

    Args:
        sets: The variables that ranks get on top of every run's; those that torch has are every run's.
        starts: What is started beside or instead of the ranks.
        stops: What ends with the run besides the ranks.
        variables: By rank, the values of `sets`.
        ports: The nodes that free ports are needed of, one entry for each port.
        modules: What this Python must have, by the names that people install.
        commands: Any of these must be on PATH.
        refuses: Raises CarmeRuntimeError where the framework cannot work like this.
        programs: What is started beside the ranks, one after the other.
        secrets: The names of variables that nobody else may know.
        make_secrets: Their values, new for each run.
        explains: What the last error output of a rank means, where that is a fault of users that it does not
            name; else empty.
        torch: Whether scripts may train with PyTorch, so that its options mean something.
        runtime: Whether ranks may train over carme_runtime, so that its options mean something.
        driver: Whether the script runs once, on the first node, and `programs` are the ranks' processes.
    """

    sets: tuple[str, ...]
    starts: str = "nothing beside the ranks"
    stops: str = "nothing beside the ranks"
    variables: Callable[[Setup], Variables] = lambda setup: {}
    ports: Callable[[list[Place]], list[Member]] = lambda places: []
    modules: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    refuses: Callable[[Setup], None] = lambda setup: None
    programs: Callable[[Setup], list[Program]] = lambda setup: []
    secrets: tuple[str, ...] = ()
    make_secrets: Callable[[], list[str]] = list
    explains: Callable[[str], str] = lambda output: ""
    torch: bool = True
    runtime: bool = True
    driver: bool = False


def _tensorflow(setup: Setup) -> Variables:
    hosts = [_host(place, setup.places) for place in setup.places]
    workers = [f"{host}:{port}" for host, port in zip(hosts, setup.ports, strict=True)]
    return {
        place.rank: {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.rank}}
            ),
            "TF_USE_LEGACY_KERAS": "1",
        }
        for place in setup.places
    }


def _explain_tensorflow(output: str) -> str:
    """Keras 3 fails in words from which nobody learns that it is to blame."""
    if "/keras/src/" in output and ("PerReplica" in output or "tensorflow/python/distribute/" in output):
        return (
            "Keras 3 cannot train with MultiWorkerMirroredStrategy. Use tf.keras, which is tf_keras here, "
            "instead of keras, or carme_runtime.keras without --backend."
        )
    return ""


def _jax(setup: Setup) -> Variables:
    """What `jax.distributed.initialize()` reads: it takes ranks for tasks of srun, and so without one too."""
    places, [port] = setup.places, setup.ports
    coordinator = f"{_host(places[0], places)}:{port}"
    hosts = list(dict.fromkeys(place.member.host for place in places))
    return {
        place.rank: {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            # Its own choice is every address of the host.
            "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
            "JAX_LOCAL_DEVICE_IDS": _jax_devices(place, setup.devices_per_rank),
            "SLURM_JOB_ID": setup.caller.get("SLURM_JOB_ID", "0"),
            "SLURM_STEP_NODELIST": setup.caller.get("SLURM_STEP_NODELIST", ",".join(hosts)),
            "SLURM_NTASKS": str(len(places)),
            "SLURM_PROCID": str(place.rank),
            "SLURM_LOCALID": str(place.local_rank),
        }
        | _past_proxies(setup)
        for place in places
    }


def _jax_devices(place: Place, each: int | None) -> str:
    """The GPUs of a rank among those that it sees."""
    if each and place.member.devices:
        return ",".join(str(number) for number in range(each))
    return str(place.local_rank % max(1, place.member.devices))


def _accelerate(setup: Setup) -> Variables:
    """Without GPUs every rank would train alone, and say nothing, unless it is to use the processor."""
    return {
        place.rank: {
            "ACCELERATE_USE_CPU": setup.caller.get(
                "ACCELERATE_USE_CPU", str(_has_no_gpu(setup, place)).lower()
            )
        }
        for place in setup.places
    }


def _has_no_gpu(setup: Setup, place: Place) -> bool:
    """Outside of jobs nobody has counted the GPUs of this host."""
    if setup.no_gpu or place.member.devices:
        return setup.no_gpu
    return place.member.address != "127.0.0.1" or not Path("/dev/nvidiactl").exists()


def _lightning(setup: Setup) -> Variables:
    nodes = setup.places[-1].node_rank + 1
    defaults = {
        "PL_TRAINER_NUM_NODES": str(nodes),
        "PL_TRAINER_DEVICES": str(setup.places[0].local_size),
        "PL_TRAINER_STRATEGY": "ddp",
    }
    shared = {name: setup.caller.get(name, value) for name, value in defaults.items()}
    # By this Lightning knows that the ranks are started already, in jobs of Slurm as well.
    shared["TORCHELASTIC_RUN_ID"] = setup.caller.get("TORCHELASTIC_RUN_ID", "carme-run")
    return {place.rank: shared for place in setup.places}


def _refuse_lightning(setup: Setup) -> None:
    sizes = {place.member.host: place.local_size for place in setup.places}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{host}: {size}" for host, size in sizes.items())
        raise CarmeRuntimeError(
            f"Lightning needs as many ranks on each node as on the others, and here are {listed}.",
            "Use -n with a multiple of the number of nodes, or --devices-per-node.",
        )
    if setup.devices_per_rank:
        raise CarmeRuntimeError(
            "Lightning chooses a GPU by the rank's number among all of its node, and --devices-per-rank "
            "shows a rank its own alone.",
            "Leave --devices-per-rank out.",
        )


def _deepspeed(setup: Setup) -> Variables:
    """What DeepSpeed's launcher sets beside the variables of every run."""
    across: dict[int, list[int]] = {}  # by local rank, the ranks with that number on their nodes
    for place in setup.places:
        across.setdefault(place.local_rank, []).append(place.rank)
    return {
        place.rank: {
            "LOCAL_SIZE": str(place.local_size),
            "CROSS_RANK": str(across[place.local_rank].index(place.rank)),
            "CROSS_SIZE": str(len(across[place.local_rank])),
        }
        for place in setup.places
    }


def _mxnet(setup: Setup) -> Variables:
    return {place.rank: _mxnet_role(setup, "worker", place) for place in setup.places}


def _mxnet_role(setup: Setup, role: str, place: Place) -> dict[str, str]:
    nodes = len({each.member.number for each in setup.places})
    return {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": _host(setup.places[0], setup.places),
        "DMLC_PS_ROOT_PORT": str(setup.ports[0]),
        "DMLC_NUM_SERVER": str(nodes),
        "DMLC_NUM_WORKER": str(len(setup.places)),
        "DMLC_NODE_HOST": _host(place, setup.places),
    }


def _mxnet_programs(setup: Setup) -> list[Program]:
    """The scheduler on the first node and a server on each; MXNet becomes either when it is imported."""
    nodes = [place for place in setup.places if place.local_rank == 0]
    roles = [("scheduler", "MXNet's scheduler", nodes[:1]), ("server", "A server of MXNet", nodes)]
    command = [sys.executable, "-c", "import mxnet"]
    return [
        Program(name, command, [Process(place.member, _mxnet_role(setup, role, place)) for place in places])
        for role, name, places in roles
    ]


def _refuse_mxnet(setup: Setup) -> None:
    if is_spread(setup.places) and any(":" in place.member.address for place in setup.places):
        raise CarmeRuntimeError(
            "MXNet finds its processes by IPv4, and the nodes of the job have other addresses.",
            "Use one node (--nodes 1).",
        )


def _past_proxies(setup: Setup) -> dict[str, str]:
    """Where the caller has a proxy, gRPC would ask it for the ranks' addresses too."""
    if not any(setup.caller.get(name) for name in PROXIES):
        return {}
    own = {_host(place, setup.places) for place in setup.places}
    named = setup.caller.get("no_grpc_proxy") or setup.caller.get("no_proxy") or ""
    return {"no_grpc_proxy": ",".join([*filter(None, [named]), *sorted(own)])}


_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _of_each(places: list[Place]) -> list[Member]:
    return [place.member for place in places]


def _of_first(places: list[Place]) -> list[Member]:
    return [places[0].member]


BACKENDS = {
    "torch": Backend(_TORCH),
    "tensorflow": Backend(
        ("TF_CONFIG", "TF_USE_LEGACY_KERAS"),
        variables=_tensorflow,
        ports=_of_each,
        modules=("tensorflow", "tf_keras"),
        explains=_explain_tensorflow,
        torch=False,
        runtime=False,
    ),
    "jax": Backend(
        (
            *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS"),
            *("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
        ),
        variables=_jax,
        ports=_of_first,
        modules=("jax",),
        torch=False,
        runtime=False,
    ),
    "accelerate": Backend(
        (*_TORCH, "ACCELERATE_USE_CPU"), variables=_accelerate, modules=("torch", "accelerate")
    ),
    "lightning": Backend(
        (
            *("PL_TRAINER_NUM_NODES", "PL_TRAINER_DEVICES", "PL_TRAINER_STRATEGY"),
            "TORCHELASTIC_RUN_ID",
        ),
        variables=_lightning,
        modules=("lightning",),
        refuses=_refuse_lightning,
    ),
    "deepspeed": Backend(
        (*_TORCH, "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        variables=_deepspeed,
        modules=("torch", "deepspeed"),
    ),
    "mxnet": Backend(
        (
            *("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"),
            *("DMLC_NUM_SERVER", "DMLC_NUM_WORKER", "DMLC_NODE_HOST"),
        ),
        "MXNet's scheduler on the first node, a server on each node",
        "scheduler and servers",
        _mxnet,
        _of_first,
        ("mxnet",),
        refuses=_refuse_mxnet,
        programs=_mxnet_programs,
        torch=False,
        runtime=False,
    ),
    "dask": Backend(
        dask.SETS,
        "Dask's scheduler on the first node, a worker for each rank; the script once, on the first node",
        "scheduler and workers",
        lambda setup: {0: dask.variables(setup, _host(setup.places[0], setup.places))},
        _of_first,
        ("distributed", "cryptography"),
        programs=lambda setup: dask.programs(setup, _hosts(setup)),
        secrets=dask.SECRETS,
        make_secrets=dask.certificate,
        runtime=False,
        driver=True,
    ),
    "ray": Backend(
        ray.SETS,
        "Ray's head on the first node, a worker node on each other; the script once, on the first node",
        "head and worker nodes",
        lambda setup: {0: ray.variables(setup, _host(setup.places[0], setup.places)) | _past_proxies(setup)},
        ray.members,
        ("ray",),
        refuses=ray.refuse,
        programs=lambda setup: ray.programs(setup, _hosts(setup)),
        secrets=(ray.TOKEN,),
        make_secrets=ray.token,
        runtime=False,
        driver=True,
    ),
    "horovod": Backend(
        ("HOROVOD_*",),
        "Horovod's rendezvous server on the first node",
        "that server",
        lambda setup: horovod.variables(setup.places, 0, setup.caller),
        modules=("horovod",),
        runtime=False,
    ),
    "mpi": Backend(
        (),
        "the mpirun that is installed, which starts the ranks",
        "mpirun, which ends the ranks",
        commands=mpi.LAUNCHERS,
    ),
    "gaspi": Backend(("GASPI_*",), variables=lambda setup: gaspi.rank_variables(setup.places)),
}


def missing(name: str) -> list[str]:
    """The modules that the backend needs and this Python lacks; the command that is not on PATH."""
    backend = BACKENDS[name]
    commands = [] if any(map(shutil.which, backend.commands)) else [*backend.commands[:1]]
    return [*(module for module in backend.modules if not importlib.util.find_spec(module)), *commands]


def check_installed(name: str) -> None:
    """Raise CarmeRuntimeError where this Python lacks what the backend needs."""
    if name == "horovod":
        horovod.check_installed()
    # mpirun is looked for, and its kind, where it is started.
    if BACKENDS[name].modules and (lacking := missing(name)):
        raise CarmeRuntimeError(
            f"--backend {name} needs {' and '.join(lacking)}, which this Python does not have.",
            f"Use an image with it, or install it: pip install {' '.join(lacking)}",
        )


async def free_ports(fabric: Fabric, members: list[Member]) -> list[int]:
    """A port for each, that is free on its node.

    Raises:
        CarmeRuntimeError: A node was lost, or has no free ports.
    """
    return [port async for port in _ports(fabric, members)]


async def _ports(fabric: Fabric, members: list[Member]) -> AsyncIterator[int]:
    taken: set[tuple[int, int]] = set()
    for member in members:
        for _ in range(PORT_TRIES):
            port = await _port(fabric, member.number, member.host)
            if (member.number, port) not in taken:
                break
        else:
            raise CarmeRuntimeError(f"{member.host} has no free port left.", "Start fewer ranks.")
        taken.add((member.number, port))
        yield port


async def _port(fabric: Fabric, node: int, host: str) -> int:
    fabric.send(node, {"type": "port"})
    while True:
        event = await fabric.next_event()
        if event.gone or node not in {member.number for member in fabric.members.present}:
            raise CarmeRuntimeError(f"The job's agent on {host} was lost.", "Start a new job.")
        if event.node == node and event.content["type"] == "port":
            return event.content["port"]


def _hosts(setup: Setup) -> dict[int, str]:
    """By a node's number, its address."""
    return {place.member.number: _host(place, setup.places) for place in setup.places}


def _host(place: Place, places: list[Place]) -> str:
    address = place.member.address if is_spread(places) else "127.0.0.1"
    return f"[{address}]" if ":" in address else address
