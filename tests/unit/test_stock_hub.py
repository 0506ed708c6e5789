"""The peer of the benchmarks, JupyterHub with the stock SlurmSpawner, leaves no trace with its users."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyterhub.objects import Hub
from traitlets.config import Config

PEER = Path(__file__).parents[1] / "benchmarks/stock_hub.py"


@pytest.fixture
def peer() -> Iterator[Any]:
    """The benchmarks' module."""
    spec = importlib.util.spec_from_file_location("stock_hub", PEER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


async def test_its_jobs_write_no_log_into_homes_and_are_distinguished(peer: Any, tmp_path: Path) -> None:
    batchspawner = pytest.importorskip("batchspawner")
    config = Config()
    given = {"token": "t", "password": "p", "wrapper": "w", "command": ["c"]}
    exec(peer.configuration("192.0.2.1", str(tmp_path), given), {"get_config": lambda: config})
    of_user = {"req_homedir": "/home/ada", "req_username": "ada", "req_keepvars": "PATH"}
    spawner = batchspawner.SlurmSpawner(config=config, hub=Hub(), user=None, orm_spawner=None, **of_user)
    script = await spawner._get_batch_script(**spawner.get_req_subvars() | {"cmd": "server"})
    assert "--output=/home/ada" in script, "what the stock spawner does by itself"
    requested: dict[str, str] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH "):  # what comes later counts
            requested |= dict(word.split("=", 1) for word in line.split()[1:] if "=" in word)
    assert (requested["--output"], requested["--job-name"]) == ("/dev/null", peer.UNIT)
