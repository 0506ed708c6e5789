"""Two comparisons side by side: two machines, or two weeks."""

from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.figures import change, is_different
from carme_runtime.compare.results import Result, Row
from carme_runtime.graph.show import columns

_HEAD = ("contestant", "network", "ranks", "before ms", "after ms", "after/before", "95 % interval", "")


def difference(before: Result, after: Result) -> str:
    """A table of the rows that both have, and what only one has. Raises CompareError: they share none."""
    first, second = _by_key(before), _by_key(after)
    shared = [key for key in first if key in second]
    if not shared:
        raise CompareError(
            "The two results share no row with figures.", "Compare with the same networks and ranks."
        )
    rows: list[tuple[str, ...]] = [_HEAD]
    for key in shared:
        earlier, later = first[key], second[key]
        found = change([turn.ms for turn in earlier.used], [turn.ms for turn in later.used])
        state = "slower" if found.low > 1 else "faster"
        rows.append(
            (
                earlier.contestant,
                earlier.network,
                str(earlier.ranks),
                f"{earlier.step.median:.2f}",
                f"{later.step.median:.2f}",
                f"{found.median:.3f}",
                found.interval(3),
                state if is_different(found) else "level",
            )
        )
    parts = [*_circumstances(before, after), "", columns(rows, left=2)]
    for title, keys in (("before", first.keys() - second.keys()), ("after", second.keys() - first.keys())):
        names = sorted(f"{name} with {network} on {ranks}" for name, network, ranks, _ in keys)
        parts += [f"only {title}: {', '.join(names)}"] if names else []
    return "\n".join(parts) + "\n"


def _by_key(result: Result) -> dict[tuple[str, str, int, int], Row]:
    return {(row.contestant, row.network, row.ranks, row.batch): row for row in result.measured}


def _circumstances(before: Result, after: Result) -> list[str]:
    """What is not the same, apart from the times."""
    earlier, later = (
        {name: str(value) for name, value in result.environment.items() if name not in ("load", "job")}
        | {"data": str(result.options.get("data", "digits"))}
        | {"input": str(result.options.get("input", "memory"))}
        | {name: str(result.options.get(name) or "") for name in ("size", "width")}
        | {f"version of {name}": version for row in result.rows for name, version in row.versions.items()}
        for result in (before, after)
    )
    names = [
        name for name in dict.fromkeys([*earlier, *later]) if earlier.get(name, "") != later.get(name, "")
    ]
    lines = [f"{name}: {earlier.get(name) or 'none'} -> {later.get(name) or 'none'}" for name in names]
    return [f"before: {before.created}", f"after: {after.created}", *lines]
