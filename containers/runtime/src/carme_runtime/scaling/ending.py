"""How a probe ends its process, and which errors are of memory."""

import os
import sys

NO_RESULT = 2  # exit code


def end(sentence: str) -> None:
    """Say what came of the probe, and end the process, which has nothing else to do."""
    print(f"carme-run --scale-probe: {sentence}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(NO_RESULT)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory, on the host or on a GPU."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "not enough memory" in text
        or "out of memory" in text
        or "can't allocate memory" in text
    )
