"""Fixtures of the tests that use the running demo cluster with Prometheus; its GPUs' library is simulated."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import simulated_gpus
from browser.conftest import chromium, context, keep, page

from demo_site import DemoSite

__all__ = ["chromium", "context", "keep", "page"]

PLACE = "/usr/local/lib/carme-simulated-gpus"
DROP_IN = "/etc/systemd/system/carme-node-exporter.service.d/simulated-gpus.conf"


class Gpus:
    """The GPUs that the exporter of n1 sees, as the simulated library describes them."""

    def __init__(self, demo: DemoSite) -> None:
        self._demo = demo

    def show(self, *lines: str) -> None:
        """One line for each GPU, besides its name and number."""
        usual = "used=4096 total=40960 power=200 energy=5000 temp=60 tensor=40"
        text = "".join(
            f"gpu uuid=GPU-{place} minor={place} {usual} {line}\n" for place, line in enumerate(lines)
        )
        write = f"cat >{PLACE}/gpus.new && mv {PLACE}/gpus.new {PLACE}/gpus"
        self._demo.run("n1", "sh", "-c", write, data=text)


@pytest.fixture(scope="session")
def demo() -> DemoSite:
    return DemoSite()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_gpus.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpus(demo: DemoSite, library: Path) -> Iterator[Gpus]:
    """Four GPUs in n1 that do nothing."""
    simulated_gpus.put(demo, "n1", library, PLACE)
    demo.run("n1", "mkdir", "-p", str(Path(DROP_IN).parent))
    unit = f"[Service]\nEnvironment=LD_LIBRARY_PATH={PLACE} SIMULATED_NVML={PLACE}/gpus\n"
    demo.run("n1", "sh", "-c", f"cat >{DROP_IN}", data=unit)
    started = Gpus(demo)
    started.show(*["util=0"] * 4)
    _restart(demo)
    yield started
    demo.run("n1", "rm", "-rf", DROP_IN, PLACE)
    _restart(demo)


def _restart(demo: DemoSite) -> None:
    demo.run("n1", "systemctl", "daemon-reload")
    demo.run("n1", "systemctl", "restart", "carme-node-exporter")


@pytest.fixture(autouse=True)
def no_job_left(demo: DemoSite) -> Iterator[None]:
    """Restore the state of the cluster after each test, even if it failed."""
    yield
    demo.end_all_jobs()
