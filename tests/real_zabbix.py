"""A Zabbix server with PostgreSQL and its API that run for a test, from a root folder in which they are
installed."""

import contextlib
import gzip
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import processes
from free_ports import free_port

__all__ = ["ROOT", "Zabbix", "zabbix"]

#: Where `./test monitoring` installs Debian's packages; a root of its own, so that the host stays as it is.
ROOT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "carme/zabbix"


class Zabbix:
    """A running server.

    Args:
        url: Of the web pages and the API.
        start_server: Starts the server process, which the pages and the API do without.
    """

    def __init__(self, url: str, start_server: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        self.url = url
        self._token = ""
        self._start = start_server
        self._server = start_server()

    def stop_server(self) -> None:
        """Stop the server process: it requests and evaluates nothing then."""
        processes.end(self._server)

    def start_server(self) -> None:
        """Start the server process again, on the same database."""
        self._server = self._start()

    def ask(self, method: str, **parameters: Any) -> Any:
        """The API's answer (Zabbix documentation, "API"); fails with what Zabbix says."""
        return self._call(method, parameters)

    def _call(self, method: str, parameters: Any) -> Any:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        question = {"jsonrpc": "2.0", "method": method, "params": parameters, "id": 1}
        answer = httpx.post(
            f"{self.url}/api_jsonrpc.php", json=question, headers=headers, timeout=60, trust_env=False
        ).json()
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def sign_in(self) -> None:
        """Sign in as the administrator that a new Zabbix has."""
        self._token = self._call("user.login", {"username": "Admin", "password": "zabbix"})

    def picture(self, graph: str, file: Path) -> None:
        """Save a graph as the web page shows it (PNG)."""
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False, follow_redirects=True) as browser:
            browser.post("/index.php", data={"name": "Admin", "password": "zabbix", "enter": "Sign in"})
            span = {"from": "now-2m", "to": "now", "profileIdx": "web.charts.filter"}
            shown = {"graphid": graph, "width": 900, "height": 200, **span}
            answer = browser.get("/chart2.php", params=shown)
        assert answer.headers["content-type"] == "image/png", answer.text[:500]
        # A message is a picture as well, of one line (PNG: the height is in bytes 20 to 23).
        assert int.from_bytes(answer.content[20:24], "big") > 200
        file.write_bytes(answer.content)


def _until(what: str, done: Callable[[], Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.2)


class _Programs:
    """Programs in the root folder ROOT, which see `folder` as `inside`; `ending` ends what was started."""

    def __init__(self, folder: Path, ending: contextlib.ExitStack) -> None:
        self.folder, self.inside = folder, Path("/") / folder.relative_to(ROOT)
        self._ending = ending

    def run(self, account: str, *command: str | Path, data: bytes = b"") -> None:
        """Run a program to its end; it must succeed."""
        everything = ["chroot", f"--userspec={account}:{account}", ROOT, *command]
        done = subprocess.run(everything, input=data, capture_output=True)
        assert done.returncode == 0, (command, done.stderr[-2000:])

    def start(self, account: str, *command: str | Path) -> "subprocess.Popen[bytes]":
        """Start a server; its output goes to a log in the folder."""
        log = self._ending.enter_context((self.folder / f"{Path(command[0]).name}.log").open("wb"))
        everything = ["chroot", f"--userspec={account}:{account}", ROOT, *command]
        process = subprocess.Popen(everything, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._ending.callback(processes.end, process)
        return process


def _start_database(programs: _Programs) -> None:
    """A PostgreSQL that listens in the folder only, with Zabbix's tables."""
    inside = programs.inside
    tools = Path("/") / next((ROOT / "usr/lib/postgresql").iterdir()).relative_to(ROOT) / "bin"
    utf8 = ("--encoding=UTF8", "--locale=C.UTF-8")
    programs.run("postgres", tools / "initdb", "--auth=trust", "--no-sync", *utf8, "-D", inside / "data")
    programs.start(
        "postgres",
        *(tools / "postgres", "-D", inside / "data", "-k", inside),
        *("-c", "listen_addresses=", "-c", "fsync=off", "-c", "unix_socket_permissions=0777"),
    )
    _until("PostgreSQL listens", (programs.folder / ".s.PGSQL.5432").exists)
    psql = (tools / "psql", "-h", inside, "-q", "-v", "ON_ERROR_STOP=1")
    ready = ["chroot", ROOT, tools / "pg_isready", "-q", "-h", inside]
    _until("PostgreSQL answers", lambda: subprocess.run(ready).returncode == 0)
    programs.run("postgres", *psql, "-c", "CREATE ROLE zabbix LOGIN")
    programs.run("postgres", *psql, "-c", "CREATE DATABASE zabbix OWNER zabbix")
    for name in ("schema", "images", "data"):
        script = gzip.decompress((ROOT / f"usr/share/zabbix-server-pgsql/{name}.sql.gz").read_bytes())
        programs.run("postgres", *psql, "-U", "zabbix", "-d", "zabbix", data=script)


def _write_settings(programs: _Programs) -> None:
    """Those of Zabbix's server, in the folder, and those of its web pages."""
    inside = programs.inside
    settings = {
        "DBHost": inside, "DBName": "zabbix", "DBUser": "zabbix", "LogFile": inside / "log/server.log",
        "PidFile": inside / "log/server.pid", "SocketDir": inside / "log", "ListenIP": "127.0.0.1",
        "ListenPort": free_port(), "CacheUpdateFrequency": 1, "StartPollers": 1,
        "StartPreprocessors": 1, "StartDiscoverers": 0,
    }  # fmt: skip
    text = "".join(f"{name}={value}\n" for name, value in settings.items())
    (programs.folder / "server.conf").write_text(text)
    (ROOT / "etc/zabbix/zabbix.conf.php").write_text(
        "<?php\n$DB['TYPE'] = 'POSTGRESQL';\n"
        f"$DB['SERVER'] = '{inside}';\n$DB['PORT'] = '5432';\n$DB['DATABASE'] = 'zabbix';\n"
        "$DB['USER'] = 'zabbix';\n$DB['PASSWORD'] = '';\n"
        "$DB['SCHEMA'] = '';\n$DB['ENCRYPTION'] = false;\n"
        f"$ZBX_SERVER = '127.0.0.1';\n$ZBX_SERVER_PORT = '{settings['ListenPort']}';\n"
        "$IMAGE_FORMAT_DEFAULT = IMAGE_FORMAT_PNG;\n"
    )


def _start_pages(programs: _Programs) -> str:
    """The web pages, which are Zabbix's API too; their address."""
    limits = ("max_execution_time=300", "memory_limit=256M", "post_max_size=16M", "max_input_time=300")
    port = free_port()
    programs.start(
        "zabbix",
        *("/usr/bin/php", *(word for limit in limits for word in ("-d", limit))),
        *("-S", f"127.0.0.1:{port}", "-t", "/usr/share/zabbix"),
    )
    return f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def zabbix() -> Iterator[Zabbix]:
    """A new Zabbix, empty but for what every Zabbix has. Needs root, since it changes its root folder."""
    with contextlib.ExitStack() as ending:
        # In the root's own /tmp: sockets have short names, and both see the same path.
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "tmp", prefix="carme-")))
        programs = _Programs(folder, ending)
        for account, part in (("postgres", "data"), ("zabbix", "log")):
            (folder / part).mkdir()
            subprocess.run(["chroot", ROOT, "chown", account, programs.inside / part], check=True)
        folder.chmod(0o1777)
        _start_database(programs)
        _write_settings(programs)
        server = ("/usr/sbin/zabbix_server", "--foreground", "--config", programs.inside / "server.conf")
        running = Zabbix(_start_pages(programs), lambda: programs.start("zabbix", *server))

        def signed_in() -> bool:
            with contextlib.suppress(httpx.HTTPError, ValueError, AssertionError):
                running.sign_in()
                return True
            return False

        _until("Zabbix's API answers", signed_in)
        try:
            yield running
        except BaseException:
            log = folder / "log/server.log"
            print(log.read_text()[-4000:] if log.exists() else "Zabbix wrote no log.")
            raise
