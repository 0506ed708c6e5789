"""Learning that a child process ended, without taking its number from it."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable


def call_on_exit(pid: int, call: Callable[[int], None]) -> None:
    """Call `call` in the running loop with the exit code of child `pid` (negative: what signal killed it).

    The child stays a zombie until it is waited for. A thread waits, because neither pidfd nor asyncio's own
    watcher reports the exit on every Python while a grandchild holds the pipes.
    """
    loop = asyncio.get_running_loop()

    def wait() -> None:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            loop.call_soon_threadsafe(call, code)

    threading.Thread(target=wait, daemon=True).start()
