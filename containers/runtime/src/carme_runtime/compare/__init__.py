"""The same training work in every framework that is installed, measured in turns, with one report.

    carme compare --quick                  # or: python -m carme_runtime.compare --quick
    carme compare --diff before.json after.json

Networks, weights and batches are drawn once and given to all. A contestant whose first losses differ from
the others' is void, as it does other work. What is timed is timed in rounds of a newly drawn order, with a
probe of known work between all turns. Reading results needs nothing but Python, measuring needs NumPy and
the frameworks.
"""

from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.results import Result, Row, Turn, load, save

__all__ = ["CompareError", "Result", "Row", "Turn", "load", "save"]
