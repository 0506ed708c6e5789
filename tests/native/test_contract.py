"""What the transports and the collectives promise: shared memory, TCP, both together, and GPI-2.

GPI-2 itself is tried where CARME_GPI2 names the folder in which it is installed; everywhere a simulated
libGPI2 (tests/simulated_gpi2.c) is, which has all ranks on one host.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import real_gpi2

from carme_runtime import gaspi
from patience import HANG

PROGRAMS = Path(__file__).parent / "programs"
SIMULATED_GPI2 = Path(__file__).parent.parent / "simulated_gpi2.c"
NATIVE, INSTALLED, SIMULATED = "native", "GPI-2 as installed", "simulated GPI-2"
TRANSPORTS = (NATIVE, INSTALLED, SIMULATED)

PLACES = {
    "one rank": [0],
    "two ranks, one node": [0, 0],
    "three ranks, one node": [0, 0, 0],
    "four ranks, one node": [0, 0, 0, 0],
    "two nodes": [0, 1],
    "three nodes": [0, 1, 2],
    "two nodes of two": [0, 0, 1, 1],
    "nodes that differ": [0, 0, 1],
    "ranks in turn": [0, 1, 0, 1],
    "two ranks and one between them": [0, 1, 0],
}


@pytest.fixture(scope="session")
def simulated_gpi2(tmp_path_factory):
    """A library with GPI-2's interface, as the real one is in no package registry."""
    library = tmp_path_factory.mktemp("gpi2") / "libGPI2.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, "-o", library, SIMULATED_GPI2], check=True)
    return library


@pytest.fixture
def over(launcher, transport, request):
    """The launcher, with ranks that use the transport of the test's parameter."""
    if transport == SIMULATED:
        launcher.variables["CARME_GPI2_LIBRARY"] = str(request.getfixturevalue("simulated_gpi2"))
    elif transport == INSTALLED:
        launcher.variables["CARME_GPI2_LIBRARY"] = str(real_gpi2.shared_library())
    if transport != NATIVE:
        launcher.variables["CARME_TRANSPORT"] = "gpi2"
    return launcher


def pick(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("nodes", [pytest.param(PLACES[name], id=name) for name in names])


def pick_all(*names: str) -> pytest.MarkDecorator:
    """These places with every transport; GPI-2's with those on one node."""
    chosen = [
        pytest.param(PLACES[name], transport, id=f"{transport}, {name}")
        for name in names
        for transport in TRANSPORTS
        if transport == NATIVE or len(set(PLACES[name])) == 1
    ]
    return pytest.mark.parametrize(("nodes", "transport"), chosen)


over_gpi2 = pytest.mark.parametrize("transport", [INSTALLED, SIMULATED])


@pick_all("two ranks, one node", "three ranks, one node", "three nodes", "nodes that differ")
def test_one_sided_operations(over, nodes):
    over.run("one_sided", nodes)


@pick_all(*PLACES)
def test_collectives(over, nodes):
    over.run("collectives", nodes)


def test_eight_ranks_on_two_cores(launcher):
    launcher.cores = set(sorted(os.sched_getaffinity(0))[:2])
    launcher.run("collectives", [0] * 8)


def test_calls_that_need_a_stopped_rank_end_in_time(launcher):
    launcher.run("expiring", [0, 1])


@pick_all("four ranks, one node", "three nodes")
def test_the_same_bits_in_every_run(over, nodes):
    message = [over.run("collectives", nodes).outputs[0] for _ in range(2)]
    assert message[0] == message[1] and message[0].count("bits") == 6


@pytest.mark.parametrize("name", ["direct", "ring", "halving"])
def test_every_way_between_nodes(launcher, name):
    ranks = launcher.start(
        "collectives", PLACES["three nodes"], environment=lambda rank: {"CARME_ALLREDUCE": name}
    )
    assert ranks.finish() == [0, 0, 0], ranks.output()


def test_what_travels_instead_of_zeros_is_let_go_of(launcher):
    launcher.variables["CARME_ALLREDUCE"] = "ring"
    launcher.run("mostly_zero", PLACES["three nodes"])


def test_links_that_are_measured_or_read(launcher, tmp_path):
    file = tmp_path / "links.json"
    file.write_text('{"times": [[1024, 50.0], [65536, 70.5], [1048576, 400]]}')
    for links in ("measure", str(file)):
        ranks = launcher.start(
            "collectives",
            PLACES["nodes that differ"],
            environment=lambda rank: {"CARME_LINKS": links},  # noqa: B023
        )
        assert ranks.finish() == [0, 0, 0], ranks.output()


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"CARME_ALLREDUCE": "fast"}, "CARME_ALLREDUCE=fast is no way to reduce"),
        ({"CARME_LINKS": "/nowhere"}, "holds no times of links"),
        ({"CARME_LINKS": "{}"}, "holds no times of links"),
        ({"CARME_LINKS": '{"times": [[5, 1], [4, 2]]}'}, "make no sense"),
        ({"CARME_LINKS": '{"times": [[1, 1]]}'}, "make no sense"),
        ({"CARME_LINKS": '{"times": [[1, 1], [2, NaN]]}'}, "make no sense"),
    ],
)
def test_settings_of_links_that_are_none(launcher, tmp_path, environment, word):
    if environment.get("CARME_LINKS", "").startswith("{"):
        (tmp_path / "links").write_text(environment["CARME_LINKS"])
        environment = {"CARME_LINKS": str(tmp_path / "links")}
    ranks = launcher.start("join", [0], "4", environment=lambda rank: environment)
    ranks.finish()
    assert "InvalidCall" in ranks.outputs[0] and word in ranks.outputs[0], ranks.output()


def test_ranks_that_would_reduce_in_different_ways_are_reported(launcher):
    ranks = launcher.start(
        "join", [0, 1], "60", environment=lambda rank: {"CARME_ALLREDUCE": "ring" if rank else "halving"}
    )
    ranks.finish()
    assert "Mismatch" in ranks.output(), ranks.output()


@pick_all("three ranks, one node", "two nodes", "three nodes", "two nodes of two", "nodes that differ")
@pytest.mark.parametrize("kind", ["size", "wire", "type", "order", "alltoall"])
def test_ranks_that_disagree_are_reported(over, nodes, kind):
    ranks = over.run("mistakes", nodes, kind)
    for message in ranks.outputs.values():
        assert "no error" not in message, ranks.output()
        assert "Mismatch" in message and "Rank" in message, ranks.output()
        assert kind == "alltoall" or "called" in message, ranks.output()
    if kind == "size" and len(set(nodes)) == 1:
        assert "1000 x float32 'weights'" in ranks.outputs[0]
        assert "2000 x float32 'weights'" in ranks.outputs[1]


@pick_all("two ranks, one node", "two nodes")
def test_a_rank_that_does_not_come_is_named(over, nodes):
    message = over.run("mistakes", nodes, "late").outputs[0]
    assert "Rank 1" in message and ("Timeout" in message or "PeerLost" in message)


def test_without_the_native_core_a_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "carme_runtime._core", None)
    monkeypatch.delattr("carme_runtime._core")
    with pytest.raises(gaspi.CoreMissing, match="compiler"):
        gaspi.init(1, {"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"RANK": "x"}, "whole numbers"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT"),
        ({"RANK": "3"}, "Rank 3"),
    ],
)
def test_an_environment_that_makes_no_sense_is_explained(environment, word):
    with pytest.raises(gaspi.InvalidCall, match=word):
        gaspi.init(1, environment)


@over_gpi2
def test_a_rank_that_is_killed_is_named_and_survivors_go_on(over):
    ranks = over.start("until_killed", [0, 0, 0], "1", "1500", "go-on")
    for process in ranks.processes:
        assert process.stdout.readline().startswith("ready")
    ranks.processes[1].kill()
    assert ranks.finish() == [17, -signal.SIGKILL, 17], ranks.output()
    for rank in (0, 2):
        assert "Rank 1 was lost" in ranks.outputs[rank] and "went on" in ranks.outputs[rank], ranks.output()


@over_gpi2
def test_calls_end_in_time_where_a_rank_was_stopped(over):
    over.run("stopped", [0, 0])


@over_gpi2
def test_what_a_lost_rank_was_to_answer_is_not_waited_for_without_end(over):
    ranks = over.start("unanswered", [0, 0, 0])
    assert ranks.finish() == [0, -signal.SIGKILL, 0], ranks.output()


@pick_all("three ranks, one node", "three nodes", "two ranks and one between them")
@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_rank_that_another_one_ends_is_gone_for_all(over, nodes, state):
    elsewhere = ["elsewhere"] * (nodes[1] != nodes[0])
    ranks = over.start("killing", nodes, state, *elsewhere)
    assert ranks.finish() == [0, -signal.SIGKILL, 0], ranks.output()
    if elsewhere:
        assert "rank 0 has ended this rank, 1." in ranks.outputs[1], ranks.output()


@over_gpi2
def test_torch_trains_over_gpi2_as_over_the_native_transport(over):
    tested = over.run("data_parallel", [0, 0], "carme", "ddp")
    over.variables.clear()
    assert tested.outputs == over.run("data_parallel", [0, 0], "carme", "ddp").outputs


@over_gpi2
def test_horovods_calls_over_gpi2(over):
    over.run("horovod_operations", [0, 0], "2")


@over_gpi2
def test_ranks_that_gaspi_run_started_are_ranks_here(over, tmp_path):
    """Without any variable but those of GPI-2's own launcher."""
    machines = tmp_path / "machines"
    machines.write_text("localhost\n" * 3)
    base = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")} | over.variables
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / "one_sided.py"],
            env=base
            | {"GASPI_RANK": str(rank), "GASPI_NRANKS": "3", "GASPI_SOCKET": str(rank)}
            | {"GASPI_MFILE": str(machines), "GASPI_MASTER": "localhost"},
        )
        for rank in range(3)
    ]
    over.started += ranks
    assert [process.wait(90) for process in ranks] == [0, 0, 0]


@over_gpi2
def test_gpi2_is_started_once_in_a_process(over):
    for message in over.run("join", [0, 0], "30", "again").outputs.values():
        assert "joined" in message and "can be started once in a process" in message


def test_without_gpi2_a_sentence_says_what_to_do(launcher):
    ranks = launcher.start(
        "join",
        [0, 0],
        "20",
        environment=lambda rank: {"CARME_TRANSPORT": "gpi2", "CARME_GPI2_LIBRARY": "/nowhere/libGPI2.so"},
    )
    ranks.finish()
    for message in ranks.outputs.values():
        assert "/nowhere/libGPI2.so" in message and "CARME_GPI2_LIBRARY" in message, ranks.output()


def test_a_library_that_is_another_one_is_named():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARME_GPI2_LIBRARY", "libc.so.6")
        with pytest.raises(gaspi.GaspiError, match="has no gaspi_config_get"):
            gaspi.init(1, {}, transport="gpi2")


def test_a_transport_that_is_none_is_named():
    with pytest.raises(gaspi.InvalidCall, match="transport=verbs is not a transport"):
        gaspi.init(1, {}, transport="verbs")


def test_ranks_with_different_transports_are_reported(launcher, simulated_gpi2):
    ranks = launcher.start(
        "join",
        [0, 0],
        "20",
        environment=lambda rank: (
            {"CARME_TRANSPORT": "gpi2", "CARME_GPI2_LIBRARY": str(simulated_gpi2)} if rank else {}
        ),
    )
    ranks.finish()
    for message in ranks.outputs.values():
        assert "Some ranks chose the transport" in message, ranks.output()


@pytest.mark.parametrize(
    ("options", "transport"),
    [([], "native"), (["--transport", "native"], "native"), (["--transport", "gpi2"], "gpi2")],
)
def test_carme_run_chooses_the_transport(simulated_gpi2, options, transport):
    run = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "2", "--log-level", "INFO"]
    done = subprocess.run(
        [*run, *options, str(PROGRAMS / "join.py"), "30"],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CARME_GPI2_LIBRARY": str(simulated_gpi2)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.count("joined") == 2, done.stdout + done.stderr
    for rank in range(2):
        assert f"Rank {rank} of 2 has joined over {transport}" in done.stderr, done.stderr


@over_gpi2
def test_carme_run_starts_programs_for_gpi2(over, tmp_path):
    """With the variables of gaspi_run, and without those by which our own ranks find each other."""
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\nunset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n"
        f"test $(wc -l <$GASPI_MFILE) = 3 && exec {sys.executable} {PROGRAMS / 'one_sided.py'}\n"
    )
    program.chmod(0o755)
    run = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "3", "--backend", "gaspi"]
    done = subprocess.run(
        [*run, "--", str(program)],
        env=os.environ | over.variables,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("left", [0, 1, 2])
def test_too_few_open_files_are_reported_with_what_to_do(launcher, left):
    ranks = launcher.run("few_files", [0], str(left))
    assert "OutOfResources" in ranks.outputs[0], ranks.output()
    assert "Allow this process more open files: ulimit -n 4096." in ranks.outputs[0]


def test_ranks_send_without_timers_between_nodes(launcher):
    ranks = launcher.start("congestion", [0, 1])
    assert ranks.finish() == [0, 0], ranks.output()
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    usual = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    expected = {"cubic", "reno"} if usual.startswith("bbr") and {"cubic", "reno"} & {*allowed} else {usual}
    for message in ranks.outputs.values():
        assert message.strip() in expected


@pytest.mark.parametrize("name", ["reno", "nonsense"])
def test_the_congestion_control_can_be_chosen(launcher, name):
    ranks = launcher.start("congestion", [0, 1], environment=lambda _: {"CARME_CONGESTION_CONTROL": name})
    ranks.finish()
    for message in ranks.outputs.values():
        if name == "reno":
            assert message.strip() == "reno"
        else:
            assert message.startswith("InvalidCall CARME_CONGESTION_CONTROL=nonsense cannot be had")
            assert "Choose from" in message
