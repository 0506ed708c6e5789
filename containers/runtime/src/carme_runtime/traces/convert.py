"""Makes archives and pages of recordings.

    python -m carme_runtime.traces.convert FOLDER RANKS FORMAT:PATH ...

`carme-run` runs this as a process of its own when a run is over, and says what to do where it could not.
"""

import sys
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.traces import page
from carme_runtime.traces.errors import TraceError
from carme_runtime.traces.recordings import SUFFIX, Recording, read, read_all

FORMATS = ("otf2", "html")


def parse(text: str) -> tuple[str, Path]:
    """Format and path of `otf2:DIR` or `html:FILE`. Raises TraceError."""
    kind, _, path = text.partition(":")
    if kind not in FORMATS or not path:
        raise TraceError(
            f"'{text}' is not a trace that can be written.",
            "Write otf2:DIR for Vampir and other readers of OTF2, or html:FILE for a page.",
        )
    return kind, Path(path)


def make(folder: Path, ranks: int, kind: str, path: Path) -> str:
    """Make one archive or page; a sentence about it. Raises TraceError, OSError."""
    if kind == "html":
        return page.write(path, read_all(folder), ranks)
    from carme_runtime.traces import archive

    records, events = archive.write(path, read_all(folder), ranks)
    return (
        f"The trace is in {path}/{archive.NAME}.otf2: {records} spans in {events} events. "
        "Vampir opens it; otf2-print lists it."
    )


def shortages(folder: Path, ranks: int) -> list[str]:
    """What is not in the recordings, a sentence for each rank."""
    heads = [read(path, 0) for path in folder.glob(f"*{SUFFIX}")]
    found: list[str] = []
    for rank in range(ranks):
        own = [each for each in heads if each.rank == rank]
        dropped = sum(each.dropped for each in own)
        if not any(each.blocks for each in own):
            found.append(f"Rank {rank} left no trace: it was killed at once, or does not use carme_runtime.")
        elif not all(each.ended for each in own if each.blocks):
            found.append(f"Rank {rank} was killed: its last events are missing in the trace.")
        if any(each.blocks and not each.clocks and _is_elsewhere(each, heads) for each in own):
            found.append(
                f"The clock of rank {rank} was not compared with that of rank 0, on another node: times "
                "between them are as exact as the clocks of the nodes."
            )
        if dropped:
            found.append(f"{dropped} events of rank {rank} had no room in the trace. Raise --trace-limit.")
    return found


def _is_elsewhere(recording: Recording, heads: list[Recording]) -> bool:
    """Whether the first rank of its start is on another node."""
    first = [each for each in heads if (each.rank, each.start) == (0, recording.start)]
    return bool(first) and recording.header["boot"] not in {each.header["boot"] for each in first}


def main() -> int:
    """The exit code: 1 where something could not be made."""
    folder, ranks, code = Path(sys.argv[1]), int(sys.argv[2]), 0
    try:
        lines = shortages(folder, ranks)
    except (CarmeRuntimeError, OSError) as error:
        print(f"carme-run: {error}", file=sys.stderr)
        return 1
    for line in lines:
        print(f"carme-run: {line}", file=sys.stderr)
    for text in sys.argv[3:]:
        try:
            kind, path = parse(text)
            print(f"carme-run: {make(folder, ranks, kind, path)}", file=sys.stderr)
        except (CarmeRuntimeError, OSError) as error:
            reason = (
                f"{text} cannot be written: {error.strerror}." if isinstance(error, OSError) else str(error)
            )
            print(f"carme-run: {reason}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
