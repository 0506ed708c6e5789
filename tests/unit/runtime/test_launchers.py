"""Ranks that other launchers start: what their variables say in the words of carme-run and torchrun."""

import pytest

from carme_runtime.gaspi import launchers
from carme_runtime.gaspi.launchers import AGENT_STEP, meeting_port, translated

SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def test_ranks_of_srun_meet_on_its_first_node() -> None:
    reported = translated(SRUN)
    port = reported.pop("MASTER_PORT")
    assert reported == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "node07"}
    assert 20_000 <= int(port) < 32_000
    assert translated(SRUN | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"})["MASTER_PORT"] == port
    assert translated(SRUN | {"SLURM_STEP_ID": "2"})["MASTER_PORT"] != port


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("a[3,5-9],b1", "a3"), ("gpu-1-[010-020]", "gpu-1-010")],
)
def test_the_first_node_of_a_list_is_the_master(nodes: str, first: str) -> None:
    assert translated(SRUN | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_ranks_of_srun_on_one_node_need_no_network() -> None:
    reported = translated(SRUN | {"SLURM_STEP_NUM_NODES": "1"})
    assert reported["MASTER_ADDR"] == "127.0.0.1" and reported["LOCAL_WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    "more",
    [
        {"RANK": "0"},  # torchrun or carme-run below srun
        {"SLURM_STEP_ID": str(2**32 - 5)},  # the script of a batch job
        {AGENT_STEP: "1"},  # what runs below an agent is not what srun started
        {"SLURM_STEP_ID": ""},
    ],
)
def test_a_process_that_is_not_a_rank_of_srun_is_recognised(more: dict[str, str]) -> None:
    assert translated(SRUN | more) == {}


def test_what_is_set_stays() -> None:
    reported = translated(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"})
    assert "MASTER_ADDR" not in reported and "MASTER_PORT" not in reported


@pytest.mark.parametrize(
    "environment",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
         "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    ],
    ids=["Open MPI", "MPICH and Intel MPI"],
)  # fmt: skip
def test_ranks_of_mpirun_know_their_places(environment: dict[str, str]) -> None:
    reported = translated(SRUN | environment)  # mpirun in a job of Slurm: it counts, not srun
    assert (reported["RANK"], reported["WORLD_SIZE"], reported["LOCAL_RANK"]) == ("1", "2", "1")
    assert reported["MASTER_ADDR"] == "127.0.0.1" and "MASTER_PORT" in reported
    local = next(name for name in environment if "LOCAL_SIZE" in name or "LOCALNRANKS" in name)
    assert "MASTER_ADDR" not in translated(environment | {local: "1"})  # on several nodes nobody knows


def test_ranks_do_not_meet_where_torchrun_listens() -> None:
    run = {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert meeting_port(run) == "29500" and meeting_port({}) == "0"
    assert meeting_port(run | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) == "29500"
    run |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert meeting_port(run) == meeting_port(dict(run)) != "29500"
    assert 20_000 <= int(meeting_port(run)) < 32_000
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        assert meeting_port(run | {name: "8"}) != meeting_port(run)


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"} | {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-1.b-77@1",
}  # fmt: skip
OPEN_MPI_4 = OPEN_MPI | {
    "PMIX_NAMESPACE": "1166868481", "OMPI_MCA_orte_hnp_uri": "1166868480.0;tcp://10.0.0.1,172.17.0.1:43211",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PROXY = ["hydra_pmi_proxy", "--control-port", "a-1.b:38091", "--rmk", "user", "--proxy-id", "1"]


@pytest.mark.parametrize(
    ("environment", "ancestors", "host"),
    [
        (OPEN_MPI, [], "a-1.b"),
        (OPEN_MPI_4, [], "10.0.0.1"),
        (MPICH, [["sh", "-c", "script"], PROXY], "a-1.b"),
    ],
    ids=["Open MPI 5", "Open MPI 4", "MPICH"],
)
def test_ranks_of_mpirun_on_several_nodes_meet_on_its_host(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ancestors: list[list[str]], host: str
) -> None:
    monkeypatch.setattr(launchers, "_ancestors", lambda: iter(ancestors))
    reported = translated(environment)
    assert reported["MASTER_ADDR"] == host and 20_000 <= int(reported["MASTER_PORT"]) < 32_000
    own = {"MASTER_ADDR": "c", "MASTER_PORT": "5"}
    assert own.keys() & translated(environment | own).keys() == set()


def test_where_nothing_names_mpirun_nobody_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_ancestors", lambda: iter([["sh"], ["sshd", "--control-port"]]))
    assert "MASTER_ADDR" not in translated(MPICH)
    nameless = OPEN_MPI | {"PMIX_NAMESPACE": "1234567"}
    assert "MASTER_ADDR" not in translated(nameless)
    assert "MASTER_ADDR" not in translated(nameless | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fe80::1]:5"})


def test_runs_of_open_mpi_4_meet_at_ports_of_their_own() -> None:
    port = translated(OPEN_MPI_4)["MASTER_PORT"]
    assert translated(OPEN_MPI_4 | {"OMPI_COMM_WORLD_RANK": "0"})["MASTER_PORT"] == port
    # A second run of the same daemons has another name, and one of another mpirun another address of it.
    for name, value in (("PMIX_NAMESPACE", "1166868482"), ("OMPI_MCA_orte_hnp_uri", "2.0;tcp://10.0.0.1:5")):
        assert translated(OPEN_MPI_4 | {name: value})["MASTER_PORT"] != port
