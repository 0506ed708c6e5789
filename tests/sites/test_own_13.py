"""The demo itself on Debian 13, with its podman 5: in a privileged container that boots systemd.

Where the machine has version 2 of control groups alone, podman runs the demo's hosts with crun, else
with runc.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from carme_demo import image
from carme_demo.deployment import source_files
from carme_demo.podman import host_runtime

from .record import Record
from .site_hosts import DEMO_IMAGES, SiteDescription, SiteHosts, link_layers
from .site_run import SiteRun

ROOT = Path(__file__).resolve().parents[2]
TREE, STATE = "srv/carme", "/var/lib/carme-demo"
DESCRIPTION = SiteDescription(
    name="site13",
    domain="example.org",
    subnet="10.83.0.0/24",
    # All else the demo installs itself.
    system=image.System("trixie", (*image.PACKAGES, "sudo")),
    hosts=(("machine", 2, 0),),
    # A folder of this machine's disk: podman's storage cannot lie in a container's own file system.
    shared={"demo": STATE},
)
#: Ends what hangs: all that the demo does on a busy machine, images among it.
DEMO_SECONDS = 4 * 3600


@pytest.fixture(scope="module")
def machine(keep_site: bool, resume_site: bool) -> Iterator[SiteRun]:
    """A machine with Debian 13 and the source tree."""
    record = Record("own-13", resume_site)
    site = SiteHosts(DESCRIPTION)
    try:
        if not record.is_done("machine"):
            with record.step("machine"):
                site.make()
                files = [name for name in source_files(ROOT) if (ROOT / name).is_file()]
                site.put("machine", {f"{TREE}/{name}": _content(ROOT / name) for name in files})
                link_layers(DEMO_IMAGES, site.places.shared / "demo/cache/images/images")
        site.serve_packages()
        yield SiteRun(site, record)
    finally:
        if not keep_site:
            with record.step("machine taken away"):
                site.destroy()


@pytest.fixture(scope="module")
def up(machine: SiteRun) -> str:
    """What `./demo` printed, with its main job: a session over two nodes in which a model is trained."""
    site, record = machine.site, machine.record
    if not (record.is_done("demo") and "demo" in record.results):
        with record.step("demo"):
            done = _demo(site, "up")
            record.keep("demo", done.stdout[-4000:])
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for name, command in (("podman", ("podman", "--version")), ("debian", ("cat", "/etc/debian_version"))):
        record.versions[name] = site.run("machine", *command).stdout.split()[-1]
    record.write()
    return record.results["demo"]


def _content(file: Path) -> tuple[bytes, int]:
    return file.read_bytes(), 0o755 if file.stat().st_mode & 0o100 else 0o644


def _demo(site: SiteHosts, *words: str) -> subprocess.CompletedProcess[str]:
    return site.run("machine", f"/{TREE}/demo", *words, check=False, timeout=DEMO_SECONDS)


def test_the_demo_runs_on_debian_13(machine: SiteRun, up: str) -> None:
    assert machine.record.versions["debian"].startswith("13")
    assert machine.record.versions["podman"].startswith("5.")
    shown = _demo(machine.site, "status", "--json")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert json.loads(shown.stdout)["ready"] is True


def test_its_hosts_run_by_the_runtime_for_this_machines_control_groups(machine: SiteRun, up: str) -> None:
    shown = machine.site.run("machine", "pgrep", "--full", "--list-full", "/conmon ").stdout
    assert f"/{host_runtime().name}" in shown


def test_a_second_up_works_and_the_demo_goes_down(machine: SiteRun, up: str) -> None:
    with machine.record.step("up again"):
        again = _demo(machine.site, "up", "--no-run")
        assert again.returncode == 0, again.stdout[-4000:] + again.stderr[-4000:]
    down = _demo(machine.site, "down")
    assert down.returncode == 0, down.stdout + down.stderr
