"""Processes that tests start."""

import subprocess


def end(process: "subprocess.Popen[bytes]", seconds: float = 30) -> None:
    """End a process, by force where it does not listen for so many seconds; one that has ended stays so."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
