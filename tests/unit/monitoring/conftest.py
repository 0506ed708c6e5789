"""The exporter as a process of its own, with a simulated GPU library where a real one needs a GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import simulated_gpus
from free_ports import free_port
from prometheus_client.parser import text_string_to_metric_families

from patience import HANG

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a `libnvidia-ml.so.1` and a `libamd_smi.so` that show what files describe."""
    folder = tmp_path_factory.mktemp("gpus")
    simulated_gpus.build(folder)
    simulated_gpus.build_amd(folder)
    return folder


class Exporter:
    """A running `carme-node-exporter`."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self._port = process, port

    def text(self) -> str:
        """What it serves.

        It is read to the end of the connection, not of the answer: the exporter counts a connection until
        then, and takes few at a time.
        """
        with socket.create_connection(("127.0.0.1", self._port), HANG) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with connection.makefile("rb") as answer:
                head, _, body = answer.read().partition(b"\r\n\r\n")
        assert head.split()[1] == b"200", head
        return body.decode()

    def scrape(self) -> dict[Sample, float]:
        """All samples, by name and labels; fails on text that Prometheus could not read."""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
        }

    def values(self, name: str, **labels: str) -> list[float]:
        """The values of a metric in the series that carry these labels."""
        return [
            value
            for (found, pairs), value in self.scrape().items()
            if found == name and labels.items() <= dict(pairs).items()
        ]


Starts = Callable[..., Exporter]


@pytest.fixture
def start(library: Path, tmp_path: Path) -> Iterator[Starts]:
    """Starts exporters: `start(gpus=FILE, arguments=[...])`; without `gpus` there is no GPU library.

    `gpus` are NVIDIA's, `amd` AMD's; where one of them is named, the other library finds no driver.
    `program` is the exporter of a `node` or of the `cluster`, `environment` what it has besides.
    """
    processes: list[subprocess.Popen[str]] = []

    def begin(
        gpus: Path | None = None,
        arguments: list[str] | None = None,
        amd: Path | None = None,
        program: str = "node",
        environment: dict[str, str] | None = None,
    ) -> Exporter:
        port = free_port()
        has = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT / 'monitoring/src'}:{ROOT / 'carme/src'}",
            "PYTHONUNBUFFERED": "1",
        }
        if gpus or amd:
            has |= {"LD_LIBRARY_PATH": str(library)}
            has |= {"SIMULATED_NVML": str(gpus)} if gpus else {}
            has |= {"SIMULATED_AMDSMI": str(amd)} if amd else {}
        # What is only slow here would count as hanging; tests of that name a limit of their own.
        limits = ["--gpu-limit", str(HANG)]
        own = ["--allocations", str(tmp_path / "allocations"), *limits] if program == "node" else []
        process = subprocess.Popen(
            [sys.executable, "-m", f"carme_monitoring.{program}.exporter", "--listen", f"127.0.0.1:{port}"]  # noqa: RUF005
            + [*own, *(arguments or [])],
            env=has | (environment or {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "Serving metrics" in line, line
        return Exporter(process, port)

    yield begin
    for process in processes:
        process.terminate()
        assert process.wait(HANG) == 0
        assert process.stdout is not None
        process.stdout.close()
