"""Distributed runs inside a job: node agents that form the job fabric, and the launcher `carme-run`.

Needs the Python standard library alone, so that it installs into any container.
"""

from carme_runtime.errors import CarmeRuntimeError

__all__ = ["CarmeRuntimeError", "__version__"]
__version__ = "0.1.0"
