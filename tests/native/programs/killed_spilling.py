"""Kills processes that train in less memory than they need, at random moments, and looks at the spill folder.

    killed_spilling.py FOLDER TIMES SEED

Every other process has a file system without unnamed files; some of these end while their file has a name.
"""

import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

import carme_runtime
from carme_runtime.out_of_core import pages, spill
from patience import HANG

MIB = 1 << 20
folder, times, choice = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
torch.set_num_threads(1)


def train(begun: int) -> None:
    """Until somebody ends this process."""
    with carme_runtime.memory(pages.resident() + pages.page_tables() + 150 * MIB, folder) as budget:
        model: nn.Module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(64)))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = budget.adopt(model, optimizer)
        while True:
            model(torch.ones(8, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            os.write(begun, b"step")


def without_unnamed_files(ends: bool) -> None:
    """Let files have names for a moment, in which the process ends itself on request."""
    usual = os.open

    def named(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not supported")
        return usual(path, flags, *arguments, **keywords)

    os.open = named
    if ends:

        def unlink(path: Path, missing_ok: bool = False) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        spill.Path.unlink = unlink  # pyright: ignore[reportAttributeAccessIssue]


def kill_one(number: int) -> bool:
    """One process; whether it had come as far as its first step."""
    reading, writing = os.pipe()
    wait, named, ends = choice.random() < 0.8, number % 2 == 1, choice.random() < 0.3
    delay = choice.random() * 0.03
    child = os.fork()
    if child == 0:
        try:
            if named:
                without_unnamed_files(ends)
            train(writing)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    begun = False
    if wait:
        assert select.select([reading], [], [], HANG)[0], "it does not begin"
        begun = bool(os.read(reading, 4))  # nothing: it has ended itself
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"it ended by itself: {status}"
    os.close(reading)
    return begun


def main() -> None:
    begun, left = 0, 0
    for number in range(times):
        begun += kill_one(number)
        left = max(left, len(list(folder.iterdir())))
    file = spill.SpillFile(folder)  # the next start
    file.close()
    without_unnamed_files(ends=False)
    file = spill.SpillFile(folder)
    file.close()
    print(f"{times} killed, {begun} after their first step, up to {left} names left; now", end=" ")
    print(len(list(folder.iterdir())), flush=True)


main()
