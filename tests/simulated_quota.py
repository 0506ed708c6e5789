"""Quotas for processes that preload a library: kernels of test machines keep none, see simulated_quota.c."""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("simulated_quota.c")


def build(folder: Path) -> Path:
    """Compile the library into a folder."""
    library = folder / "simulated_quota.so"
    arguments = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror"]
    subprocess.run([*arguments, "-o", library, SOURCE, "-ldl"], check=True)
    return library
