"""The table in a probe's result. What comes from a file is checked before anything is made of it."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from carme.errors import InvalidRequest
from carme.scaling.predictions import (
    MOST_FILE,
    MOST_STEPS,
    Line,
    PredictedStep,
    Prediction,
)
from carme.translation import message as _
from carme.translation import noop
from carme.wording import number

__all__ = ["MOST_BYTES", "VERSIONS", "Curve", "Row", "read_curve", "read_file", "too_large"]

#: Of a result; those of models with thousands of parameters take less than 1 MiB.
MOST_BYTES = 4 << 20
#: That are read, as `carme_runtime.scaling.profiles` counts them; their tables are alike.
VERSIONS = (2, 3, 4)
_FORMAT = "carme scaling"
_MOST_ROWS = 10_000
_AGAIN = _("Measure again with: carme-run -n 1 --scale-probe train.py")
_FIELD = "scaling"
_NAME_A_PROBE_FILE = _("Name a file that a probe wrote.")


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Row(_FrozenModel, PredictedStep):
    """Strong scaling on some nodes, with so many ranks on each."""

    nodes: int = Field(ge=1, le=100_000)
    ranks_per_node: int = Field(ge=1, le=1024)

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def cost(self) -> float:
        """Rank-hours, as a multiple of those with one rank."""
        return self.ranks / self.speedup

    @model_validator(mode="after")
    def _ordered(self) -> "Row":
        if not self.low_ms <= self.step_ms <= self.high_ms:
            raise ValueError("has an interval that its time is not in")
        return self


class Curve(_FrozenModel):
    """What the model predicts for a training script.

    Attributes:
        file: Where the result was read.
        model, device: What was measured, and on what.
        batch: Samples of a step, which all ranks share.
        links: Of the nodes, as the probe knew them.
        rows: What there is a prediction for.
    """

    file: str = Field(max_length=MOST_FILE)
    model: Line = Field(max_length=200)
    device: Line = Field(max_length=200)
    batch: int = Field(ge=1)
    links: str = Field(max_length=200)
    rows: list[Row] = Field(min_length=1, max_length=_MOST_ROWS)

    @cached_property
    def by_size(self) -> Mapping[tuple[int, int], Row]:
        """Rows by nodes and ranks of each."""
        return {(row.nodes, row.ranks_per_node): row for row in self.rows}

    def row(self, nodes: int, gpus_per_node: int) -> Row:
        """What is predicted for a choice; nodes without GPUs have one rank each.

        Raises:
            InvalidRequest: Nothing is.
        """
        each = max(gpus_per_node, 1)
        if found := self.by_size.get((nodes, each)):
            return found
        what = _("{nodes} with {ranks} each", nodes=number(nodes, "node"), ranks=number(each, "rank"))
        if nodes * each > self.batch:
            raise InvalidRequest(
                _(
                    "A batch of {batch} cannot be shared by {nodes} ranks.",
                    batch=self.batch,
                    nodes=nodes * each,
                ),
                _("Choose fewer nodes or GPUs, or remove the probe's result."),
                field=_FIELD,
            )
        raise InvalidRequest(
            _("The probe's result has no prediction for {what}.", what=what),
            _("Choose another number, or remove the probe's result."),
            field=_FIELD,
        )

    def prediction(
        self, nodes: int, gpus_per_node: int, steps: int | None = None, reason: str = ""
    ) -> Prediction:
        """What a job of this size keeps of it. Raises InvalidRequest.

        Args:
            steps: Of the whole training.
            reason: Why so many are requested.
        """
        if steps is not None and not 1 <= steps <= MOST_STEPS:
            raise InvalidRequest(
                _("{steps} is not a valid number of steps.", steps=steps),
                _("Give 1 to {most_steps}.", most_steps=MOST_STEPS),
                field="steps",
            )
        row = self.row(nodes, gpus_per_node)
        fields = {"step_ms", "low_ms", "high_ms", "speedup", "efficiency", "limit", "extrapolated"}
        return Prediction(
            file=self.file,
            model=self.model,
            device=self.device,
            steps=steps,
            reason=reason.strip(),
            ranks=row.ranks,
            **row.model_dump(include=fields),
        )


def read_curve(data: bytes, file: str) -> Curve:
    """The table in the bytes of a result.

    Args:
        file: Names it in sentences, and in what jobs keep.

    Raises:
        InvalidRequest: It is too large, no result, one of another version, or damaged.
    """
    if len(data) > MOST_BYTES:
        raise too_large(file)
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise _refusal(
            file, noop("{file} is not a result of a probe: it is not JSON."), _NAME_A_PROBE_FILE
        ) from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _refusal(file, noop("{file} is not a result of a probe."), _NAME_A_PROBE_FILE)
    if content.get("version") not in VERSIONS:
        version = str(content.get("version"))[:20]
        what = noop(
            "{file} is a result of version {version}, and this site reads versions {oldest} to {newest}."
        )
        raise _refusal(file, what, _AGAIN, version=version, oldest=VERSIONS[0], newest=VERSIONS[-1])
    curve = content.get("curve")
    if not isinstance(curve, dict) or not curve.get("rows"):
        raise _refusal(file, noop("{file} has no predictions."), _AGAIN)
    try:
        return Curve.model_validate(
            {**curve, "file": file, "model": content.get("model"), "device": content.get("device")}
        )
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"]) or "curve"
        raise _refusal(file, noop("{file} is damaged at {place}."), _AGAIN, place=place) from None


def read_file(path: Path) -> Curve:
    """The table of a result in a file that this process may read. Raises InvalidRequest."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        what = noop("{file} cannot be read ({why}).")
        raise _refusal(str(path), what, _NAME_A_PROBE_FILE, why=error.strerror) from None
    return read_curve(data, str(path.absolute()))


def too_large(file: str) -> InvalidRequest:
    """The refusal of a file that is too large."""
    what = noop("{file} is not a result of a probe: it has more than {most} MiB.")
    return _refusal(file, what, _NAME_A_PROBE_FILE, most=MOST_BYTES >> 20)


def _refusal(file: str, template: str, remedy: str, **values: object) -> InvalidRequest:
    name = file.rpartition("/")[2].encode(errors="replace").decode()
    shown = "".join(letter if letter.isprintable() else "?" for letter in name)[:100]
    return InvalidRequest(_(template, file=shown, **values), remedy, field=_FIELD)
