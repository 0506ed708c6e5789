"""A job's usage as a short text for Slurm's accounting (AdminComment), where it outlives all metrics.

`carme-report/1 BASE64`: deflated JSON with short names. A text in the accounting may be anybody's: reading
one that is not ours, is torn, or would unpack to much, gives None.
"""

import base64
import binascii
import json
import zlib
from typing import Any

from pydantic import ValidationError

from carme.reports.models import GpuUse, NodeUse, RankUse, TrainingUse, Usage

__all__ = ["MOST_NODES", "MOST_RANKS", "PREFIX", "read_record", "write_record"]

PREFIX = "carme-report/1 "
MOST_NODES = 64  # in one record; larger jobs keep the first ones
MOST_RANKS = 64  # in one record, one by one
MOST_BYTES = 1 << 20  # unpacked
_TRAINING = ("step_seconds", "samples_per_second", "data_wait", "rank_wait", "loss")


def write_record(usage: Usage) -> str:
    """The text for a usage."""
    saved = [node.node for node in usage.nodes[:MOST_NODES]]
    known = set(saved)
    body: dict[str, Any] = {
        "t": round(usage.seconds),
        "x": usage.nodes_left_out + len(usage.nodes) - len(saved),
        "n": [
            [node.node, *map(_short, (node.cpus, node.cpus_used, node.memory_bytes, node.memory_limit_bytes))]
            for node in usage.nodes[:MOST_NODES]
        ],
        "g": [
            [
                gpu.node,
                gpu.gpu,
                *map(
                    _short,
                    (gpu.busy, gpu.active, gpu.memory_bytes, gpu.memory_total_bytes, gpu.energy_joules),
                ),
            ]
            for gpu in usage.gpus
            if gpu.node in known
        ],
    }
    moved = [[_short(node.read_bytes), _short(node.written_bytes)] for node in usage.nodes[:MOST_NODES]]
    if any(value is not None for values in moved for value in values):
        body["m"] = moved
    if reported := usage.training:
        body["r"] = [reported.ranks, *(_short(getattr(reported, name)) for name in _TRAINING)]
        body["e"] = [
            [each.node, each.rank, *(_short(getattr(each, name)) for name in _TRAINING)]
            for each in reported.each[:MOST_RANKS]
        ]
    packed = zlib.compress(json.dumps(body, separators=(",", ":")).encode(), 9)
    return PREFIX + base64.b64encode(packed).decode()


def read_record(text: str) -> Usage | None:
    """The usage in a text; None if there is none of ours in it."""
    if not text.startswith(PREFIX):
        return None
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(base64.b64decode(text[len(PREFIX) :], validate=True), MOST_BYTES)
        if unpacker.unconsumed_tail:
            return None
        body = json.loads(raw)
        return Usage(
            seconds=body["t"],
            nodes_left_out=body["x"],
            training=_training(body.get("r"), body.get("e", [])),
            nodes=[
                NodeUse(
                    node=node, cpus=cpus, cpus_used=used, memory_bytes=memory, memory_limit_bytes=limit,
                    read_bytes=read, written_bytes=written,
                )
                for (node, cpus, used, memory, limit), (read, written) in zip(
                    body["n"], body.get("m") or [[None, None]] * len(body["n"]), strict=True
                )
            ],
            gpus=[
                GpuUse(
                    node=node, gpu=gpu, busy=busy, active=active, memory_bytes=memory,
                    memory_total_bytes=total, energy_joules=energy,
                )
                for node, gpu, busy, active, memory, total, energy in body["g"]
            ],
        )  # fmt: skip
    except (binascii.Error, zlib.error, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return None


def _training(words: list[float | None] | None, each: list[list[Any]]) -> TrainingUse | None:
    if words is None:
        return None
    ranks, *values = words
    reported = [
        RankUse.model_validate({"node": node, "rank": rank, **dict(zip(_TRAINING, of_rank, strict=True))})
        for node, rank, *of_rank in each
    ]
    return TrainingUse.model_validate(
        {"ranks": ranks, "each": reported, **dict(zip(_TRAINING, values, strict=True))}
    )


def _short(value: float | None) -> float | None:
    """Three digits that count are enough."""
    if value is None:
        return None
    short = float(f"{value:.3g}")
    return int(short) if short.is_integer() else short
