"""What an attacker does on a host, each action a function that anybody can carry out.

The same action is made by the attacker, for whom it must fail, and by the victim, for whom it must work: so a
action that was blocked by a mistyped path does not pass for one that the site has stopped.

This file is sent as source to where it is to run, so it needs Python's standard library alone. Each function
answers whether it reached what it was after, and the output.
"""

# ruff: noqa: PTH101, PTH103, PTH108, PTH116, PTH120, PTH123, PTH207, PTH208, PTH211

import contextlib
import ctypes
import errno
import glob
import http.client as http_client
import json
import os
import pwd
import signal
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Outcome = tuple[bool, str]

SECONDS = 5.0  # for a connection to say something
_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17


def _errno(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror or error}"


def read(path: str) -> Outcome:
    """Read a file; globs are allowed."""
    try:
        with open(_first_match(path), "rb") as file:
            data = file.read(1 << 16)
    except OSError as error:
        return False, _errno(error)
    return bool(data), f"{len(data)} bytes read"


def enter(path: str) -> Outcome:
    """List a folder."""
    try:
        names = os.listdir(_first_match(path))
    except OSError as error:
        return False, _errno(error)
    return bool(names), f"{len(names)} names seen"


def write(path: str) -> Outcome:
    """Make a file in a folder, and take it away again."""
    file = f"{path}/carme-was-here-{os.getuid()}"
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.unlink(file)
    except OSError as error:
        return False, _errno(error)
    return True, "a file was made"


def find_text(path: str, text: str) -> Outcome:
    """Find a text in a file at a path that other jobs have under the same name, such as /tmp/NAME."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = text in file.read()
    except OSError as error:
        return False, _errno(error)
    return found, "the victim's text is there" if found else "another file"


def leave_text(path: str, text: str) -> Outcome:
    """Write a text into a file that all may read."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, 0o644)
    return True, "written"


def _first_match(path: str) -> str:
    return next(iter(glob.glob(path)), path)


def connect_unix(path: str) -> Outcome:
    """Connect to a Unix socket."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(_first_match(path))
    except OSError as error:
        return False, _errno(error)
    return True, "connected"


def processes_of(user: str) -> Outcome:
    """See command lines of a user's processes."""
    uid = pwd.getpwnam(user).pw_uid
    seen = []
    for folder in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(folder).st_uid == uid:
                with open(f"{folder}/cmdline", "rb") as file:
                    seen.append(file.read().replace(b"\0", b" ").decode(errors="replace").strip())
    names = sorted({line.split(" ")[0].rpartition("/")[2] for line in seen if line})
    return bool(names), f"{len(seen)} processes: {', '.join(names)[:120]}" if seen else "none is visible"


def arguments_with(user: str, texts: list[str]) -> Outcome:
    """Find secrets in command lines of a user's processes."""
    uid, examined, found = pwd.getpwnam(user).pw_uid, 0, 0
    for folder in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(folder).st_uid == uid:
                with open(f"{folder}/cmdline", "rb") as file:
                    line = file.read().decode(errors="replace")
                examined += 1
                found += any(text in line for text in texts)
    return bool(found), f"{examined} command lines seen, {found} with a secret"


def send_signal(pid: int) -> Outcome:
    """Send a signal that asks only whether one may."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return False, _errno(error)
    return True, "allowed"


def trace(pid: int) -> Outcome:
    """Attach to a process as a debugger does, and let go."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(_PTRACE_ATTACH, pid, None, None) != 0:
        number = ctypes.get_errno()
        return False, f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"
    os.waitpid(pid, 0)
    libc.ptrace(_PTRACE_DETACH, pid, None, None)
    return True, "attached"


def own_child_traced() -> Outcome:
    """Attach to a process of one's own, which shows that attaching works here at all."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        return trace(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def memory(pid: int) -> Outcome:
    """Open a process's memory."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
    except OSError as error:
        return False, _errno(error)
    return True, "opened"


def devices(paths: list[str]) -> Outcome:
    """Open GPU devices; one without a driver behind it says ENXIO, a forbidden one EPERM."""
    message = {}
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDWR))
            message[path] = "opened"
        except OSError as error:
            message[path] = errno.errorcode.get(error.errno or 0, "?")
    reached = [path for path, how in message.items() if how in ("opened", "ENXIO")]
    return bool(reached), ", ".join(f"{path} {how}" for path, how in message.items())


def gpus_allowed() -> list[str]:
    """The GPU devices that may be opened here."""
    return [path for path in sorted(glob.glob("/dev/nvidia[0-9]*")) if devices([path])[0]]


def run(arguments: list[str], texts: list[str], stdin: str = "") -> Outcome:
    """Run a program; reached when it says one of the texts, or with no texts, when it ends well."""
    try:
        done = subprocess.run(
            arguments, input=stdin, capture_output=True, text=True, timeout=60, check=False, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)[:200]
    message = f"{done.stdout}\n{done.stderr}".strip()
    reached = any(text in message for text in texts) if texts else done.returncode == 0
    last = message.splitlines()[-1] if message else "nothing"
    return reached, f"exit code {done.returncode}, output: {last[:160]}"


def tcp_ports_of(user: str) -> list[tuple[str, int]]:
    """The addresses at which a user's programs listen on this host, which everybody can see."""
    uid, found = pwd.getpwnam(user).pw_uid, set()
    for table, size in (("/proc/net/tcp", 8), ("/proc/net/tcp6", 32)):
        with contextlib.suppress(OSError), open(table) as file:
            for line in file.readlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[7]) == uid:
                    raw, port = words[1].split(":")
                    data = b"".join(
                        int(raw[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, size, 8)
                    )
                    family = socket.AF_INET if size == 8 else socket.AF_INET6
                    found.add((socket.inet_ntop(family, data), int(port, 16)))
    return sorted(found)


def other_ports(user: str, known: list[int]) -> Outcome:
    """Find ports of a user's programs besides the known ones, and connect to them."""
    seen = tcp_ports_of(user)
    reached = []
    for host, port in seen:
        if port in known:
            continue
        with contextlib.suppress(OSError):
            reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            with socket.create_connection((reach, port), timeout=SECONDS):
                reached.append(f"{host} port {port}")
    return bool(reached), f"connected to {', '.join(reached)}" if reached else f"{len(seen)} ports, all known"


def talk(
    host: str, port: int, send: str = "", tls: bool = True, certificate: str = "", key: str = ""
) -> Outcome:
    """Connect, show a certificate, say something; reached when the other side goes on talking.

    In TLS 1.3 the client has finished before the server has checked its certificate, so only what comes
    afterwards shows.
    """
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((host, port), timeout=SECONDS))
            if tls:
                context = ssl._create_unverified_context()
                if certificate:
                    context.load_cert_chain(certificate, key or None)
                connection = stack.enter_context(context.wrap_socket(connection, server_hostname=host))
            if send:
                connection.sendall(bytes.fromhex(send))
            connection.settimeout(2)
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                return True, "the connection is kept open"
            return bool(answer), f"{len(answer)} bytes came back" if answer else "closed without an answer"
    except (OSError, ValueError) as error:
        return False, f"{type(error).__name__}: {error}"[:200]


def http(
    host: str,
    port: int,
    path: str,
    tls: bool = True,
    headers: dict[str, str] | None = None,
    method: str = "GET",
    body: str = "",
    certificate: str = "",
    key: str = "",
    text: str = "",
) -> Outcome:
    """Ask a web server; reached when it answers with success (and the text)."""
    try:
        if tls:
            context = ssl._create_unverified_context()
            if certificate:
                context.load_cert_chain(certificate, key or None)
            client = http_client.HTTPSConnection(host, port, timeout=15, context=context)
        else:
            client = http_client.HTTPConnection(host, port, timeout=15)
        client.request(method, path, body or None, headers or {})
        answer = client.getresponse()
        content = answer.read(1 << 20).decode(errors="replace")
        client.close()
    except (OSError, http_client.HTTPException, ValueError) as error:
        return False, f"{type(error).__name__}: {error}"[:200]
    return answer.status < 300 and text in content, f"status {answer.status}"


def at_once(name: str, tries: list[dict[str, Any]]) -> Outcome:
    """Make the action of this name with each of the arguments at the same time; reached when one try was.

    For what leaves the caller without an answer: each try waits for its whole time.
    """
    with ThreadPoolExecutor(len(tries)) as threads:
        outcomes = list(threads.map(lambda arguments: globals()[name](**arguments), tries))
    return any(reached for reached, _ in outcomes), "; ".join(dict.fromkeys(text for _, text in outcomes))


def broker(path: str, question: dict[str, Any], text: str = "") -> Outcome:
    """Ask the broker; reached when it grants the question (and says the text)."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(path)
            connection.sendall(json.dumps(question).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
        answer = json.loads(line)
    except (OSError, ValueError) as error:
        return False, str(error)[:200]
    if answer["error"]:
        return False, answer["error"]["message"][:200]
    return text in line.decode(), f"granted: {json.dumps(answer['result'])[:120]}"


def text_of(path: str) -> str:
    """What a text file holds."""
    with open(_first_match(path), encoding="utf-8") as file:
        return file.read()


def load(path: str) -> Any:
    """What a JSON file holds."""
    return json.loads(text_of(path))


def put(path: str, text: str) -> None:
    """Write a file, and the folder for it; raises when there is another one already.

    The same one is from a check that was killed: no user's own file is lost.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if text_of(path) != text:
            raise


def remove(path: str) -> None:
    """Remove a file."""
    os.unlink(path)


def link(target: str, path: str) -> None:
    """Put a symbolic link into the place of a file."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.symlink(target, path)


def process_with(text: str) -> int:
    """The first process of one's own whose command line holds the text."""
    for folder in sorted(glob.glob("/proc/[0-9]*"), key=lambda name: int(name[6:])):
        with contextlib.suppress(OSError):
            if os.stat(folder).st_uid == os.getuid() and int(folder[6:]) != os.getpid():
                with open(f"{folder}/cmdline", "rb") as file:
                    line = file.read()
                if text.encode() in line and b"serve()" not in line:
                    return int(folder[6:])
    raise LookupError(f"there is no process with {text}")


def serve() -> None:
    """Make the actions that are requested on standard input, one JSON object a line."""
    for line in sys.stdin:
        requested = json.loads(line)
        try:
            answer: Any = {"result": globals()[requested["action"]](**requested["arguments"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
