"""`carme session shell` and encryption between nodes, on the demo's real nodes."""

import base64
import json
import secrets
from collections.abc import Iterator

import pytest

from carme.jobs import JobState
from demo_site import DemoSite, wait_until
from patience import HANG

TOKEN = secrets.token_hex(16)

# Types into a pseudo-terminal in which `carme` runs, as a person at a terminal does.
TYPE = r"""
import os, pty, select, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
shown = b""
steps = [(b"$ ", b"echo at $((6*7)); tty; env | grep -c JUPYTERHUB_\n"), (b"\n0\r\n", b"exit 7\n")]
while select.select([terminal], [], [], 60)[0]:
    try:
        shown += os.read(terminal, 65536)
    except OSError:  # all programs on it have ended
        break
    if steps and steps[0][0] in shown:
        os.write(terminal, steps.pop(0)[1])
print(shown.decode())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""

# Records all traffic of the first node's network until a file ends it.
CAPTURE = """
import os, socket, sys, time
heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
heard.bind(("eth0", 0))
heard.settimeout(0.2)
print("listening", flush=True)
end, packets = time.monotonic() + float(sys.argv[1]), []
while time.monotonic() < end and not os.path.exists("/run/captured-enough"):
    try:
        packets.append(heard.recv(65536))
    except TimeoutError:
        pass
everything = b"".join(packets)
print(len(packets), *(everything.count(word.encode()) for word in sys.argv[2:]))
"""


@pytest.fixture
def session(demo: DemoSite) -> Iterator[str]:
    """A ready session of user1 on two nodes."""
    options = {"image": "base", "nodes": "2", "gpus_per_node": "1", "minutes": "10", "title": "Shell"}
    with demo.visitor("user1") as visitor:
        name = visitor.start(options)
        visitor.wait(name, "ready", timeout=HANG)
        # On a busy machine the broker may still see the job wait.
        wait_until("its job runs", lambda: demo.carme_json("session", "show", name)["ends"])
        yield name
        visitor.stop(name)


def test_a_session_has_a_terminal_with_carme_for_its_owner_alone(demo: DemoSite, session: str) -> None:
    a_terminal_in_a_session(demo, session)
    carme_is_found_in_it(demo, session)
    another_user_does_not_get_in(demo, session)


def a_terminal_in_a_session(demo: DemoSite, session: str) -> None:
    carme = "/opt/carme/venv/bin/carme"
    python = "/opt/carme/venv/bin/python"
    done = demo.run("head", python, "-c", TYPE, carme, "session", "shell", session, user="user1", check=False)
    assert done.returncode == 7, done.stdout + done.stderr
    assert "at 42" in done.stdout and "/dev/pts/" in done.stdout
    inside = demo.carme(
        "session", "shell", session, "--", "sh", "-c", "echo $APPTAINER_NAME $SLURMD_NODENAME"
    )
    image, first = inside.stdout.split()
    assert image == "base.sif"
    second = demo.carme("session", "shell", "--node", "1", session, "--", "sh", "-c", "echo $SLURMD_NODENAME")
    assert {first, second.stdout.strip()} == {"n1", "n2"}
    assert demo.carme("session", "shell", session, "--", "cat", data="piped\n").stdout == "piped\n"


def carme_is_found_in_it(demo: DemoSite, session: str) -> None:
    commands = "command -v carme; carme --version; command -v carme-run; complete -p carme; echo $PATH"
    shown = demo.carme("session", "shell", session, "--", "bash", "-lc", commands).stdout.splitlines()
    assert shown[0] == "/opt/carme/env/bin/carme" and shown[2] == "/opt/carme/env/bin/carme-run"
    assert shown[3].endswith(" carme")
    assert "/home/user1/.local/bin" in shown[4].split(":")
    message = demo.carme("session", "shell", session, "--", "carme", "session", "list", check=False)
    assert message.returncode in (0, 1) and "Traceback" not in message.stderr + message.stdout


def another_user_does_not_get_in(demo: DemoSite, session: str) -> None:
    refused = demo.carme("session", "shell", session, "--", "id", user="user2", check=False)
    assert refused.returncode == 1
    assert "There is no session" in refused.stderr
    key = demo.job_of(session)["key"]
    folder = f"/home/user1/.local/share/carme/jobs/{key}"
    for name in ("fabric.key", "fabric.pem", "fabric.json"):
        reading = demo.run("head", "cat", f"{folder}/{name}", user="user2", check=False)
        assert (reading.returncode, reading.stdout) == (1, "")
    # The port is open to the whole cluster; without certificate and key there is nothing behind it.
    where = json.loads(demo.run("head", "cat", f"{folder}/fabric.json").stdout)
    knock = (
        "import socket, ssl\n"
        f"plain = socket.create_connection(({where['host']!r}, {where['port']}), 10)\n"
        "context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)\n"
        "context.check_hostname = False; context.verify_mode = ssl.CERT_NONE\n"
        "try:\n    peer = context.wrap_socket(plain); peer.sendall(b'hello'); print(repr(peer.recv(1)))\n"
        "except (ssl.SSLError, ConnectionError) as error: print('refused')"
    )
    assert demo.run("n1", "python3", "-c", knock, user="user2").stdout in ("refused\n", "b''\n")
    job = demo.job_of(session)["id"]
    wait_until(
        "the refusal is in the job's log",
        lambda: "no TLS with this job's certificate" in demo.carme("logs", str(job)).stdout,
    )
    assert demo.carme("session", "shell", session, "--", "true").returncode == 0


def test_exported_variables_do_not_cross_the_network_in_clear(demo: DemoSite) -> None:
    script = "/home/user1/run-with-secret.sh"
    text = (
        f"export DATABASE_PASSWORD={TOKEN} JUPYTERHUB_API_TOKEN={TOKEN}\n"
        "exec carme-run --nodes 2 -- sh -c 'echo $RANK $DATABASE_PASSWORD ${JUPYTERHUB_API_TOKEN-none}"
        " $CARME_ADDRESS; test $(stat -c %a $CARME_KEY_FILE) = 600'\n"
    )
    packed = base64.b64encode(text.encode()).decode()
    demo.run("head", "sh", "-c", f"echo {packed} | base64 -d > {script}", user="user1")
    demo.run("n1", "sh", "-c", "cat > /run/capture.py", data=CAPTURE)
    demo.run("n1", "rm", "-f", "/run/captured", "/run/captured-enough")
    watch = f"exec python3 /run/capture.py {2 * HANG} {TOKEN} DATABASE_PASSWORD > /run/captured"
    demo.run("n1", "systemd-run", "--quiet", "--collect", "--unit=capture", "sh", "-c", watch)
    wait_until(
        "the capture has begun",
        lambda: "listening" in demo.run("n1", "cat", "/run/captured", check=False).stdout,
    )
    options = ["--image", "base", "--nodes", "2", "--gpus", "1", "--time", "5"]
    try:
        job = json.loads(demo.carme("submit", "--json", *options, "--", "sh", script).stdout)["job_id"]
        wait_until("the run is over", lambda: demo.job_state(job) is JobState.COMPLETED)
    finally:
        demo.run("n1", "touch", "/run/captured-enough")
    message = demo.carme("logs", str(job)).stdout
    for rank in (0, 1):
        assert f"[rank {rank}] {rank} {TOKEN} none 10." in message
    found = wait_until(
        "the capture is over", lambda: demo.run("n1", "cat", "/run/captured").stdout.splitlines()[1:]
    )
    packets, *counts = map(int, found[0].split())
    assert packets > 20
    assert counts == [0, 0]
