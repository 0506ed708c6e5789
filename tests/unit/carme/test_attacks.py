"""The attacks on a site: when one counts as stopped, and that the actions do what they say."""

import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from carme.errors import CarmeError
from carme.validation.attacks import ATTACKS, Attack, Fixture, actions, markdown, verdict
from carme.validation.attacks.cases.job_secrets import secrets_of

FIXTURE = cast(
    Fixture,
    SimpleNamespace(
        node="n1",
        victim=SimpleNamespace(name="ada"),
        attacker=SimpleNamespace(name="bob"),
        victims_gpus=[],
        job_id=7,
    ),
)


def reached(_: Fixture) -> actions.Outcome:
    return True, "got it | all"


def shut_out(_: Fixture) -> actions.Outcome:
    return False, "EACCES"


def failing(_: Fixture) -> actions.Outcome:
    raise CarmeError("There is no such node.")


def broken(_: Fixture) -> actions.Outcome:
    raise LookupError("nobody thought of that")


def test_sessions_run_where_and_on_whose_account_the_site_says() -> None:
    """Where a default account may not use the default partition, no attack could be tried otherwise."""
    requested: list[dict[str, str]] = []
    settings = cast(Any, SimpleNamespace(site=SimpleNamespace(url="https://localhost")))
    more = {"partition": "gpu", "account": ""}
    fixture = Fixture(settings, None, ("root", "x"), ("root", "y"), "base", 1, more)
    visitor = SimpleNamespace(login=lambda *_: None, start=lambda fields: requested.append(fields) or "a")
    fixture._begin(cast(Any, SimpleNamespace(name="ada", password="x", visitor=visitor)))
    assert requested[0]["partition"] == "gpu" and "account" not in requested[0]
    # Not its share of the node by GPUs: other jobs of the check start on the same node.
    assert (requested[0]["cpus_per_node"], requested[0]["memory_mb_per_node"]) == ("1", "4096")


@pytest.mark.parametrize("attackers_node", ["n1", "n2"])
def test_the_attacker_needs_no_job_more_where_both_sessions_fill_a_node(attackers_node: str) -> None:
    """On a node of two GPUs a third job would wait until the first session ends."""
    settings = cast(Any, SimpleNamespace(site=SimpleNamespace(url="https://localhost")))
    fixture = Fixture(settings, None, ("root", "x"), ("root", "y"), "base", 1, {"account": "research"})
    fixture.victim.job = cast(Any, SimpleNamespace(id=7, node_list="n1", partition="gpu"))
    fixture.attacker.job = cast(Any, SimpleNamespace(id=8, node_list=attackers_node, partition="gpu"))
    words = fixture._beside_victim()
    assert ("--overlap" in words, "--jobid=8" in words) == (attackers_node == "n1",) * 2
    # A job of its own does not wait for ever.
    beside = {"--nodelist=n1", "--partition=gpu", "--account=research", "--immediate=60"}
    # A memory request of its own: Slurm's default may be the whole node's, where a session runs already.
    beside |= {"--cpus-per-task=1", "--mem=4096M"}
    assert beside <= set(words) or attackers_node == "n1"
    assert "--gres=gpu:1" in words and "--jobid=7" not in words


def test_where_the_attackers_job_has_no_room_the_check_reports_it(tmp_path: Path) -> None:
    settings = cast(Any, SimpleNamespace(site=SimpleNamespace(url="https://localhost")))
    fixture = Fixture(settings, None, ("root", "x"), ("daemon", "y"), "base", 1)
    fixture.victim.job = cast(Any, SimpleNamespace(id=7, node_list="n1", partition="gpu"))

    def refused(*_: Any, **__: Any) -> Any:
        raise CarmeError("srun: error: Unable to allocate resources: Requested nodes are busy")

    fixture.attacker_node = cast(Any, SimpleNamespace(ask=refused))
    with pytest.raises(CarmeError, match=r"daemon cannot be brought to n1.* busy") as caught:
        fixture._reach_node()
    assert "validation_attacks=false" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("attack", "control", "ok", "stopped"),
    [
        (shut_out, reached, True, True),
        (reached, reached, False, False),
        # What works for nobody shows nothing.
        (shut_out, shut_out, False, True),
        (shut_out, failing, False, True),
        # What could not be tried was not stopped.
        (failing, reached, False, False),
        (broken, reached, False, False),
        (shut_out, broken, False, True),
    ],
)
def test_an_attack_counts_as_stopped_only_if_its_control_succeeds(
    attack: Any, control: Any, ok: bool, stopped: bool
) -> None:
    message: list[str] = []
    report = verdict([Attack("x", "Area", "tries | it", attack, control)], FIXTURE, message.append)
    (line,) = report["attacks"]
    assert (report["ok"], line["ok"], line["stopped"]) == (ok, ok, stopped)
    assert report["checks"][0]["ok"] is ok and bool(report["checks"][0]["remedy"]) is not ok
    page = markdown(report)
    assert ("**" in page) is not ok
    # A cell of the table holds no bar of its own.
    assert page.splitlines()[-1].replace("\\|", "").count("|") == 5
    assert len(message) == 1


def test_attacks_on_gpus_need_gpus() -> None:
    report = verdict([Attack("x", "Area", "", reached, reached, needs_gpus=True)], FIXTURE, print)
    assert report["attacks"] == []
    assert report["left_out"] == {"Area: x": "the sessions have no GPUs"}
    assert "- Area: x: the sessions have no GPUs" in markdown(report)


def test_every_attack_has_a_name_of_its_own() -> None:
    names = [f"{attack.area}: {attack.name}" for attack in ATTACKS]
    assert len(set(names)) == len(names) > 100


def test_file_system_attacks_report_whether_they_succeed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert (
        actions.read(f"{tmp_path}/secret")[0]
        and actions.enter(str(tmp_path))[0]
        and actions.write(str(tmp_path))[0]
    )
    assert actions.read(f"{tmp_path}/none") == (False, "ENOENT: No such file or directory")
    assert not actions.enter(f"{tmp_path}/none")[0]
    assert not actions.find_text(f"{tmp_path}/secret", "y")[0]
    assert not actions.connect_unix(f"{tmp_path}/secret")[0]


def test_a_users_file_is_never_overwritten_but_one_that_a_killed_check_left_is(tmp_path: Path) -> None:
    path = f"{tmp_path}/.jupyter/jupyter_server_config.py"
    actions.put(path, "the attack")
    actions.put(path, "the attack")
    with pytest.raises(FileExistsError):
        actions.put(path, "another attack")
    assert Path(path).read_text() == "the attack"


def test_attempts_run_at_the_same_time() -> None:
    """The server answers nobody before both have come, so one after the other would not get through."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            both = [listening.accept()[0] for _ in range(2)]
            for connection in both:
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        attempt = {"host": "127.0.0.1", "port": listening.getsockname()[1], "path": "/", "tls": False}
        assert actions.at_once("http", [attempt, attempt]) == (True, "status 200")
        thread.join()


def test_process_attacks_report_whether_they_succeed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert actions.send_signal(child.pid)[0] and actions.memory(child.pid)[0]
    finally:
        child.kill()
        child.wait()
    assert not actions.send_signal(child.pid)[0]
    assert not actions.trace(child.pid)[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not")
def test_attacks_by_another_user_fail(tmp_path: Path) -> None:
    source = Path(actions.__file__).read_text()
    (tmp_path / "secret").write_text("x")
    script = (
        f"{source.rpartition('if __name__')[0]}\n"
        f"os.setuid(54321)\n"
        f"print(read({str(tmp_path / 'secret')!r})[0], enter({str(tmp_path)!r})[0], memory({os.getpid()})[0],"
        f" send_signal({os.getpid()})[0], trace({os.getpid()})[0], read('/proc/{os.getpid()}/environ')[0])"
    )
    done = subprocess.run(["/usr/bin/python3", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 6


def test_an_open_port_that_is_not_known_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        account = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        seen = actions.tcp_ports_of(account)
        assert ("127.0.0.1", port) in seen
        # The account's other programs, such as tests beside this one, open and close ports all the time.
        monkeypatch.setattr(actions, "tcp_ports_of", lambda user: seen)
        unrelated = [known for _, known in seen if known != port]
        assert actions.other_ports(account, unrelated)[0]
        assert not actions.other_ports(account, [*unrelated, port])[0]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that signs itself, with its key."""
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-noenc",
            "-days",
            "2",
            "-subj",
            "/CN=x",
            "-keyout",
            str(file),
            "-out",
            f"{file}.crt",
        ],
        check=True,
        capture_output=True,
    )
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file


@pytest.mark.parametrize("shown", [True, False])
def test_a_server_that_requires_a_certificate_is_reached_only_with_one(authority: Path, shown: bool) -> None:
    """In TLS 1.3 a refused client learns it after its own side is done."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=f"{authority}.crt")
    context.load_cert_chain(authority)
    context.verify_mode = ssl.CERT_REQUIRED

    def accept() -> None:
        connection, _ = listening.accept()
        try:
            with context.wrap_socket(connection, server_side=True) as secured:
                secured.recv(1)
        except OSError:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=accept)
        server.start()
        certificate = str(authority) if shown else ""
        outcome, message = actions.talk("127.0.0.1", listening.getsockname()[1], certificate=certificate)
        server.join()
    assert outcome is shown, message


def test_what_must_not_leak_is_the_victims_token_and_the_whole_of_its_key(tmp_path: Path) -> None:
    """A part of a sentence in place of the key is found nowhere, so no leak of the key would be."""
    (tmp_path / "fabric.key").write_text("5ec2e7\n")
    node = SimpleNamespace(ask=lambda action, **arguments: getattr(actions, action)(**arguments))
    victim = SimpleNamespace(token="t0ken", folder=str(tmp_path))
    fixture = cast(Fixture, SimpleNamespace(victim=victim, victim_node=node))
    assert secrets_of(fixture) == ["t0ken", "5ec2e7"]
    (tmp_path / "fabric.key").write_text("\n")
    with pytest.raises(CarmeError, match="no token or no key"):
        secrets_of(fixture)
