"""Processes that tests start."""

import subprocess


def end(process: "subprocess.Popen[bytes]", seconds: float = 30) -> None:
    """End a process; kill it if it has not ended after so many seconds. One that has ended stays so."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
