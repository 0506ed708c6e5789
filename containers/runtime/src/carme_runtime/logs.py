"""What the library itself says, to the standard error output of each rank.

CARME_LOG_LEVEL chooses how much of it. Where it is not set, Python's own rule holds: warnings and errors
appear, unless the program has handlers of its own, which then get everything.
"""

import logging
import os
import sys

LEVEL = "CARME_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
# Tarantella's name. Where it is true, Keras says on every rank what it else says on the master rank alone.
KERAS_EVERYWHERE = "TNT_OUTPUT_ON_ALL_DEVICES"

log = logging.getLogger("carme_runtime")


def _begin() -> None:
    level = os.environ.get(LEVEL)
    if level is None:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("carme_runtime: %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.propagate = False  # else handlers of the program would say it again
    log.setLevel(level if level in LEVELS else logging.WARNING)
    if level not in LEVELS:
        log.warning("%s=%s is not a level. Choose from %s.", LEVEL, level, ", ".join(LEVELS))


_begin()
