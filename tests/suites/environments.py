"""Environments for the suites, in the cache.

There is one for each set of requirements, made completely or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from suites.debian import CACHE, apt_install, left_out, require
from suites.running import ROOT, Stop, call, path_of, report, show_stage

__all__ = [
    "prepare_cgroup_v2",
    "prepare_frameworks",
    "prepare_horovod",
    "prepare_models",
    "prepare_native",
    "prepare_petri",
    "prepare_tests",
    "prepare_zabbix",
    "tests_environment",
]

#: The packages with which Petri nets are compared, and one more that not every Python has.
PETRI_PEERS, PETRI_PEER_OF_SOME = ("distributed", "parsl", "numpy"), "ray"


def _key(*contents: bytes) -> str:
    """What an environment is made from, in short."""
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def _version() -> bytes:
    """What `python -V` prints."""
    return f"Python {sys.version.split()[0]}\n".encode()


def _contents(files: Iterable[Path]) -> bytes:
    return b"".join(file.read_bytes() for file in files)


def _fill_once(folder: Path, title: str, fill: Callable[[], bool]) -> bool:
    """Fill a folder of the cache unless it is complete; return whether it is complete afterwards."""
    mark = folder / "complete"
    if not mark.exists():
        show_stage(title)
        if folder.exists():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if fill():
            mark.touch()
    return mark.exists()


def _must(is_done: bool, what: str) -> None:
    if not is_done:
        raise Stop(f"{what} could not be made. See the messages above.", 1)


def _pip(python: Path, *arguments: str | Path) -> bool:
    return call(python, "-m", "pip", "install", "--quiet", *arguments) == 0


def tests_environment() -> Path:
    """The folder of the environment with what the tests import; `./dev` computes the same."""
    parts = sorted(ROOT.glob("*/pyproject.toml"))
    names = ["tests/requirements.txt", "tests/constraints.txt"]
    files = [*(ROOT / name for name in names), *parts, ROOT / "containers/runtime/pyproject.toml"]
    return CACHE / f"test-{_key(_contents(files), _version())}"


def prepare_tests() -> Path:
    """The interpreter of the environment with what the tests import.

    Raises:
        Stop: It could not be made.
    """
    folder = tests_environment()
    python = folder / "bin/python"

    def fill() -> bool:
        is_created = call(sys.executable, "-m", "venv", folder) == 0
        return is_created and call(python, "tests/install_requirements.py") == 0

    _must(_fill_once(folder, f"Installing what the tests need into {folder}", fill), "The tests' environment")
    return python


def prepare_native(tests: Path) -> Path:
    """The folder of the environment with the native core, PyTorch and the libraries that it is compared with.

    Args:
        tests: The interpreter of the tests.

    Raises:
        Stop: It could not be made.
    """
    require("g++", "Installing a C++ compiler", "g++")
    requirements = ROOT / "tests/native/requirements.txt"
    folder = CACHE / f"native-{_key(requirements.read_bytes(), _version(), _sums_of_runtime())}"
    python = folder / "bin/python"

    def fill() -> bool:
        is_created = call(tests, "-m", "venv", folder) == 0
        return is_created and _pip(python, "--requirement", requirements, "./containers/runtime")

    _must(
        _fill_once(folder, f"Building the native core into {folder}", fill), "The native core's environment"
    )
    _prepare_mxnet(folder)
    return folder


def _sums_of_runtime() -> bytes:
    """What `sha256sum` prints of all files of the runtime."""
    found = (ROOT / "containers/runtime").rglob("*")
    names = sorted(
        file.relative_to(ROOT).as_posix()
        for file in found
        if file.is_file()
        and not file.is_symlink()
        and file.suffix != ".pyc"
        and "build" not in file.relative_to(ROOT).parts[:-1]
    )
    sums = (f"{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    return "".join(sums).encode()


def _prepare_mxnet(native: Path) -> None:
    """MXNet: its last release is for Python 3.11 at most, and for a NumPy that the others cannot use."""
    packages, folder = native / "lib/python3.11/site-packages", native / "mxnet"
    if not packages.is_dir():
        return

    def fill() -> bool:
        is_created = call(native / "bin/python", "-m", "venv", folder) == 0
        if not is_created or not _pip(folder / "bin/python", "mxnet==1.9.1", "numpy==1.23.5"):
            return False
        (folder / "lib/python3.11/site-packages/carme_runtime").symlink_to(packages / "carme_runtime")
        return True

    _must(_fill_once(folder, f"Installing MXNet into {folder}", fill), "The environment of MXNet")


def prepare_horovod(native: Path) -> None:
    """Horovod itself, for tests of the launcher: built once, where that can be done.

    Raises:
        Stop: A wheel that was built cannot be installed.
    """
    recipe = sorted(file for file in (ROOT / "containers/images/horovod").iterdir() if file.is_file())
    key = _key(_contents([*recipe, ROOT / "tests/native/requirements.txt"]), _version())
    python, wheels, mark = native / "bin/python", CACHE / f"horovod-{key}", native / f"horovod-{key}"
    if mark.exists():
        return
    if not (wheels / "complete").exists() and not (
        Path("/usr/bin/mpicxx").exists() and shutil.which("cmake")
    ):
        report("Horovod is missing; its tests are left out. Install libopenmpi-dev and cmake to run them.")
        return
    build = ROOT / "containers/images/horovod/build-wheel"
    if not _fill_once(wheels, f"Building Horovod into {wheels}", lambda: call(build, python, wheels) == 0):
        report("Horovod could not be built; its tests are left out.")
        return
    _must(_pip(python, "--force-reinstall", *wheels.glob("horovod-*.whl")), "The environment of Horovod")
    mark.touch()


def prepare_models(tests: Path) -> Path:
    """The folder of packages that have real ONNX models inside, without what these packages depend on.

    Raises:
        Stop: They cannot be fetched.
    """
    requirements = ROOT / "tests/models/requirements.txt"
    folder = CACHE / f"models-{_key(requirements.read_bytes())}"

    def fill() -> bool:
        return _pip(tests, "--no-deps", "--target", folder, "--requirement", requirements)

    _must(_fill_once(folder, f"Fetching packages with models into {folder}", fill), "The folder of models")
    return folder


def prepare_petri(tests: Path) -> Path:
    """The interpreter with what Petri nets are compared with; where that cannot be had it is left out.

    Raises:
        Stop: The environment cannot be made.
    """
    peers = " ".join((*PETRI_PEERS, PETRI_PEER_OF_SOME)) + "\n"
    folder = CACHE / f"petri-{_key(_version(), peers.encode())}"
    python = folder / "bin/python"

    def fill() -> bool:
        _must(call(tests, "-m", "venv", folder) == 0, "The environment of Petri nets")
        if _pip(python, *PETRI_PEERS):
            if not _pip(python, PETRI_PEER_OF_SOME):
                report("Ray cannot be had for this Python; petri is measured without it.")
            return True
        report(
            "Dask and Parsl cannot be had; petri is measured without them. "
            "See that the package index can be reached."
        )
        return False

    _fill_once(folder, f"Installing what Petri nets are compared with into {folder}", fill)
    return python


def prepare_zabbix(tests: Path) -> None:
    """Zabbix with PostgreSQL, in a root of its own; where it cannot be had its tests are left out."""
    if (CACHE / "zabbix/usr/sbin/zabbix_server").exists():
        return
    show_stage("Installing Zabbix into a root of its own")

    def install() -> int:
        if not shutil.which("mmdebstrap"):
            apt_install("mmdebstrap")
        return call(tests, "tests/install_zabbix.py", environment=path_of("tests", "ansible/demo"))

    left_out(
        install,
        "Zabbix cannot be had; the tests of its templates are left out. "
        "See that the Debian mirror can be reached.",
    )


def prepare_cgroup_v2(tests: Path) -> None:
    """An emulated machine with version 2 of control groups; where it cannot be had its tests are left out."""
    code = "import sys, real_cgroup_v2; sys.exit(bool(real_cgroup_v2.missing()))"
    if call(tests, "-c", code, environment=path_of("tests", "monitoring/src")) == 0:
        return
    show_stage("Making a machine with version 2 of control groups")

    def install() -> int:
        apt_install("qemu-system-x86", "mmdebstrap", "e2fsprogs")
        paths = path_of("tests", "monitoring/src", "ansible/demo")
        return call(tests, "tests/install_cgroup_v2.py", environment=paths)

    left_out(
        install,
        "The machine cannot be had; the tests of version 2 of control groups are left out. "
        "See that the Debian mirror can be reached.",
    )


def prepare_frameworks(tests: Path) -> str:
    """The environment with frameworks, in a home on the demo cluster; its folder there.

    Raises:
        Stop: It could not be made.
    """
    show_stage("Installing the frameworks into a home on the demo cluster")
    command = [tests, "tests/install_frameworks.py", os.environ.get("CARME_WHEELS", "")]
    environment = os.environ | path_of("tests", "carme/src", "ansible/demo")
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    _must(done.returncode == 0, "The environment of the frameworks")
    return done.stdout.strip()
