"""Ranks that other launchers start: what their variables say in the words of carme-run and torchrun."""

import pytest

from carme_runtime.gaspi.launchers import AGENT_STEP, translated

SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def test_ranks_of_srun_meet_on_its_first_node() -> None:
    told = translated(SRUN)
    port = told.pop("MASTER_PORT")
    assert told == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "node07"}
    assert 20_000 <= int(port) < 32_000
    assert translated(SRUN | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"})["MASTER_PORT"] == port
    assert translated(SRUN | {"SLURM_STEP_ID": "2"})["MASTER_PORT"] != port


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("a[3,5-9],b1", "a3"), ("gpu-1-[010-020]", "gpu-1-010")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert translated(SRUN | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_ranks_of_srun_on_one_node_need_no_network() -> None:
    told = translated(SRUN | {"SLURM_STEP_NUM_NODES": "1"})
    assert told["MASTER_ADDR"] == "127.0.0.1" and told["LOCAL_WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    "more",
    [
        {"RANK": "0"},  # torchrun or carme-run below srun
        {"SLURM_STEP_ID": str(2**32 - 5)},  # the script of a batch job
        {AGENT_STEP: "1"},  # what runs below an agent is not what srun started
        {"SLURM_STEP_ID": ""},
    ],
)
def test_what_is_no_rank_of_srun_is_not_taken_for_one(more: dict[str, str]) -> None:
    assert translated(SRUN | more) == {}


def test_what_is_set_stays() -> None:
    told = translated(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"})
    assert "MASTER_ADDR" not in told and "MASTER_PORT" not in told


@pytest.mark.parametrize(
    "environment",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
         "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    ],
    ids=["Open MPI", "MPICH and Intel MPI"],
)  # fmt: skip
def test_ranks_of_mpirun(environment: dict[str, str]) -> None:
    told = translated(SRUN | environment)  # mpirun in a job of Slurm: it counts, not srun
    assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"]) == ("1", "2", "1")
    assert told["MASTER_ADDR"] == "127.0.0.1" and "MASTER_PORT" in told
    local = next(name for name in environment if "LOCAL_SIZE" in name or "LOCALNRANKS" in name)
    assert "MASTER_ADDR" not in translated(environment | {local: "1"})  # on several nodes nobody knows
