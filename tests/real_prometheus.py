"""A Prometheus that runs for a test, with samples that the test gives, and answers by mutual TLS."""

import contextlib
import grp
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from free_ports import free_port

from carme_monitoring.certificates import make
from patience import HANG

__all__ = ["Prometheus", "prometheus_with", "promtool"]


@dataclass
class Prometheus:
    """A running Prometheus; `certificates` are those of a reader."""

    url: str
    certificates: Path


def promtool() -> str:
    """The path of Prometheus' own checker. Skips the test where there is none."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed; ./test unit fetches it")
    return found


@contextlib.contextmanager
def prometheus_with(samples: str, folder: Path, rules: str = "groups: []") -> Iterator[Prometheus]:
    """A Prometheus that knows these samples (OpenMetrics) and rules. Skips the test where there is none."""
    checker, server = promtool(), shutil.which("prometheus")
    if server is None:
        pytest.skip("Prometheus is not installed; ./test unit fetches it")
    group = grp.getgrgid(os.getgid()).gr_name
    make(
        folder / "tls",
        [
            {"name": "prometheus", "group": group, "hosts": ["127.0.0.1"]},
            {"name": "reader", "group": group, "client": True},
        ],
    )
    (folder / "samples").write_text(samples)
    blocks = ["tsdb", "create-blocks-from", "openmetrics", folder / "samples", folder / "data"]
    subprocess.run([checker, *blocks], check=True, capture_output=True)
    (folder / "rules.yml").write_text(rules)
    (folder / "prometheus.yml").write_text("global: {evaluation_interval: 1s}\nrule_files: [rules.yml]\n")
    tls = {
        "cert_file": str(folder / "tls/prometheus/tls.pem"),
        "key_file": str(folder / "tls/prometheus/tls.pem"),
        "client_ca_file": str(folder / "tls/prometheus/ca.crt"),
        "client_auth_type": "RequireAndVerifyClientCert",
    }
    (folder / "web.yml").write_text(json.dumps({"tls_server_config": tls}))
    port = free_port()
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "storage.tsdb.retention.time": "30d",
        "web.config.file": folder / "web.yml",
        "web.listen-address": f"127.0.0.1:{port}",
        "web.external-url": "/",
    }
    command = [server, *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while b"Server is ready" not in (folder / "log").read_bytes():
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield Prometheus(f"https://127.0.0.1:{port}", folder / "tls/reader")
    finally:
        process.terminate()
        process.wait(HANG)
