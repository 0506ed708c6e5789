"""How a probe ends its process, and which errors are of memory."""

import os
import re
import sys
from typing import NoReturn

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core.sizes import show_size

NO_RESULT = 2  # exit code
_PREFIX = "carme-run --scale-probe:"
_WANTED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)")


def end(sentence: str) -> NoReturn:
    """Say what came of the probe, and end the process, which has nothing else to do."""
    print(f"{_PREFIX} {sentence}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(NO_RESULT)


def has_explained(code: int, output: str) -> bool:
    """Whether a rank that ended with this code and output was a probe that has printed why."""
    return code == NO_RESULT and _PREFIX in output


def memory_sentence(error: BaseException) -> str:
    """For people, with what the script wanted where the error says so."""
    found = _WANTED.search(str(error).replace("Tried", "tried"))
    wanted = ""
    if found:
        size = show_size(float(found[1])) if found[2] == "bytes" else f"{found[1]} {found[2]}"
        wanted = f" when it wanted {size} more"
    return f"The script ran out of memory{wanted}. Use a smaller batch."


def failure_sentence(error: Exception) -> str:
    """For people: why a step of a script that trains could not be measured."""
    if isinstance(error, CarmeRuntimeError):
        return str(error)
    if lacks_memory(error):
        return "There is too little memory to measure beside the script. Use a smaller batch."
    reason = (str(error).splitlines() or [""])[0][:200]
    return (
        f"The probe itself failed when it measured the script's steps ({type(error).__name__}: {reason}). "
        "The script is not at fault. Report this to your administrators."
    )


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory, on the host or on a GPU."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ in ("OutOfMemoryError", "ResourceExhaustedError")
        or "not enough memory" in text
        or "out of memory" in text
        or "can't allocate memory" in text
    )
