"""The broker as a process of its own, which benchmarks of large sites measure."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import processes

from carme.broker import AsyncBrokerClient
from carme.errors import CarmeError

#: Seconds in which a client that waits for events knows of a change.
SEEN_SECONDS = 3.0


@contextlib.contextmanager
def broker(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The broker of a site, until the block ends.

    Args:
        folder: Of its files; Slurm's programs there come before those on PATH.
    """
    (folder / "images").mkdir()
    (folder / "carme.toml").write_text(
        f"""
[site]
url = "https://carme.example.org"
[slurm]
cluster = "bench"
default_partition = "gpu"
adapter = "commands"
[broker]
socket = "{folder}/broker.sock"
audit_log = "{folder}/audit.jsonl"
state_directory = "{folder}/state"
[images]
directory = "{folder}/images"
"""
    )
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    code = "import sys; from carme.broker.daemon import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--config", str(folder / "carme.toml")]
    with (folder / "journal").open("wb") as journal:
        process = subprocess.Popen(command, env=environment, stderr=journal)
    try:
        yield process
    finally:
        processes.end(process)


async def first_poll(client: AsyncBrokerClient, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the broker has read the nodes and jobs once."""
    end = time.monotonic() + 300
    while True:
        try:
            await client.cluster()
            await client.events()
            return
        except CarmeError:
            if process.poll() is not None or time.monotonic() > end:
                raise
            await asyncio.sleep(0.05)
