"""What `carme_runtime.scaling` predicts of a contestant's steps, to stand beside what they take."""

from collections.abc import Sequence
from typing import Any

from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.entries import Entry, Progress
from carme_runtime.graph.files import typed
from carme_runtime.scaling.network import Machine
from carme_runtime.scaling.prediction import predict
from carme_runtime.scaling.profiles import Profile

PROBE_SECONDS = 4.0


def note_predictions(entries: Sequence[Entry], is_weak: bool, progress: Progress) -> None:
    """Probe the contestants whose steps can be predicted: on one rank, and their links on several.

    Their rows with several ranks get `predicted`: milliseconds of a step (`ms`), the ends of its interval of
    80 % (`low`, `high`) and the `speedup` over one rank. In bf16 they get none: probes compute in float32.

    Args:
        entries: Of one network, that are not void.
        is_weak: Whether each rank has a whole batch.
        progress: Gets a sentence where nothing can be predicted.
    """
    able = [
        entry
        for entry in entries
        if CONTESTANTS[entry.row.contestant].is_predicted and entry.precision == "float32"
    ]
    shared = [entry for entry in able if entry.row.ranks > 1]
    alone = next((entry for entry in able if entry.row.ranks == 1), None)
    if alone is None or not shared:
        return
    answer = alone.probe(PROBE_SECONDS)
    if "profile" not in answer:
        progress(_sentence(alone, answer))
        return
    profile = typed(Profile, answer["profile"])
    for entry in shared:
        found = entry.probe(PROBE_SECONDS)
        if "machine" not in found:
            progress(_sentence(entry, found))
            continue
        ranks = entry.row.ranks
        predicted = predict(profile, typed(Machine, found["machine"]), ranks)
        point = (predicted.weak if is_weak else predicted.strong)[-1]
        if point.ranks == ranks:
            times = {"ms": point.step.ms, "low": point.low, "high": point.high}
            entry.row.predicted = times | {"speedup": point.speedup}


def _sentence(entry: Entry, answer: dict[str, Any]) -> str:
    return f"{entry.name}: its steps cannot be predicted: {answer.get('why', 'its ranks sent nothing')}"
