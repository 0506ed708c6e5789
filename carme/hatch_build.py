"""Builds the compiled part of copying into the wheel, where there is a C compiler.

Without that part the rest does the same, slower. A source that was packed for hosts of one architecture may
bring it along: then no compiler is needed.
"""

from __future__ import annotations

import platform
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CopyingHook(BuildHookInterface[Any]):
    """Called by hatchling for each wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library, and say which hosts the wheel is for."""
        if version == "editable" or sys.platform != "linux":
            return
        root = Path(self.root)
        program = runpy.run_path(str(root / "native/compile.py"))
        brought = root / program["LIBRARY"]
        built = Path(self.directory) / brought.name
        try:
            there = program["build"](built)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"carme: copying is not compiled: {error}", file=sys.stderr)
            there = False
        if there:
            build_data["force_include"][str(built)] = program["LIBRARY"].removeprefix("src/")
        if there or brought.exists():
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"
