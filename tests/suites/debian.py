"""Programs of Debian that the tests use: root installs them, or they are unpacked into the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from suites.running import Stop, call, report, show_stage

__all__ = [
    "CACHE",
    "apt_install",
    "left_out",
    "prepare_chromium",
    "prepare_compiler",
    "prepare_node_exporter",
    "prepare_otf2",
    "prepare_postgresql",
    "prepare_prometheus",
    "prepare_redis",
    "prepare_unit",
    "prepare_web_servers",
    "require",
]

#: What is installed, unpacked and built once, for all checkouts.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carme"
#: Programs that tests use and a small system lacks, each with its package.
PROGRAMS = {"bzip2": "bzip2", "git": "git", "mksquashfs": "squashfs-tools", "xz": "xz-utils"}
#: Shells for which the command line of carme completes words, each with its packages.
SHELLS = {"zsh": ("zsh", "zsh-common"), "fish": ("fish", "fish-common", "libpcre2-32-0")}

#: Package, program on the host, variable that names the folder of an unpacked one, what is tested with it.
WEB_SERVERS = (
    ("certbot", "/usr/bin/certbot", "CARME_CERTBOT", "certificates by ACME"),
    ("apache2-bin", "/usr/sbin/apache2", "CARME_APACHE", "an Apache in front"),
)


def apt_install(*packages: str) -> None:
    """Install packages on this host.

    Raises:
        Stop: We are not root, or apt failed.
    """
    names = " ".join(packages)
    if os.geteuid() != 0:
        raise Stop(f"{names} must be installed first. Use: sudo apt-get install {names}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages]
    done = call("apt-get", "update", "-qq", environment=quiet) == 0
    if not done or subprocess.run(install, env=os.environ | quiet, stdout=subprocess.DEVNULL).returncode:
        raise Stop(f"apt could not install {names}. See its messages above.", 1)


def require(program: str, title: str, *packages: str) -> None:
    """Install packages where this program is missing.

    Raises:
        Stop: They cannot be installed.
    """
    if not shutil.which(program):
        show_stage(title)
        apt_install(*packages)


def prepare_unit() -> None:
    """Prepare programs for unit tests; tests of missing ones are left out, and a message says so."""
    prepare_programs()
    prepare_prometheus()
    prepare_nginx()
    prepare_web_servers()
    prepare_slapd()
    prepare_redis()
    prepare_shells()
    prepare_compiler()
    prepare_chromium()


def prepare_programs() -> bool:
    """Prepare programs that tests need and a small system lacks; return whether they are there."""
    packages = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    names = " ".join(packages)
    return not packages or _installed(f"Tests that need {names} will fail or be left out.", *packages)


def prepare_compiler() -> bool:
    """A C compiler, for what is compiled of carme; whether it is there."""
    lacking = "There is no C compiler; the tests of what is compiled are left out."
    return bool(shutil.which("cc")) or _installed(lacking, "gcc", "libc6-dev")


def prepare_otf2() -> bool:
    """The program that reads traces, as others write it; whether it is there."""
    lacking = "There is no otf2-print; the test that it accepts traces is left out."
    return bool(shutil.which("otf2-print")) or _installed(lacking, "otf2-tools")


def prepare_chromium() -> bool:
    """Chromium's headless shell, for the portal's pages, or the whole browser; whether it is there."""
    if shutil.which("chromium-headless-shell"):
        return True
    slow = "Tests of pages take longer in Chromium's whole browser than in its headless shell."
    lacking = "There is no Chromium; the tests of pages in a browser are left out."
    return (
        _installed(slow, "chromium-headless-shell", "fonts-dejavu-core")
        or bool(shutil.which("chromium"))
        or _installed(lacking, "chromium", "fonts-dejavu-core")
    )


def prepare_postgresql() -> bool:
    """PostgreSQL, on which the portal's tests run too; whether it is there."""
    lacking = "PostgreSQL is missing; the tests on it are left out."
    return any(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or _installed(lacking, "postgresql")


def _installed(lacking: str, *packages: str) -> bool:
    """Install packages; False, with a message, where that cannot be done."""
    if os.geteuid() != 0:
        report(f"{lacking} Use: sudo apt-get install {' '.join(packages)}")
        return False
    show_stage(f"Installing {' '.join(packages)}")
    try:
        apt_install(*packages)
    except Stop as stop:
        report(f"{stop} {lacking}")
        return False
    return True


def prepare_prometheus() -> None:
    """Prometheus itself, with which rules and reports are tested."""
    if not _programs("prometheus", "bin", "promtool", "prometheus"):
        report(
            "Prometheus cannot be had; the tests of rules and reports are left out. "
            "Install Prometheus to run them."
        )


def prepare_nginx() -> None:
    """nginx itself, with which the reverse proxy's configuration is tested."""
    if not _programs("nginx", "sbin", "nginx"):
        report("nginx cannot be had; the tests of the reverse proxy are left out. Install nginx to run them.")


def prepare_web_servers() -> None:
    """Server and client of ACME, with which certificates are tested, and Apache, which may stand in front."""
    lacking = "cannot be had; the tests of"
    if not _programs("pebble", "bin", "pebble"):
        report(f"pebble {lacking} certificates by ACME are left out. Install pebble to run them.")
    for package, program, variable, tested in WEB_SERVERS:
        folder = CACHE / Path(program).name
        if Path(program).exists():
            continue
        if not _packages(folder, package, with_needs=True):
            report(f"{package} {lacking} {tested} are left out. Install {package} to run them.")
        if (folder / program[1:]).exists():
            os.environ[variable] = str(folder)


def prepare_node_exporter() -> None:
    """node_exporter, with which Carme's exporter is compared."""
    if not _programs("prometheus-node-exporter", "bin", "prometheus-node-exporter"):
        report(
            "node_exporter cannot be had and is left out. "
            "Install prometheus-node-exporter to compare with it."
        )


def prepare_slapd() -> None:
    """slapd itself, with which signing in with a directory's accounts is tested."""
    folder = CACHE / "slapd"
    if Path("/usr/sbin/slapd").exists():
        return
    if not _packages(folder, "slapd", "libwrap0", "libltdl7"):
        report(
            "slapd cannot be had; the tests of signing in with a directory are left out. "
            "Install slapd to run them."
        )
    if (folder / "usr/sbin/slapd").exists():
        os.environ["CARME_SLAPD"] = str(folder)


def prepare_redis() -> None:
    """Redis itself, with which the portal's processes are tested."""
    packages = ("redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblzf1")
    if not shutil.which("redis-server") and not _packages(CACHE / "redis-server", *packages):
        report(
            "Redis cannot be had; the tests of the portal's processes are left out. "
            "Install redis-server to run them."
        )


def prepare_shells() -> None:
    """The shells that complete the command line of carme."""
    for shell, packages in SHELLS.items():
        folder = CACHE / shell
        if not shutil.which(shell) and not _packages(folder, *packages):
            report(
                f"{shell} cannot be had; the tests of its completion are left out. "
                f"Install {shell} to run them."
            )
        _extend_path(folder / "bin", folder / "usr/bin")


def _programs(package: str, where: str, *programs: str) -> bool:
    """Unpack programs of a Debian package, and find them from now on; whether that could be done.

    Args:
        package: Its name.
        where: The folder below /usr that they are in.
        programs: Their names; one of them on the host is enough.
    """
    folder = CACHE / package
    there = folder / "usr" / where
    known = f"{os.environ['PATH']}:/usr/{where}"
    done = True
    is_there = any(shutil.which(program, path=known) for program in programs)
    if not is_there and not (there / programs[0]).exists():
        members = [f"./usr/{where}/{program}" for program in programs]
        done = _fetch(folder, [package], members)
    _extend_path(there)
    return done


def _packages(folder: Path, *packages: str, with_needs: bool = False) -> bool:
    """Unpack Debian packages whole, with libraries that a base system lacks; whether that could be done.

    Args:
        folder: Gets what they have.
        packages: Their names.
        with_needs: Whether all that they depend on, and this host lacks, comes too.
    """
    if (folder / "complete").exists():
        return True
    if done := _fetch(folder, packages, (), with_needs):
        (folder / "complete").touch()
    return done


def _fetch(folder: Path, packages: Iterable[str], members: Iterable[str], with_needs: bool = False) -> bool:
    """Download packages and unpack them (of these members, if there are any) into a new folder."""
    packages = list(packages)
    show_stage(f"Fetching {packages[0]}")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        # apt downloads as a user of its own, where it can.
        fetched = Path(name)
        fetched.chmod(0o755)
        (fetched / "partial").mkdir()
        command = ["apt-get", "download", "-qq", *packages]
        if with_needs:
            # Nothing is installed, so it need not wait for another apt.
            options = ["-o", "Debug::NoLocking=1", "-o", f"Dir::Cache::archives={fetched}"]
            command[1:2] = ["install", "-y", "--download-only", "--no-install-recommends", *options]

        def download() -> bool:
            return call(*command, folder=fetched) == 0

        if not (download() or (call("apt-get", "update", "-qq") == 0 and download())):
            return False
        return all(_unpack(file, folder, members) for file in sorted(fetched.glob("*.deb")))


def _unpack(package: Path, folder: Path, members: Iterable[str]) -> bool:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as archive:
        unpacked = subprocess.run(["tar", "-x", "-C", folder, *members], stdin=archive.stdout)
    return archive.returncode == 0 and unpacked.returncode == 0


def _extend_path(*folders: Path) -> None:
    os.environ["PATH"] = ":".join([os.environ["PATH"], *map(str, folders)])


def left_out(prepare: Callable[[], int], message: str) -> None:
    """Report what is left out where a preparation fails, by its exit code or because something is missing."""
    try:
        done = prepare() == 0
    except Stop as stop:
        report(str(stop))
        done = False
    if not done:
        report(message)
