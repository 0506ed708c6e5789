"""What a probe's result says of nodes and GPUs: read from the file of `carme-run --scale-probe`.

The model is the training runtime's (`carme_runtime.scaling`), which writes its table into that file. Here
the table is read alone, for the portal, `carme submit`, and the broker.
"""

from carme.scaling.choices import Choice, choices, marks
from carme.scaling.curves import MOST_BYTES, VERSIONS, Curve, Row, read_curve, read_file, too_large
from carme.scaling.outcomes import outcome_text
from carme.scaling.predictions import Prediction, check_efficiency

__all__ = [
    "MOST_BYTES",
    "VERSIONS",
    "Choice",
    "Curve",
    "Prediction",
    "Row",
    "check_efficiency",
    "choices",
    "marks",
    "outcome_text",
    "read_curve",
    "read_file",
    "too_large",
]
