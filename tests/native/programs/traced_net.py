"""A Petri net of two transitions, and a spill file, in a run of one rank."""

import ctypes
import mmap
import tempfile
from pathlib import Path

from carme_runtime.out_of_core.spill import SpillFile
from carme_runtime.petri import Net

net = Net("traced")
jobs, drafts, done = net.place("jobs", int), net.place("drafts", int), net.place("done", int)


@net.transition(jobs >> drafts)
def draft(number):
    return number + 1


@net.transition(drafts >> done)
def finish(number):
    return 2 * number


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with net.start(workers=2, folder=Path(folder) / "net") as run:
            for number in range(5):
                run.put(jobs, number)
            assert sorted(run.wait()["done"]) == [2, 4, 6, 8, 10]
        spill = SpillFile(Path(folder))
        memory = ctypes.c_char.from_buffer(mmap.mmap(-1, 8192))  # at a page's begin, as the file wants it
        address = ctypes.addressof(memory)
        place = spill.take(8192)
        spill.write(address, 8192, place)
        spill.read(address, 8192, place)
        spill.close()
