"""Other Pythons that contestants run with: a framework may need libraries that the others cannot use."""

import functools
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from carme_runtime import __version__
from carme_runtime.compare.errors import CompareError

CHECK_SECONDS = 120.0  # the first start from a network file system reads thousands of files
_OF_ONE_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_CHECK = """
import importlib.util, json, sys
lacking = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
version = None
if "carme_runtime" not in lacking:
    from carme_runtime import __version__ as version
print(json.dumps({"lacking": lacking, "version": version}))
"""


def environment_of(python: str, environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what leads to another Python's modules, this Python's commands first."""
    own = {name: value for name, value in environment.items() if name not in _OF_ONE_PYTHON}
    folders = [str(Path(python).parent), environment.get("PATH", os.defpath)]
    return own | {"PATH": os.pathsep.join(folders)}


@functools.cache
def missing(python: str, modules: tuple[str, ...]) -> tuple[str, ...]:
    """The modules that another Python lacks.

    Args:
        python: The path of its executable.
        modules: Their names.

    Raises:
        CompareError: It cannot be started, or has another version of carme_runtime than this one.
    """
    try:
        done = subprocess.run(
            [python, "-c", _CHECK, *modules],
            env=environment_of(python, os.environ),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHECK_SECONDS, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout)
        lacking, version = tuple(found["lacking"]), found["version"]
    except OSError as error:
        raise _no_python(python, error.strerror or str(error)) from None
    except subprocess.TimeoutExpired:
        raise _no_python(python, f"no answer for {CHECK_SECONDS:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise _no_python(python, lines[-1]) from None
    except (ValueError, KeyError, TypeError):
        raise _no_python(python, "its answer is not that of a Python") from None
    if version not in (None, __version__):
        raise CompareError(
            f"{python} has carme_runtime {version}, and this comparison has {__version__}.",
            "Install the same version in both.",
        )
    return lacking


def _no_python(python: str, reason: str) -> CompareError:
    return CompareError(
        f"{python} cannot be used as a Python ({reason}).",
        "Give the path of the executable: mxnet=/path/of/environment/bin/python",
    )
