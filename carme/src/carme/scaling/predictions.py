"""What a job keeps of a prediction, and the site's floor of efficiency."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from carme.config import Settings
from carme.errors import InvalidRequest
from carme.translation import message as _
from carme.wording import percent

__all__ = [
    "MOST_FILE",
    "MOST_REASON",
    "MOST_STEPS",
    "Efficiency",
    "Line",
    "Milliseconds",
    "PredictedStep",
    "Prediction",
    "Speedup",
    "check_efficiency",
]

MOST_FILE, MOST_REASON, MOST_STEPS = 4096, 500, 10**12


def _line(text: str) -> str:
    if any(not letter.isprintable() for letter in text):
        raise ValueError("must be one line of printable letters")
    return text


Line = Annotated[str, AfterValidator(_line)]
Milliseconds = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
Speedup = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
Efficiency = Annotated[float, Field(gt=0, lt=1e3, allow_inf_nan=False)]


class PredictedStep(BaseModel):
    """The expected time of a training step on some ranks.

    Attributes:
        step_ms: In milliseconds; eight runs of ten are between `low_ms` and `high_ms`.
        speedup: Times as fast as one rank.
        efficiency: Of the ideal speed-up; 1 is all of it.
        limit: What binds.
        extrapolated: Whether it is beyond what was measured.
    """

    model_config = ConfigDict(frozen=True)

    step_ms: Milliseconds
    low_ms: Milliseconds
    high_ms: Milliseconds
    speedup: Speedup
    efficiency: Efficiency
    limit: Line = Field(default="", max_length=100)
    extrapolated: bool = False


class Prediction(PredictedStep):
    """What a probe's result says of the nodes and GPUs that a job requests.

    Attributes:
        file: Where the result lies.
        model, device: What was measured, and on what.
        ranks: Of the job: its GPUs, or its nodes if those have none.
        steps: Of the whole training; None: its owner named none.
        reason: Why so many are requested, in the owner's words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(max_length=MOST_FILE)
    model: Line = Field(default="", max_length=200)
    device: Line = Field(default="", max_length=200)
    ranks: int = Field(ge=1, le=10**8)
    steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    reason: Line = Field(default="", max_length=MOST_REASON)

    @property
    def hours(self) -> float | None:
        """Of the whole training, where its steps are known."""
        return self.steps * self.step_ms / 3.6e6 if self.steps else None


def check_efficiency(prediction: Prediction | None, settings: Settings) -> None:
    """Refuse what the site wants a reason for, and what has none.

    Raises:
        InvalidRequest: The prediction is below `[scaling] efficiency_percent`.
    """
    floor = settings.scaling.efficiency_percent
    if prediction is None or prediction.reason.strip() or prediction.efficiency * 100 >= floor:
        return
    raise InvalidRequest(
        _(
            "The predicted efficiency is {efficiency}. Below {floor} this site asks for a reason.",
            efficiency=percent(prediction.efficiency),
            floor=percent(floor / 100),
        ),
        _("Choose fewer nodes or GPUs, or say why you need so many."),
        field="reason",
    )
