"""Data to where the GPUs are: copied by many workers, verified, and resumed where it was interrupted.

from carme.staging import Options, copy
result = copy("/archive/imagenet", "/scratch/imagenet", Options(verify="device"))
for problem in result.problems:
    print(problem.path, problem.reason)
"""

from carme.staging.engine import copy, pack, sync, verify
from carme.staging.options import Counts, Options, Problem, Progress, Result, parse_size

__all__ = [
    "Counts",
    "Options",
    "Problem",
    "Progress",
    "Result",
    "copy",
    "pack",
    "parse_size",
    "sync",
    "verify",
]
