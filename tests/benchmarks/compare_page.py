"""Makes the page of the comparison of frameworks from the result of one run of `carme compare`.

    python tests/benchmarks/compare_page.py compare/compare.json --command "carme submit -- carme compare" \\
        --machine "two servers with 16 cores (AMD EPYC) each; beside it nothing"

It replaces what stands on docs/benchmarks/compare.md between `<!-- run -->` and `<!-- end of the run -->`:
date, command, machine, noise, and the table. Beside the page it writes the result and its report, and the
picture: a step of the last network on the most ranks. Command and machine stay as they are unless given. Then
it prints what the conclusions, which a person writes, rest on. A test fails where these files are of
different runs.
"""

import argparse
import re
import shutil
import sys
from datetime import datetime
from pathlib import Path

from carme_runtime.compare import Result, load, report
from carme_runtime.compare.networks import NETWORKS
from carme_runtime.compare.results import UNCERTAIN, Row
from carme_runtime.compare.verdict import counted, sentences, standings, titled
from carme_runtime.errors import CarmeRuntimeError

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, NAME, PICTURE = "benchmarks/compare.md", "benchmarks/compare-demo", "pictures/compare-steps.svg"
BEGIN, END = "<!-- run -->\n", "<!-- end of the run -->\n"
_INK = "#222"  # pictures of pages stand on white, those of reports in the reader's colours


def main() -> None:
    """Write page, report and picture, and keep the result beside them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("result", type=Path, help="compare.json of the run")
    options.add_argument("--command", help="that made it, as a reader would type it")
    options.add_argument("--machine", help="what it ran on, and what else ran there")
    options.add_argument("--docs", type=Path, default=DOCS, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    try:
        result = load(arguments.result)
    except CarmeRuntimeError as error:
        sys.exit(f"compare_page: {error}")
    if not result.measured:
        sys.exit(f"compare_page: {arguments.result} has no measured row. Give the result of another run.")
    write(result, arguments.docs, arguments.command, arguments.machine)
    recorded = arguments.docs / f"{NAME}.json"
    if arguments.result.resolve() != recorded.resolve():
        shutil.copyfile(arguments.result, recorded)
    print("\n".join(grounds(result)))


def write(result: Result, docs: Path, command: str | None = None, machine: str | None = None) -> None:
    """Write page, report and picture."""
    page = docs / PAGE
    text = page.read_text()
    block = block_of(text)
    command, machine = (
        command or current_line(block, "command", "`"),
        machine or current_line(block, "machine", ""),
    )
    before, after = text.split(BEGIN, 1)[0], text.split(END, 1)[1]
    page.write_text(before + BEGIN + run(result, command, machine) + END + after)
    (docs / f"{NAME}.html").write_text(report.page(result))
    (docs / PICTURE).write_text(picture(result))


def block_of(page: str) -> str:
    """What is between the marks. Raises SystemExit where they are missing."""
    begin, end = page.find(BEGIN), page.find(END)
    if not 0 <= begin < end:
        sys.exit(f"compare_page: {PAGE} lacks {BEGIN.strip()} or {END.strip()} after it. Write both there.")
    return page[begin + len(BEGIN) : end]


def current_line(block: str, name: str, quote: str) -> str:
    """A line of the page as it is. Raises SystemExit where it has none."""
    found = re.search(rf"^- {name}: {quote}(.+?){quote}$", block, re.MULTILINE)
    if not found:
        sys.exit(f"compare_page: {PAGE} names no {name} yet. Give --{name}.")
    return found[1]


def run(result: Result, command: str, machine: str) -> str:
    """The part of the page that is of the run."""
    began = datetime.fromisoformat(result.created)
    network, most = result.networks()[-1], max(result.ranks())
    lines = [
        f"- date: {began.day} {began:%B %Y}",
        f"- command: `{command}`",
        f"- machine: {machine}",
        f"- work: {work(result)}",
        f"- noise: {noise(result)}",
        "",
        f"Milliseconds a step, medians of turns, in italics where they are uncertain; sorted by "
        f"{name_of(network)} on {counted(most)}:",
        "",
        *table(result),
        "",
        f"![Time of a step of {name_of(network)} on {counted(most)}, by contestant, with 95 % intervals]"
        f"(../{PICTURE})",
    ]
    return "\n".join(lines) + "\n"


def work(result: Result) -> str:
    """What is trained."""
    batches = {name: result.of(name, min(result.ranks()))[0].batch for name in measured_networks(result)}
    listed = ", ".join(f"{size} for {name_of(name)}" for name, size in batches.items())
    scaling = result.options.get("scaling", "strong")
    precision = result.environment.get("precision", "float32")
    return (
        f"{result.data or 'no data'}, a batch of {listed} ({scaling} scaling), {precision}; all contestants "
        "begin with the same weights"
    )


def noise(result: Result) -> str:
    """How quiet the machine was."""
    return sentences(result)[-1].rstrip(".")


def name_of(network: str) -> str:
    """As it is usually called, without its size."""
    return NETWORKS[network].title.partition(" of ")[0] if network in NETWORKS else network


def measured_networks(result: Result) -> list[str]:
    """Those with figures on the fewest ranks."""
    return [name for name in result.networks() if result.of(name, min(result.ranks()))]


def table(result: Result) -> list[str]:
    """A row for each contestant, the fastest first: the last network on the most ranks counts."""
    network, most = result.networks()[-1], max(result.ranks())
    columns = [(name, ranks) for name in result.networks() for ranks in result.ranks()]
    rows = {
        (row.contestant, row.network, row.ranks): row
        for name, ranks in columns
        for row in result.of(name, ranks)
    }
    order = [each.row for each in standings(result, network, most)]
    unranked = dict.fromkeys(key[0] for key in rows if key[0] not in {row.contestant for row in order})
    order += [next(row for key, row in rows.items() if key[0] == name) for name in unranked]
    head = ["contestant", *(f"{name_of(name)}, {counted(ranks)}" for name, ranks in columns)]
    head += [f"start on {counted(most)}", "memory of a rank", "lines"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in order:
        cells = [step(rows.get((row.contestant, name, ranks))) for name, ranks in columns]
        peak = max(each.peak_bytes for key, each in rows.items() if key[0] == row.contestant)
        memory = f"{peak / 2**20:.0f} MiB" if peak else ""
        cells = [row.title, *cells, f"{row.start_s:.1f} s", memory, str(row.user_lines)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def step(row: Row | None) -> str:
    """Its time as a cell."""
    if row is None:
        return "void"
    time = f"{row.step.median:.1f} ms"
    return f"*{time}*" if row.status == UNCERTAIN else time


def picture(result: Result) -> str:
    """Of the report, on white, for pages that are shown in other colours."""
    label = f"Time of a step with {titled(result.networks()[-1])} on {counted(max(result.ranks()))}"
    drawings = re.findall(r"<svg.*?</svg>", report.page(result), re.DOTALL)
    (found,) = [each for each in drawings if f'aria-label="{label}"' in each]
    head, rest = found.replace("currentColor", _INK).split("\n", 1)
    return f'{head}<rect width="100%" height="100%" fill="white"/>\n{rest}'


def grounds(result: Result) -> list[str]:
    """What conclusions rest on: the verdict, and how each compares with the fastest."""
    lines = [*sentences(result), ""]
    for network in result.networks():
        for ranks in result.ranks():
            lines.append(f"{name_of(network)} on {counted(ranks)}, times the step of the fastest:")
            for each in standings(result, network, ranks):
                behind = each.behind
                interval = f"{behind.median:.2f} ({behind.interval(2)})" if behind else "fastest"
                lines.append(f"  {each.row.title}: {interval}")
    return lines


if __name__ == "__main__":
    main()
