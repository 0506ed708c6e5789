"""Ranks that die or stop, peers that hold another key or speak something else."""

import contextlib
import random
import signal
import socket
import time

import pytest
from free_ports import free_port

from patience import HANG

# Milliseconds of a collective: who was killed is heard of, who was stopped costs the others all of them.
LIMITS = {signal.SIGKILL: round(1000 * HANG), signal.SIGSTOP: 1500}


def await_ready(ranks):
    for process in ranks.processes:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith("ready"), line + process.stdout.read()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1, 1], [0, 1]], ids=["one node", "two of two", "two nodes"])
def test_a_lost_rank_is_an_error_for_the_others(launcher, nodes, how):
    # A stopped rank costs the others their whole time limit: fewer of these.
    for attempt in range(5 if how == signal.SIGKILL else 1):
        seed = random.randrange(10**6)
        ranks = launcher.start("until_killed", nodes, str(seed), str(LIMITS[how]))
        await_ready(ranks)
        victim = random.Random(seed).randrange(len(nodes))
        time.sleep(random.Random(seed).uniform(0, 0.15))
        ranks.processes[victim].send_signal(how)
        for rank, process in enumerate(ranks.processes):
            if rank == victim:
                continue
            ranks.outputs[rank] = process.communicate(timeout=HANG)[0]
            assert process.returncode == 17, (seed, attempt, ranks.output())
            assert "PeerLost" in ranks.outputs[rank] or "Timeout" in ranks.outputs[rank], ranks.output()
        ranks.processes[victim].kill()
        ranks.finish()


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1]], ids=["one node", "two nodes"])
def test_survivors_form_a_new_group(launcher, nodes):
    ranks = launcher.start("until_killed", nodes, "1", str(LIMITS[signal.SIGKILL]), "go-on")
    await_ready(ranks)
    ranks.processes[1].kill()
    codes = ranks.finish()
    assert codes == [17, -signal.SIGKILL, 17], ranks.output()
    assert all("went on" in ranks.outputs[rank] for rank in (0, 2)), ranks.output()


@pytest.mark.parametrize(
    ("collective", "nodes"),
    [("allreduce", [0, 1, 2]), ("reduce_scatter", [0, 0, 1])],
    ids=["allreduce, three nodes", "reduce_scatter, nodes that differ"],
)
def test_a_rank_without_memory_is_an_error_for_the_others(launcher, collective, nodes):
    launcher.variables["CARME_ALLREDUCE"] = "ring"
    launcher.variables["MALLOC_ARENA_MAX"] = "1"  # else memory that is reserved for other threads is lent
    ranks = launcher.start("no_memory", nodes, collective)
    assert ranks.finish() == [0, 0, 0], ranks.output()
    assert "MemoryError" in ranks.outputs[1], ranks.output()
    for rank in (0, 2):
        message = ranks.outputs[rank]
        assert f"PeerLost The group broke at {collective}: rank 1 was lost" in message, ranks.output()
        assert "had no memory for it" in message, ranks.output()


def test_a_rank_with_another_key_is_refused(launcher, tmp_path):
    other_key = tmp_path / "other"
    other_key.touch(0o600)
    other_key.write_text("0" * 64)
    ranks = launcher.start(
        "join",
        [0, 1],
        "4",
        str(tmp_path),
        environment=lambda rank: {"CARME_KEY_FILE": str(other_key)} if rank else {},
    )
    ranks.finish()
    assert "did not join in time: 1" in ranks.outputs[0]
    assert "WrongKey" in ranks.outputs[1], ranks.output()
    why = "it went away instead of proving that it holds the key of this job."
    assert f"A connection from 127.0.0.1 was refused: {why}" in ranks.outputs[0], ranks.output()


@pytest.mark.parametrize(
    ("content", "mode", "word"),
    [("short", 0o600, "16"), ("0" * 64, 0o644, "chmod 600"), (None, 0, "cannot be read")],
    ids=["short", "open to others", "missing"],
)
def test_bad_key_files_are_explained(launcher, tmp_path, content, mode, word):
    file = tmp_path / "bad"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    ranks = launcher.start("join", [0], "4", environment=lambda _: {"CARME_KEY_FILE": str(file)})
    ranks.finish()
    assert "InvalidCall" in ranks.outputs[0] and word in ranks.outputs[0]


def test_several_nodes_need_a_key(launcher):
    ranks = launcher.start(
        "join", [0, 1], "4", environment=lambda _: {"CARME_KEY_FILE": "", "MASTER_ADDR": "192.0.2.1"}
    )
    ranks.finish()
    assert all("CARME_KEY_FILE" in message for message in ranks.outputs.values()), ranks.output()


def test_who_says_nothing_keeps_nobody_waiting(launcher):
    port = free_port()
    silent = []

    def knock_before_rank_1(rank):
        while rank == 1 and len(silent) < 60:
            try:
                silent.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            except OSError:
                time.sleep(0.01)
        return {}

    # Each of them may be silent for five seconds: one after the other they would take longer than ranks may.
    ranks = launcher.start("join", [0, 1], "120", port=port, environment=knock_before_rank_1)
    assert ranks.finish() == [0, 0] and all("joined" in text for text in ranks.outputs.values()), (
        ranks.output()
    )
    for connection in silent:
        connection.close()


HELLO = b"CARMERT1<" + b"\0" * 40


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (b"", "it ended the connection before it had sent its rank and proof"),
        (b"GET / HTTP/1.0\r\n\r\n", "it speaks another protocol"),
        (HELLO[:20], "it ended the connection before it had sent its rank and proof"),
        (HELLO, "it went away instead of proving that it holds the key of this job"),
        (HELLO + b"\0" * 32, "it does not hold the key of this job"),
        (bytes(range(256)) * 300, "it speaks another protocol"),
    ],
    ids=["scan", "http", "truncated", "no proof", "wrong proof", "noise"],
)
def test_unauthenticated_peers_do_not_disturb_and_are_reported(launcher, garbage, why):
    port = free_port()

    def knock():
        stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
        with stranger, contextlib.suppress(OSError):  # refused before all was sent
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass

    def knock_before_rank_1(rank):
        end = time.monotonic() + HANG
        while rank == 1:
            try:
                knock()
                return {}
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.005)
        return {}

    ranks = launcher.start("join", [0, 1, 1], str(HANG), port=port, environment=knock_before_rank_1)
    end = time.monotonic() + HANG
    while time.monotonic() < end and any(p.poll() is None for p in ranks.processes):
        try:
            knock()
        except OSError:
            time.sleep(0.005)
    codes = ranks.finish()
    assert codes == [0, 0, 0] and all("joined" in message for message in ranks.outputs.values()), (
        ranks.output()
    )
    assert f"A connection from 127.0.0.1 was refused: {why}." in ranks.outputs[0], ranks.output()
