"""`carme-run -m carme_runtime.gaspi.links FILE`: measure the links between a run's nodes, for CARME_LINKS."""

import json
import os
import sys
from pathlib import Path

from carme_runtime import gaspi
from carme_runtime.collectives.links import LINKS


def main() -> None:
    """Measure the links of a run, and let rank 0 write them to the file that is named."""
    if len(sys.argv) != 2:
        raise SystemExit("Usage: carme-run -m carme_runtime.gaspi.links FILE")
    os.environ.pop(LINKS, None)
    with gaspi.init() as process:
        times = process.group_all.measure_links()
        if process.rank == 0 and times:
            Path(sys.argv[1]).write_text(json.dumps({"times": times}) + "\n")
        if process.rank == 0:
            for size, time in times:
                print(f"{size} bytes: {time:.1f} microseconds")
            if not times:
                print("All ranks are on one node: there are no links.")


if __name__ == "__main__":
    main()
