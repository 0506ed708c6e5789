#!python
# The command `carme` where carme.c is not compiled: `#!python` becomes the environment's Python.
import os
import sys

# What PYTHONPATH names is for other programs: it comes last, so that no json.py there is the library's.
given = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)}  # noqa: PTH100
sys.path.sort(key=lambda folder: os.path.abspath(folder) in given)  # noqa: PTH100

from carme.cli import program  # noqa: E402 - only now

program()
