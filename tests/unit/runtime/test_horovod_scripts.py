"""What carme-run passes to scripts that are written for Horovod, and its errors where it cannot start them.

With Horovod itself: tests/native/test_horovod_scripts.py.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.members import Member, Members
from carme_runtime.launcher import horovod, place
from carme_runtime.launcher.placement import Place

from .conftest import Job, Process, clean_environment

NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")


def spread(*devices: int, address: str = "10.0.0.{}") -> list[Place]:
    """One rank for each device of nodes n1, n2, ..."""
    nodes = [
        Member(number, f"n{number + 1}", address.format(number + 1), count, 8, f"eth{number}")
        for number, count in enumerate(devices)
    ]
    return place(Members.of(nodes, [], len(nodes)))


def test_ranks_know_their_numbers_on_and_across_nodes() -> None:
    reported = horovod.variables(spread(2, 1, 2), 1234, {})
    assert [[reported[rank][f"HOROVOD_{name}"] for name in NAMES] for rank in range(5)] == [
        ["0", "5", "0", "2", "0", "3", "n1"],
        ["1", "5", "1", "2", "0", "2", "n1"],
        ["2", "5", "0", "1", "1", "3", "n2"],
        ["3", "5", "0", "2", "2", "3", "n3"],
        ["4", "5", "1", "2", "1", "2", "n3"],
    ]
    for rank, interface in enumerate(["eth0", "eth0", "eth1", "eth2", "eth2"]):
        assert reported[rank]["HOROVOD_GLOO_IFACE"] == interface
        assert reported[rank]["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
        assert reported[rank]["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "1234"
        assert reported[rank]["HOROVOD_CONTROLLER"] == reported[rank]["HOROVOD_CPU_OPERATIONS"] == "gloo"


def test_ranks_of_one_node_stay_off_the_network() -> None:
    reported = horovod.variables(spread(2), 1234, {})
    for rank in range(2):
        assert reported[rank]["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
        assert reported[rank]["HOROVOD_GLOO_IFACE"] == "lo"


def test_the_caller_may_name_the_interface() -> None:
    reported = horovod.variables(spread(1, 1), 1234, {"HOROVOD_GLOO_IFACE": "ib0"})
    assert [reported[rank]["HOROVOD_GLOO_IFACE"] for rank in range(2)] == ["ib0", "ib0"]


def test_an_address_that_horovod_cannot_use_is_refused() -> None:
    with pytest.raises(CarmeRuntimeError, match=r"by IPv4, but n1 has the address fd00::1\. Use one node"):
        horovod.variables(spread(1, 1, address="fd00::{}"), 1234, {})


def test_a_missing_horovod_is_reported(job: Job) -> None:
    code, out, errors = job.launch("--backend", "horovod", "-m", "calendar").wait()
    assert (code, out) == (2, "")
    assert errors.startswith("carme-run: Horovod is not installed for /")
    assert "Use the image of PyTorch or TensorFlow" in errors


def test_a_server_of_horovod_that_cannot_start_is_reported(job: Job, tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), clean_environment()["PYTHONPATH"]])
    run = job.launch("--backend", "horovod", "-m", "calendar", environment={"PYTHONPATH": path})
    assert run.wait() == (
        2,
        "",
        "carme-run: The server at which Horovod's ranks find each other could not be started on n1: "
        "ModuleNotFoundError: No module named 'horovod.runner'. "
        "See that the same Python with Horovod is on all nodes, and try again.\n",
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--backend", "nccl"],
            "'nccl' is no framework that carme-run knows. It is a backend of PyTorch's: --torch",
        ),
        (
            ["--backend", "Torch"],
            "'Torch' is no framework that carme-run knows. Did you mean --backend torch?",
        ),
        (["--backend", "tf"], "Did you mean --backend tensorflow?"),
        (["--backend", "deepsped"], "Did you mean --backend deepspeed?"),
        (["--backend", "keras"], "Scripts of carme_runtime.keras need no --backend"),
        (["--backend", "spark9"], "Give one of: torch, tensorflow, jax, "),
        (["--backend", ""], "Give one of: torch, tensorflow, jax, "),
        (["--backend", "mpi", "--pin-cpus"], "--pin-cpus does not go with --backend mpi"),
        (
            ["--backend", "mpi", "--max-restarts", "1"],
            "A run with --backend mpi cannot start anew with other ranks. Use --max",
        ),
        (["--transport", "verbs"], "argument --transport: invalid choice: 'verbs'"),
        (["--backend=horovod", "--hang-seconds", "60"], "-x HOROVOD_STALL_CHECK_TIME_SECONDS=60"),
        (["--backend=horovod", "--max-restarts", "1"], "Use --max-restarts without --backend"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    local: Callable[..., Process], arguments: list[str], error: str
) -> None:
    code, out, errors = local(*arguments, "-m", "calendar").wait()
    assert (code, out) == (2, "")
    assert error in errors
