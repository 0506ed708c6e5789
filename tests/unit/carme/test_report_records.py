"""The record of a job's use that is left in Slurm's accounting."""

import base64
import json
import zlib

import pytest

from carme.reports import GpuUse, NodeUse, RankUse, Usage, read_record, write_record
from carme.reports.record import MOST_RANKS, PREFIX

from .report_samples import trained, usage


def test_a_record_says_what_was_used_and_is_short() -> None:
    used = usage((0.91234, 0.5), cpus_used=1.23456, read_bytes=1_234_567, written_bytes=0)
    text = write_record(used)
    assert len(text) < 250 and text.isascii() and "\n" not in text
    again = read_record(text)
    assert again is not None
    assert again.gpus[0].busy == 0.912
    assert again.nodes[0].cpus_used == 1.23
    assert (again.nodes[0].read_bytes, again.nodes[0].written_bytes) == (1_230_000, 0)
    assert again.model_copy(update={"nodes": [], "gpus": []}) == used.model_copy(
        update={"nodes": [], "gpus": []}
    )


def test_a_record_says_how_training_went() -> None:
    used = trained(0.625)
    again = read_record(write_record(used))
    assert again is not None and again.training == used.training
    assert used.training is not None
    ranks = [RankUse(node="n1", rank=number, step_seconds=0.25, loss=1.5) for number in range(MOST_RANKS + 3)]
    many = used.model_copy(update={"training": used.training.model_copy(update={"each": ranks})})
    again = read_record(write_record(many))
    assert again is not None and again.training is not None
    assert again.training.each == ranks[:MOST_RANKS] and again.training.ranks == used.training.ranks
    # One that was written before ranks were reported one by one.
    old = write_record(used)
    body = json.loads(zlib.decompress(base64.b64decode(old.removeprefix(PREFIX))))
    del body["e"]
    again = read_record(PREFIX + base64.b64encode(zlib.compress(json.dumps(body).encode())).decode())
    assert again is not None and again.training == used.training


def test_a_large_job_s_record_stays_small() -> None:
    many = Usage(
        seconds=1,
        nodes=[
            NodeUse(node=f"gpu{n:04}", cpus=128, cpus_used=n / 7, memory_bytes=n * 1.1e9) for n in range(1000)
        ],
        gpus=[
            GpuUse(node=f"gpu{n:04}", gpu=str(g), busy=n / 1000, active=g / 8, energy_joules=n * 1.3e5)
            for n in range(1000)
            for g in range(8)
        ],
    )
    text = write_record(many)
    assert len(text) < 16_000
    again = read_record(text)
    assert again is not None
    assert (len(again.nodes), len(again.gpus), again.nodes_left_out) == (64, 512, 936)


def packed(body: object) -> str:
    return PREFIX + base64.b64encode(zlib.compress(json.dumps(body).encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "looked at by the operators",
        "JS1:H4sIAAAA",
        PREFIX,
        PREFIX + "%%%",
        write_record(usage())[:-7],
        packed([]),
        packed({"t": "long", "x": 0, "n": [], "g": []}),
        packed({"t": 1, "x": 0, "n": [["n1"]], "g": []}),
        packed({"t": 1, "x": 0, "n": [["n1", [], [], [], []]], "g": []}),
        packed({"t": 1, "x": 0, "n": [["n1", 1, 1, 1, 1]], "g": [], "m": [[1, 1], [2, 2]]}),
        PREFIX + base64.b64encode(zlib.compress(b"[" * 100_000)).decode(),
        PREFIX + base64.b64encode(zlib.compress(bytes(50 << 20))).decode(),
    ],
)
def test_a_text_that_is_not_a_valid_record_is_ignored(text: str) -> None:
    assert read_record(text) is None
