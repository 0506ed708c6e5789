"""Joins, and says how that went.

Arguments: seconds that this may take; a folder in which ranks meet before these begin, if they are to.
"""

import os
import sys
import time
from pathlib import Path

from carme_runtime import gaspi
from patience import HANG

if len(sys.argv) > 2:
    folder, end = Path(sys.argv[2]), time.monotonic() + HANG
    (folder / f"met-{os.environ['RANK']}").touch()
    while len(list(folder.glob("met-*"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.005)
try:
    process = gaspi.init(float(sys.argv[1]))
except gaspi.GaspiError as error:
    print(type(error).__name__, error)
else:
    process.barrier()
    print("joined")
    process.close()
