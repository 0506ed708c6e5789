"""A real nginx with the configuration of the role reverse_proxy.

What a template does not set is inherited from nginx.conf, whose values are meant for web pages. Here all of
these are far too small: whatever a location inherits fails at once, and "for an hour" is half a second.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from patience import HANG

ROLE = Path(__file__).resolve().parents[1] / "ansible/roles/reverse_proxy"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")

#: Mark of tests that need it.
needed = pytest.mark.skipif(not NGINX, reason="nginx is not installed; ./test unit fetches it")

#: Limits that are far too small.
LIMITS = """\
    client_max_body_size 1k;
    client_header_buffer_size 1k;
    large_client_header_buffers 2 1k;
    client_header_timeout 100ms;
    client_body_timeout 100ms;
    send_timeout 100ms;
    keepalive_timeout 100ms;
    proxy_buffer_size 1k;
    proxy_buffers 8 1k;
    proxy_connect_timeout 100ms;
    proxy_read_timeout 100ms;
    proxy_send_timeout 100ms;
"""
MAIN = """
pid {folder}/pid;
error_log {folder}/error.log info;
daemon off;
{master}
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{limits}    include {folder}/carme.conf;
}}
"""


def make_certificate(folder: Path, name: str = "localhost", stem: str = "site", days: int = 30) -> None:
    """Write STEM.pem and its key STEM-key.pem, self-signed, which ends in so many days."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
    make += ["-days", str(days)]
    make += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    make += ["-keyout", str(folder / f"{stem}-key.pem"), "-out", str(folder / f"{stem}.pem")]
    subprocess.run(make, check=True, capture_output=True)


def configure(folder: Path, port: int, backend: int, *, reloads: bool = False, **variables: Any) -> None:
    """Write nginx's configuration as the role does, with this machine's ports and folders.

    Args:
        folder: Where it goes, with a certificate.
        port: Where nginx listens.
        backend: The port of what stands for portal and hub.
        reloads: It is to reload, which takes a master process.
        variables: Of the role.
    """
    known = {
        **yaml.safe_load((ROLE / "defaults/main.yml").read_text()),
        "carme_site_url": f"https://localhost:{port}",
        "reverse_proxy_host": "localhost",
        "reverse_proxy_port": port,
        "reverse_proxy_site_port": port,
        "reverse_proxy_certificate_file": folder / "site.pem",
        "reverse_proxy_key_file": folder / "site-key.pem",
        "reverse_proxy_ipv6": {"stat": {"exists": Path("/proc/net/if_inet6").exists()}},
        **variables,
    }
    make_certificate(folder, known["reverse_proxy_host"])
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(ROLE / "templates"), trim_blocks=True)
    text = templates.get_template("carme.conf.j2").render(known)
    for there, here in (
        ("/run/carme-entrance", str(folder / "entrance")),
        ("127.0.0.1:8100", f"127.0.0.1:{backend}"),
        ("127.0.0.1:8000", f"127.0.0.1:{backend}"),
    ):
        assert there in text
        text = text.replace(there, here)
    write(folder, text, reloads=reloads)


def write(folder: Path, text: str, *, reloads: bool = False, limits: str = LIMITS) -> None:
    """Write a configuration, and the nginx.conf that includes it."""
    (folder / "carme.conf").write_text(text)
    # Its workers must be able to read the folder of a test.
    master = f"{'user root; ' if os.geteuid() == 0 else ''}" if reloads else "master_process off;"
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, master=master, limits=limits))


def command(folder: Path) -> list[str]:
    """The command line of the nginx that is configured in a folder."""
    assert NGINX
    return [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]


@contextlib.asynccontextmanager
async def running(folder: Path, port: int) -> AsyncIterator["asyncio.subprocess.Process"]:
    """Run that nginx: from when it listens until the block ends."""
    nginx = await asyncio.create_subprocess_exec(*command(folder))
    try:
        async with asyncio.timeout(HANG):
            # It listens a moment before it writes its number.
            while not (await listens(port) and _has_number(folder)):
                assert nginx.returncode is None, (folder / "error.log").read_text()
                await asyncio.sleep(0.02)
        yield nginx
    finally:
        if nginx.returncode is None:
            nginx.terminate()
        await nginx.wait()


def _has_number(folder: Path) -> bool:
    try:
        return (folder / "pid").read_text().endswith("\n")
    except FileNotFoundError:
        return False


def workers(folder: Path) -> list[int]:
    """The workers of the nginx that runs with this folder's configuration."""
    master = (folder / "pid").read_text().strip()
    return [int(each) for each in Path(f"/proc/{master}/task/{master}/children").read_text().split()]


def takes_connections(process: int, port: int) -> bool:
    """Whether this process has the socket that listens there; one that ends after a reload has not."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    for number in _open_files(process):
        with contextlib.suppress(FileNotFoundError):  # it is closed just now
            if str(number.readlink()) in listening:
                return True
    return False


def _open_files(process: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{process}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []


async def listens(port: int) -> bool:
    """Whether something takes connections there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
