"""The job fabric: who is let in, what happens when an agent goes."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import ssl
import stat
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carme.jobs.certificate import make_certificate
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric import local_socket
from carme_runtime.fabric.frames import FRAME_LIMIT, Link, LinkClosed
from carme_runtime.fabric.members import Member, Members
from carme_runtime.fabric.tls import read_certificate
from carme_runtime.key import read_key

from .conftest import AGENT, MEET, PATIENCE, Job, Witness, clean_environment, private_file

Script = Callable[[str], str]
MakeJob = Callable[..., Job]


def test_agents_serve_a_job_from_start_to_end(make_job: MakeJob) -> None:
    job = make_job("n1", "n2", "n3")
    assert job.greeting == ["from the file", str(job.socket(0))]
    for announcement in (job.announce, job.announce_too):
        assert json.loads(announcement.read_text()) == {"host": "127.0.0.1", "port": job.port}
        assert stat.S_IMODE(announcement.stat().st_mode) == 0o600
    for index in range(3):
        assert stat.S_IMODE(job.socket(index).stat().st_mode) == 0o600
        assert stat.S_IMODE(job.socket(index).parent.stat().st_mode) == 0o700
    code, _, errors = job.end(7)
    assert code == 7
    assert "lost" not in errors
    assert [agent.wait()[0] for agent in job.joined] == [0, 0]
    assert not job.announce.exists() and not job.announce_too.exists()
    assert not any(job.socket(index).exists() for index in range(3))


def test_the_end_of_the_command_ends_runs_too(make_job: MakeJob, script: Script, witness: Witness) -> None:
    job = make_job("n1", "n2")
    job.launch(script(MEET + "witness.recv(1)"), environment=witness.environment)
    witness.expect(2)
    assert job.end()[0] == 0
    assert witness.all_gone()


def test_termination_is_passed_on_to_the_command(make_job: MakeJob) -> None:
    job = make_job("n1", "n2")
    job.first.popen.send_signal(signal.SIGTERM)
    assert job.first.wait()[0] == 143
    assert job.joined[0].wait()[0] == 0


def test_a_lost_node_ends_its_runs_and_is_named(make_job: MakeJob, script: Script, witness: Witness) -> None:
    job = make_job("n1", "n2")
    text = script(MEET + "witness.recv(1)")
    run = job.launch(text, environment=witness.environment | {"CARME_HELP": "https://a.example/help"})
    witness.expect(2)
    job.joined[0].popen.kill()
    code, _, errors = run.wait()
    assert code == 1
    assert errors == (
        "carme-run: The agent of n2 was lost, so the run was ended. See whether the node is down (sinfo -R); "
        "start a new job, or go on with fewer --nodes.\n"
        "More: https://a.example/help/training/#when-ranks-or-nodes-are-lost\n"
    )
    assert witness.all_gone()  # the ranks on n2 as well, though their agent had no time to end them
    code, _, errors = job.launch(text).wait()
    assert code == 2
    assert errors == (
        "carme-run: 1 of the job's 2 nodes cannot be reached (here: n1; lost: n2). "
        "Use --nodes 1 to run on those that are here, or start a new job.\n"
    )
    assert job.launch("--nodes", "1", "--", "true").wait()[0] == 0


def test_the_loss_of_the_first_agent_ends_everything(
    make_job: MakeJob, script: Script, witness: Witness
) -> None:
    job = make_job("n1", "n2")
    run = job.launch(script(MEET + "witness.recv(1)"), node=1, environment=witness.environment)
    witness.expect(2)
    job.first.popen.kill()
    code, _, errors = run.wait()
    assert code == 1
    assert "The agent of n1 was lost" in errors
    assert witness.all_gone()
    code, _, errors = job.joined[0].wait()
    assert code == 1
    assert "the agent of n1, the job's first node, was lost" in errors


def test_a_node_with_another_key_stays_out(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("n1", "n2")
    wrong_key = private_file(tmp_path / "other.key", secrets.token_hex(32))
    job.hosts.append("n3")
    job.devices.append("")
    code, _, errors = job.join(2, wrong_key).wait()
    assert code == 1
    assert "does not hold this job's key. Give --key-file and --join of the same job." in errors


def test_a_node_that_gets_no_processor_joins_all_the_same(make_job: MakeJob) -> None:
    job = make_job("n1", "n2", joining=False)
    with socket.create_server(("127.0.0.1", 0)) as between:
        between.settimeout(PATIENCE)
        agent = job.join(1, port=between.getsockname()[1])
        near, _ = between.accept()
        with near, socket.create_connection(("127.0.0.1", job.port), timeout=PATIENCE) as far:
            while far.recv(4096):  # nothing is sent to it, until it gives up
                pass
        near, _ = between.accept()
        far = socket.create_connection(("127.0.0.1", job.port))
        near.settimeout(None)
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=carry, args=(source, target), daemon=True).start()
        agent.wait_for_error("n2 joined")
    assert job.end()[0] == 0
    assert agent.wait()[0] == 0


def carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while message := source.recv(4096):
            target.sendall(message)
        target.shutdown(socket.SHUT_WR)


def test_a_node_too_many_stays_out(make_job: MakeJob) -> None:
    job = make_job("n1", "n2")
    job.hosts.append("n3")
    job.devices.append("")
    code, _, errors = job.join(2).wait()
    assert code == 1
    assert "did not let this node in" in errors
    job.first.wait_for_error("all 2 nodes of the job are here already")


def frame(message: object) -> bytes:
    content = json.dumps(message).encode()
    return struct.pack("!I", len(content)) + content


GREETING = {"protocol": "carme-fabric-1", "challenge": "ab" * 32}


def answer(peer: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("!I", peer.recv(4, socket.MSG_WAITALL))
    return json.loads(peer.recv(length, socket.MSG_WAITALL))


def refused(peer: socket.socket) -> bool:
    """Wait until the agent closes the connection."""
    try:
        while peer.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_unauthenticated_peers_are_dropped_while_a_run_goes_on(
    make_job: MakeJob, script: Script, witness: Witness
) -> None:
    job = make_job("n1", "n2")
    run = job.launch(script(MEET + "witness.recv(2); print('done')"), environment=witness.environment)
    witness.expect(2)

    tls = read_certificate(job.certificate).connecting

    def unauthenticated_peer() -> ssl.SSLSocket:  # who somehow got the certificate, but not the key
        return tls.wrap_socket(socket.create_connection(("127.0.0.1", job.port), PATIENCE))

    silent, half = unauthenticated_peer(), unauthenticated_peer()
    half.sendall(frame(GREETING)[:20])
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        b"\0\0\0\0",
        frame([1]),
        frame("x"),
        frame({}),
        frame(GREETING | {"protocol": "carme-fabric-0"}),
        frame(GREETING | {"challenge": 7}),
        frame(GREETING | {"challenge": "ab"}),
        struct.pack("!I", 8) + b"not json",
        struct.pack("!I", 4097) + b"{",
        struct.pack("!I", 4000) + b"[" * 4000,
    ):
        with unauthenticated_peer() as peer:
            peer.sendall(garbage)
            assert refused(peer), garbage
    with unauthenticated_peer() as peer:  # a port scan
        peer.close()
    with unauthenticated_peer() as peer:  # a truncated frame
        peer.sendall(frame(GREETING)[:-3])
        peer.unwrap().close()
    # The agent's own proof, mirrored, and a wrong one.
    for answer in (lambda reply: reply["proof"], lambda reply: "00" * 32):
        with unauthenticated_peer() as peer:
            peer.sendall(frame(GREETING))
            with peer.makefile("rb") as replies:
                reply = json.loads(replies.read(*struct.unpack("!I", replies.read(4))))
            peer.sendall(frame({"proof": answer(reply)}))
            assert refused(peer)
    with silent, half:
        assert refused(silent)
        assert refused(half)

    witness.release()
    code, out, _ = run.wait()
    assert (code, sorted(out.splitlines())) == (0, ["[rank 0] done", "[rank 1] done"])
    code, _, errors = job.end()
    assert code == 0
    assert "it does not hold this job's key" in errors
    assert "no proof of the key within 3 seconds" in errors
    assert "Traceback" not in errors
    assert job.key_file.read_text() not in errors


def test_nonsense_at_the_unix_socket_hurts_nobody_else(job: Job) -> None:
    for nonsense in (
        b"\xff" * 8,
        frame({}),
        frame({"node": 0, "request": {}}),
        frame({"node": [], "request": 1}),
    ):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE)
            client.connect(str(job.socket(1)))
            client.sendall(nonsense)
            assert refused(client)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(job.socket(1)))
        client.sendall(frame({"node": 0, "request": {"type": "start", "ranks": 7}}))
        job.first.wait_for_error("a request without sense")
        client.settimeout(PATIENCE)
        members, refusal, over = (answer(client) for _ in range(3))  # a client that waits for its run
        assert "members" in members and over == {"node": 0, "event": {"type": "over"}}
        assert refusal["event"]["type"] == "refused"
        assert "cannot carry out what it was sent (KeyError('command'))" in refusal["event"]["message"]
    assert job.launch("--", "true", node=1).wait()[0] == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_refused(make_job: MakeJob) -> None:
    job = make_job("n1")
    for path in (job.socket(0), *job.socket(0).parents):  # the file modes alone keep nobody out now
        path.chmod(0o777)
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(PATIENCE)
            peer.connect(str(job.socket(0)))
            os._exit(10 if peer.recv(1) == b"" else 11)
        except OSError:
            os._exit(12)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    job.first.wait_for_error("a process of another user at the Unix socket")


def test_a_peer_of_another_user_is_recognised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (
        local_socket.listen(tmp_path / "private" / "s.sock") as server,
        socket.socket(socket.AF_UNIX) as peer,
    ):
        peer.connect(server.getsockname())
        assert local_socket.is_own_peer(peer)
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        assert not local_socket.is_own_peer(peer)


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    laid_out = tmp_path / "carme-1"
    laid_out.mkdir()
    laid_out.chmod(0o777)
    with pytest.raises(CarmeRuntimeError, match="must belong to this user"):
        local_socket.listen(laid_out / "agent.sock")
    link = tmp_path / "carme-2"
    link.symlink_to(tmp_path)
    with pytest.raises(CarmeRuntimeError, match="must belong to this user"):
        local_socket.listen(link / "agent.sock")


def test_only_one_agent_listens_at_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "private" / "agent.sock"
    with local_socket.listen(path), pytest.raises(CarmeRuntimeError, match="Another agent listens at"):
        local_socket.listen(path)
    local_socket.listen(path).close()  # what a dead agent left is replaced


@pytest.mark.parametrize(
    ("mode", "content", "words"),
    [(0o640, "x" * 64, "is open to other users"), (0o600, "short\n", "holds 5 bytes, a key has 16 or more")],
)
def test_an_unusable_key_file_is_refused(tmp_path: Path, mode: int, content: str, words: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(CarmeRuntimeError, match=words):
        read_key(path)


def agent(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*AGENT, *arguments],
        env=clean_environment(),
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=PATIENCE,
    )


def test_what_the_agent_cannot_do_is_reported_in_one_sentence(tmp_path: Path) -> None:
    key, environment = tmp_path / "key", tmp_path / "environment.json"
    key.write_text("x" * 64)
    key.chmod(0o600)
    environment.write_text("{}")
    environment.chmod(0o644)
    first = ["--nodes", "1", "--key-file", "key", "--announce", str(tmp_path / "a.json")]
    first += ["--socket", str(tmp_path / "private" / "s")]
    elsewhere = ["--listen", "192.0.2.1"]
    for arguments, words in (
        (
            [*first, "--listen", "127.0.0.1", "--", "/no/such/thing"],
            "The command /no/such/thing cannot be started",
        ),
        ([*first, *elsewhere, "--unencrypted", "--", "true"], "The agent cannot listen at 192.0.2.1"),
        ([*first, *elsewhere, "--", "true"], "at 192.0.2.1 could be read on the way. Give --certificate"),
        (["--key-file", "key", "--join", "192.0.2.1:1"], "at 192.0.2.1 could be read on the way."),
        (
            [*first, "--listen", "127.0.0.1", "--certificate", "key", "--", "sleep", "600"],
            "The certificate key cannot be used: ",
        ),
        ([*first, *elsewhere, "--certificate", "no", "--", "true"], "The certificate no cannot be read: "),
        (
            [*first, "--listen", "127.0.0.1", "--environment-file", str(environment), "--", "true"],
            "environment.json is open to other users, it must be",
        ),
        (["--key-file", "key", "--join", "nowhere"], "'nowhere' is not a HOST:PORT."),
        (["--key-file", "key", "--join", "127.0.0.1:1"], "does not answer at 127.0.0.1:1: "),
        (["--key-file", "none", "--join", "127.0.0.1:1"], "The key file none cannot be read: No such file"),
    ):
        done = agent(*arguments, cwd=tmp_path)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert agent("--key-file", "key", cwd=tmp_path).returncode == 2
    assert agent(*first, "--listen", "127.0.0.1", cwd=tmp_path).returncode == 2


async def until_forgotten(link: Link) -> None:
    """Until asyncio has let go of the socket, which is soon after the peer has closed the connection."""
    while link._writer.get_extra_info("sockname"):  # noqa: ASYNC110 - what changes is asyncio's
        await asyncio.sleep(0.001)


async def test_a_connection_that_the_peer_has_closed_still_has_its_own_address(tmp_path: Path) -> None:
    certificate = read_certificate(private_file(tmp_path / "fabric.pem", make_certificate()))

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=certificate.accepting)
    try:
        host, port = server.sockets[0].getsockname()
        link = await Link.connect(host, port, FRAME_LIMIT, certificate.connecting)
        with pytest.raises(LinkClosed):
            await asyncio.wait_for(link.receive(), PATIENCE)
        await asyncio.wait_for(until_forgotten(link), PATIENCE)
        with pytest.raises(LinkClosed):
            link.local_address()
        link.close()
    finally:
        server.close()


def test_members_are_in_natural_order() -> None:
    def member(number: int, host: str) -> Member:
        return Member(number, host, "192.0.2.1", 0, 1)

    members = Members.of([member(0, "n9"), member(1, "n10"), member(2, "n2"), member(3, "gpu1")], ["n3"], 5)
    assert [each.host for each in members.present] == ["n9", "gpu1", "n2", "n10"]
    assert Members.from_json(json.loads(json.dumps(members.as_json()))) == members
