"""Petri nets whose transitions are Python functions and programs, and whose runs survive what kills them.

from carme_runtime.petri import Net

net = Net("squares")
numbers, squares = net.place("numbers", int), net.place("squares", int)

@net.transition(numbers >> squares)
def square(number):
    return number * number

with net.start() as run:
    run.put(numbers, 3)
    run.wait()
    print(run.marking())
"""

from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.memory import Memory, Range
from carme_runtime.petri.model import Arc, Flow, Place, Transition
from carme_runtime.petri.net import Net
from carme_runtime.petri.slurm_jobs import SlurmJobs

__all__ = ["Arc", "Flow", "Memory", "Net", "PetriError", "Place", "Range", "SlurmJobs", "Transition"]
