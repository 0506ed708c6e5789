"""Joins, and says how that went.

Arguments: seconds that this may take; then a folder in which ranks meet before these begin, if they are to,
or `again` to join once more after leaving.
"""

import os
import sys
import time
from pathlib import Path

from carme_runtime import gaspi
from patience import HANG

again = "again" in sys.argv[2:]
if len(sys.argv) > 2 and not again:
    folder, end = Path(sys.argv[2]), time.monotonic() + HANG
    (folder / f"met-{os.environ['RANK']}").touch()
    while len(list(folder.glob("met-*"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.005)
for _ in range(1 + again):
    try:
        process = gaspi.init(float(sys.argv[1]))
    except gaspi.GaspiError as error:
        print(type(error).__name__, error)
    else:
        process.barrier()
        print("joined")
        process.close()
