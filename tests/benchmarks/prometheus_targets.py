"""How long Prometheus needs until it has read every node of a site once.

Real: Prometheus, with the scrape interval of the roles. Not real: the nodes' exporters. One process answers
for all of them, each at a loopback address of its own, with a text as long as that of a node with eight GPUs
and without TLS.
"""

import asyncio
import contextlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import processes
from free_ports import free_port

#: Seconds between two scrapes of a node, as the role prometheus has it.
SCRAPE_SECONDS = 15
#: Seconds until the measurement is given up.
PATIENCE = 300.0
GPUS, METRICS = 8, 25


def measure(count: int) -> float | None:
    """Seconds from Prometheus's start until it has read so many nodes; None where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        print("scale: Prometheus is not installed; prometheus_targets_s is left out.", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory(prefix="carme-scale-bench-") as name, _exporters() as port:
        folder = Path(name)
        targets = [
            {
                "targets": [f"127.{1 + number // 200}.{1 + number % 200}.1:{port}"],
                "labels": {"node": f"n{number}"},
            }
            for number in range(count)
        ]
        (folder / "nodes.json").write_text(json.dumps(targets))
        (folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {SCRAPE_SECONDS}s}}\n"
            "scrape_configs: [{job_name: carme-nodes, file_sd_configs: [{files: [nodes.json]}]}]\n"
        )
        return _until_read(program, folder, count)


def _until_read(program: str, folder: Path, count: int) -> float:
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        begun = time.monotonic()
        command = [program, *options, f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while time.monotonic() < begun + PATIENCE and process.poll() is None:
            with contextlib.suppress(httpx.HTTPError, ValueError, LookupError):
                answer = httpx.get(f"http://{address}/api/v1/query", params={"query": "count(up == 1)"})
                if int(answer.json()["data"]["result"][0]["value"][1]) == count:
                    return time.monotonic() - begun
            time.sleep(0.1)
        raise RuntimeError((folder / "log").read_text()[-2000:])
    finally:
        processes.end(process)


@contextlib.contextmanager
def _exporters() -> Iterator[int]:
    """What answers as all nodes' exporters, in a process of its own; its port."""
    context = get_context("fork")
    own_end, peer_end = context.Pipe()
    process = context.Process(target=_answer, args=(peer_end,))
    process.start()
    try:
        yield int(own_end.recv())
    finally:
        own_end.send(None)
        process.join()


def _answer(parent: Any) -> None:
    lines = [
        f'carme_metric_{metric}{{gpu="{gpu}",job="4711",user="ada",account="physics"}} {metric * gpu}'
        for metric in range(METRICS)
        for gpu in range(GPUS)
    ]
    text = ("\n".join(lines) + "\n").encode()

    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    asyncio.run(_serve(head.encode() + text, parent))


async def _serve(answer: bytes, parent: Any) -> None:
    """Answer every request alike, until the parent says so."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "0.0.0.0", 0, backlog=1024)
    parent.send(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(parent.recv)
    server.close()
