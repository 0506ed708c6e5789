"""Joins, and says how that went."""

import sys

from carme_runtime import gaspi

try:
    process = gaspi.init(float(sys.argv[1]))
except gaspi.GaspiError as error:
    print(type(error).__name__, error)
else:
    process.barrier()
    print("joined")
    process.close()
