"""Plans that the user documentation shows look as the code prints them: the same lines and columns."""

import re
from dataclasses import replace
from pathlib import Path

from carme_runtime.out_of_core.plan import Plan as MemoryPlan
from carme_runtime.out_of_core.plan import Recomputed
from carme_runtime.pipeline import Device, Plan, Request, plan

from .test_partition import network

USERS = Path(__file__).resolve().parents[3] / "docs" / "users"
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?( ([KMG]i)?B\b)?")
KINDS = ("weights", "gradients", "optimizer", "activations")
LEFT_OUT = "..."


def block(page: str, begin: str) -> list[str]:
    """The block of a page in which a line begins so, from that line on."""
    found = []
    for text in FENCE.findall((USERS / page).read_text()):
        lines = text.splitlines()
        found += [lines[place:] for place, line in enumerate(lines) if re.match(begin, line)]
    assert len(found) == 1, f"{page} has {len(found)} blocks with a line that begins with {begin}"
    return found[0]


def form(line: str) -> str:
    """A line without its figures, and with two blanks between columns."""
    return re.sub(" {2,}", "  ", NUMBER.sub("#", line))


def check(shown: list[str], printed: list[str]) -> None:
    """Each line is as it is printed; dots stand for what is left out at its end, or at the block's."""
    if shown[-1] == LEFT_OUT:
        shown = shown[:-1]
        printed = printed[: len(shown)]
    assert len(shown) == len(printed), printed
    for line, printed_line in zip(map(form, shown), map(form, printed), strict=True):
        if line.endswith(LEFT_OUT):
            assert printed_line.startswith(line.removesuffix(LEFT_OUT)), printed_line
        else:
            assert line == printed_line


def two_stages(memory: int = 1 << 30, **requested: object) -> Plan:
    request = Request(2, 32, stages=2, micro_batches=8, memory=memory, **requested)  # pyright: ignore
    return plan(network([1.0] * 6, held=64 << 10), request)


def test_the_first_line_of_a_plan_is_that_of_every_plan() -> None:
    created = replace(two_stages(), replicas=2)
    check(block("large-models.md", r"\d+ stages x"), str(created).splitlines())


def test_the_plan_of_uneven_ranks_has_the_columns_that_are_printed() -> None:
    shown = block("large-models.md", r"stage .* speed$")
    printed = str(two_stages(devices=(Device(1.0, 1 << 30), Device(2.0, 1 << 30)))).splitlines()[1:]
    check(shown[:1], printed[:1])
    columns = len(form(printed[1]).split("  "))
    assert [len(form(line.strip()).split("  ")) for line in shown[1:]] == [columns] * (len(shown) - 1)


def test_the_sentences_on_recomputation_are_those_that_are_printed() -> None:
    most = max(stage.memory_bytes for stage in two_stages().stages)
    printed = two_stages(most - 1024, may_recompute=True).reasons
    check([" ".join(block("large-models.md", "Stage 0 computes"))], printed[:1])


def test_the_plan_of_less_memory_has_all_lines() -> None:
    shown = block("out-of-core.md", r"Limit \d")
    assert len(shown) == 7, shown
    reasons = [line.partition(": ")[2].removesuffix(".") for line in shown[4:6]]
    printed = MemoryPlan(
        limit=5, least=4, outside=2, room=3, whole=9, read=3, written=2, read_rate=1.0, write_rate=1.0,
        blocks={kind: 1 for kind in KINDS if kind in shown[1]}, compute_seconds=1.0, seconds=6.0,
        measured_seconds=6.0, measured_read=3, measured_written=2, late_step=reasons[0],
        recomputed=Recomputed(reason=reasons[1]),
    )  # fmt: skip
    check(shown, str(printed).splitlines())
