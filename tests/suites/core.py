"""The native core's own tests: with sanitizers, and with frames that libFuzzer makes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from suites.debian import apt_install
from suites.running import ROOT, Output, Stop, show_stage

__all__ = ["fuzzed", "sanitized"]

#: No step may wait for ever, in seconds: a deadlock is what some of these tests look for.
LIMIT = 1800
COMPILER = ("clang", "libclang-rt-dev")
PROBE = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n'


def sanitized(output: Output, native: Path, sanitizers: str) -> int:
    """Build and run the core's tests with these sanitizers, as `-fsanitize` takes them; the exit code.

    Args:
        output: Where the commands print.
        native: The native environment's folder.
        sanitizers: Their names, separated by commas.
    """
    folder = native / f"sanitized-{sanitizers.replace(',', '-')}"
    options = ["-DCARME_TESTS=ON", f"-DCARME_SANITIZE={sanitizers}"]
    return _built(output, native, folder, *options) or output.call(folder / "core_tests", limit=LIMIT)


def fuzzed(output: Output, native: Path) -> int:
    """Send the core frames of a peer for CARME_FUZZ_SECONDS; return the exit code.

    The corpus that it finds is used the next time.

    Args:
        output: Where the commands print.
        native: The native environment's folder.
    """
    folder, seconds = native / "fuzzed", int(os.environ.get("CARME_FUZZ_SECONDS") or 20)
    if not _has_libfuzzer() and os.geteuid() == 0 and shutil.which("apt-get"):
        show_stage("Installing clang with libFuzzer")
        try:
            apt_install(*COMPILER)
        except Stop as stop:
            output.report(str(stop))
    if not _has_libfuzzer():
        names = " ".join(COMPILER)
        output.report(
            f"There is no clang++ with libFuzzer, so frames are not fuzzed. Use: sudo apt-get install {names}"
        )
        return 1
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    options = [
        f"-DCMAKE_CXX_COMPILER={shutil.which('clang++')}",
        "-DCARME_FUZZ=ON",
        "-DCARME_SANITIZE=address,undefined",
    ]
    limits = ["-timeout=60", "-max_len=2000", "-len_control=0", "-rss_limit_mb=2048", "-malloc_limit_mb=512"]
    shown = ["-close_fd_mask=2", "-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={folder}/"]
    return _built(output, native, folder, *options) or output.call(
        folder / "fuzz_frames",
        f"-max_total_time={seconds}",
        *limits,
        *shown,
        folder / "corpus",
        limit=seconds + 180,
    )


def _built(output: Output, native: Path, folder: Path, *options: str) -> int:
    """Configure and build the core without its Python module; the exit code."""
    tools = native / "bin"
    configure = [tools / "cmake", "-G", "Ninja", "-S", ROOT / "containers/runtime/native", "-B", folder]
    options = (f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCARME_MODULE=OFF", *options)
    configured = output.call(
        *configure, *options, "-DCMAKE_BUILD_TYPE=RelWithDebInfo", limit=LIMIT, quiet=True
    )
    return configured or output.call(tools / "ninja", "-C", folder, "--quiet", limit=LIMIT)


def _has_libfuzzer() -> bool:
    compiler = shutil.which("clang++")
    if compiler is None:
        return False
    command = [compiler, "-fsanitize=fuzzer", "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input=PROBE.encode(), stderr=subprocess.DEVNULL).returncode == 0
