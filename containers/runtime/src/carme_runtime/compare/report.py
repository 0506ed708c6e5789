"""The report of a comparison: one page that needs no other file and no internet; and text for a terminal."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from carme_runtime.compare import checks, drawings
from carme_runtime.compare.figures import Estimate, is_different
from carme_runtime.compare.images import DATA
from carme_runtime.compare.networks import NETWORKS
from carme_runtime.compare.results import DISTURBED, UNCERTAIN, VOID, Result, Row
from carme_runtime.compare.stored import COLD, MEMORY, WARM
from carme_runtime.compare.tasks import network_for
from carme_runtime.compare.verdict import Standing, counted, overall, sentences, standings, titled
from carme_runtime.graph.show import columns
from carme_runtime.out_of_core.sizes import show_size

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
body { overflow-wrap: anywhere; }
h1 { line-height: 1.2; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
td:first-child, td.text { white-space: normal; min-width: 9rem; }
td.text { text-align: left; }
svg { max-width: 100%; height: auto; }
nav ul { columns: 14rem; padding-left: 1.2rem; }
dt { font-weight: bold; }
dd { margin: 0 0 0.3rem 1rem; }
.verdict { font-size: 1.1rem; border-left: 4px solid #4c78a8; padding-left: 1rem; list-style: none; }
.verdict li { margin: 0.4rem 0; }
.scroll { overflow-x: auto; overflow-wrap: normal; }
@media print {
  :root { color-scheme: light; }
  body { max-width: none; margin: 0; font-size: 11px; }
  nav { display: none; }
  h2, h3 { break-after: avoid; }
  svg, tr, li, dd { break-inside: avoid; }
  .scroll { overflow: visible; }
  th, td { padding: 0.15rem 0.35rem; white-space: normal; min-width: 0; }
}
"""
_HEAD = (
    "contestant", "ms a step", "95 % interval", "predicted", "samples/s", "against the fastest", "speed-up",
    "s to half the loss", "start s", "memory", "J a step", "lines", "state",
)  # fmt: skip
#: Where steps take their batches from.
_INPUTS = {
    MEMORY: "Batches are in memory before the first turn, so no turn reads files, and none waits for a disk.",
    WARM: "Each step reads its batch from a file of its rank, which the kernel has in memory (warm): all of "
    "it is read before each turn.",
    COLD: "Each step reads its batch from a file of its rank, and the kernel has nothing of it in memory "
    "(cold): it lets go of all of it before each step, which is checked. A file server may still have it.",
}
_ENDS = (
    ("void", "Void"), ("disturbed", "Disturbed turns"), ("how", "How this was measured"),
    ("machine", "Machine and versions"),
)  # fmt: skip


def page(result: Result) -> str:
    """The report as HTML."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Comparison of frameworks</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        "<main><h1>Comparison of frameworks</h1>",
        f"<p>{escape(_conditions(result))}</p>",
        '<ul class="verdict">',
        *(f"<li>{escape(sentence)}</li>" for sentence in sentences(result)),
        "</ul>",
        *_contents(result),
        *_overall(result),
        *_words(result),
    ]
    for network in result.networks():
        parts += _network(result, network)
    parts += [
        *_void(result),
        *_disturbed(result),
        *_method(result),
        *_environment(result),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _words(result: Result) -> list[str]:
    """What the verdict and the tables mean with some of theirs."""
    limit = max((row.limit_percent for row in result.rows), default=0.0)
    words = {
        "rank": "one of the processes that train a network together; each has cores of its own.",
        "step, round": "a step trains one batch. In each round every contestant has a turn of some steps.",
        "row": "one contestant with one network on one number of ranks.",
        "measured": "a row whose figures count.",
        "level": "not measurably slower than the fastest: with this machine's noise it may be as fast.",
        "uncertain": f"a row whose median is known less exactly than {limit:g} % to either side.",
        "disturbed": "a turn beside which something else used the machine, or a row of such turns.",
        "void": "a row without figures: it is not installed, or it did other work. The reason is below.",
    }
    if not limit:
        del words["uncertain"]
    listed = (f"<dt>{name}</dt><dd>{escape(meaning)}</dd>" for name, meaning in words.items())
    return ["<h2>Words</h2>", "<dl>", *listed, "</dl>"]


def _contents(result: Result) -> list[str]:
    places = [*((_anchor(name), titled(name)) for name in result.networks()), *_ENDS]
    links = (f'<li><a href="#{place}">{escape(title)}</a></li>' for place, title in places)
    return ['<nav aria-label="Contents"><ul>', *links, "</ul></nav>"]


def _anchor(network: str) -> str:
    return escape(f"network-{network}")


def _overall(result: Result) -> list[str]:
    """A bar for each contestant over all networks; one network has bars of its own."""
    places, most = overall(result), max(result.ranks(), default=0)
    if len(places) < 2 or len(result.networks()) < 2:
        return []
    colors = {row.title: _colors(result)[row.contestant] for row in result.rows}
    bars = [
        (place.title, colors[place.title], Estimate(place.behind, place.behind, place.behind, False))
        for place in places
    ]
    title = f"Time of a step over all networks on {counted(most)}"
    return [
        f"<h2>{title}</h2>",
        "<p>As a multiple of the fastest one's, in the geometric mean. Shorter is better.</p>",
        drawings.bars(bars, "times", f"{title}, as a multiple of the fastest one's"),
    ]


def text(result: Result) -> str:
    """The verdict and the tables for a terminal."""
    parts = [*sentences(result), ""]
    for network in result.networks():
        for ranks in result.ranks():
            standing = standings(result, network, ranks)
            if standing:
                rows = _filled([_HEAD, *(_cells(each) for each in standing)])
                parts += [f"{_titled(result, network)}, {counted(ranks)}:", columns(rows, left=1), ""]
    void = [row for row in result.rows if row.status == VOID]
    parts += [f"void: {row.title}, {row.network}, {counted(row.ranks)}: {row.void}" for row in _once(void)]
    return "\n".join(parts).rstrip() + "\n"


def _conditions(result: Result) -> str:
    host, processor, cores, threads = (
        result.environment.get(name, "?") for name in ("host", "processor", "cores", "threads")
    )
    return (
        f"Training steps on {host} ({processor}, {cores} cores, {threads} for each rank), "
        f"{_moment(result.created)}, data: {result.data or 'none'}, in {_precision(result)}."
    )


def _moment(created: str) -> str:
    """When it began, for people."""
    return created.replace("T", " ").replace("+00:00", " UTC")


def _precision(result: Result) -> str:
    return str(result.environment.get("precision", "float32"))


def _titled(result: Result, name: str) -> str:
    if name not in NETWORKS or result.options.get("data", "digits") not in DATA:
        return name  # of another version
    chosen = {key: result.options[key] for key in ("data", "width") if key in result.options}
    network = network_for(name, side=result.options.get("size"), **chosen)
    shape = "x".join(map(str, network.shape))
    return f"{network.full_title} ({network.parameters() / 1e6:.2f} million parameters, samples of {shape})"


def _network(result: Result, network: str) -> list[str]:
    colors = _colors(result)
    parts = [f'<h2 id="{_anchor(network)}">{escape(_titled(result, network))}</h2>']
    for ranks in result.ranks():
        standing = standings(result, network, ranks)
        if not standing:
            continue
        shown = [(each.row.title, colors[each.row.contestant], each.row.step) for each in standing]
        batch = standing[0].row.batch
        parts += [
            f"<h3>{counted(ranks).capitalize()}, batch of {batch}</h3>",
            drawings.bars(shown, "ms", f"Time of a step with {titled(network)} on {counted(ranks)}"),
            _table(_filled([_HEAD, *(_cells(each) for each in standing)])),
        ]
        parts += _parts([each.row for each in standing])
    lines = _lines(result, network, colors)
    if lines:
        parts += [
            "<h3>Speed-up over ranks</h3>",
            drawings.curves(
                [*lines, *_predicted_lines(result, network, colors)],
                f"Speed-up over ranks with {titled(network)}",
            ),
        ]
    return parts if len(parts) > 1 else [*parts, "<p>No contestant was measured.</p>"]


def _colors(result: Result) -> dict[str, str]:
    names = dict.fromkeys(row.contestant for row in result.rows)
    return {name: drawings.COLORS[at % len(drawings.COLORS)] for at, name in enumerate(names)}


def _lines(
    result: Result, network: str, colors: dict[str, str]
) -> list[tuple[str, str, list[tuple[int, Estimate]]]]:
    found: dict[str, list[tuple[int, Estimate]]] = {}
    titles: dict[str, str] = {}
    for ranks in result.ranks():
        for standing in standings(result, network, ranks):
            if standing.speedup:
                found.setdefault(standing.row.contestant, []).append((ranks, standing.speedup))
                titles[standing.row.contestant] = standing.row.title
    return [(titles[name], colors[name], points) for name, points in found.items() if len(points) > 1]


def _predicted_lines(
    result: Result, network: str, colors: dict[str, str]
) -> list[tuple[str, str, list[tuple[int, Estimate]]]]:
    """What carme_runtime.scaling predicts from one rank, where it does."""
    found: dict[str, list[tuple[int, Estimate]]] = {}
    titles = {row.contestant: row.title for row in result.rows}
    for row in result.measured:
        if row.network == network and row.predicted:
            speedup, middle = row.predicted["speedup"], row.predicted["ms"]
            low, high = (speedup * middle / row.predicted[end] for end in ("high", "low"))
            found.setdefault(row.contestant, [(1, Estimate(1, 1, 1))])
            found[row.contestant].append((row.ranks, Estimate(speedup, low, high)))
    return [(f"predicted: {titles[name]}", colors[name], points) for name, points in found.items()]


def _cells(standing: Standing) -> tuple[str, ...]:
    row, behind, faster = standing.row, standing.behind, standing.speedup
    step = row.step
    against = "fastest"
    if behind:
        level = "" if is_different(behind) else ", level"
        against = f"{behind.median:.2f} ({behind.interval(2)}{level})"
    return (
        row.title,
        f"{step.median:.2f}",
        step.interval(2),
        "{ms:.2f} ({low:.2f} to {high:.2f})".format(**row.predicted) if row.predicted else "",
        f"{row.rate.median:.0f}",
        against,
        f"{faster.median:.2f}" if faster and row.ranks > 1 else "",
        f"{row.half_loss_s.median:.3g}" if row.half_loss_s else "",
        f"{row.start_s:.1f}",
        show_size(row.peak_bytes) if row.peak_bytes else "",
        f"{row.joules:.3g}" if row.joules is not None else "",
        str(row.user_lines),
        row.status if row.status in (DISTURBED, UNCERTAIN) else "",
    )


def _filled(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without the columns in which no row has anything."""
    full = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
    return [tuple(row[at] for at in full) for row in rows]


def _parts(rows: Sequence[Row]) -> list[str]:
    """Where the time of a step goes, of those that can say so."""
    able = [row for row in rows if row.parts_ms]
    if not able:
        return []
    names = list(dict.fromkeys(name for row in able for name in row.parts_ms))
    head = ("ms a step", *names, "rest")
    cells = [
        (
            row.title,
            *(f"{row.parts_ms[name]:.2f}" if name in row.parts_ms else "" for name in names),
            f"{max(row.step.median - sum(row.parts_ms.values()), 0):.2f}",
        )
        for row in able
    ]
    return [_table([head, *cells])]


def _once(rows: Sequence[Row]) -> list[Row]:
    """One row of those that are void for the same reason with all networks and ranks."""
    seen: dict[tuple[str | int, ...], Row] = {}
    for row in rows:
        where = () if row.void.startswith("not installed") else (row.network, row.ranks)
        seen.setdefault((row.contestant, row.void, *where), row)
    return list(seen.values())


def _void(result: Result) -> list[str]:
    rows = _once([row for row in result.rows if row.status == VOID])
    if not rows:
        return [_headed("void"), "<p>Nothing: all did the same work.</p>"]
    cells = [
        (
            row.title,
            *(("all", "all") if row.void.startswith("not installed") else (row.network, str(row.ranks))),
            row.void or "no turn was made",
        )
        for row in rows
    ]
    return [_headed("void"), _table([("contestant", "network", "ranks", "why"), *cells], texts=(3,))]


def _disturbed(result: Result) -> list[str]:
    rows = [row for row in result.measured if checks.marked(row.turns)]
    if not rows:
        return [_headed("disturbed"), "<p>None.</p>"]
    cells = []
    for row in rows:
        first = next(turn for turn in row.turns if turn.reasons)
        state = "used, as too few others are left" if row.status == DISTURBED else "left out"
        count = f"{checks.marked(row.turns)} of {len(row.turns)}"
        cells.append((row.title, row.network, str(row.ranks), count, state, f"{'; '.join(first.reasons)}"))
    head = ("contestant", "network", "ranks", "turns", "they are", "the first one")
    return [_headed("disturbed"), _table([head, *cells], texts=(4, 5))]


def _method(result: Result) -> list[str]:
    tolerance = f"{checks.TOLERANCES[_precision(result)]:g}"
    gradients = ""  # results of earlier versions have none
    if any(row.gradients for row in result.rows):
        gradients = (
            ", as do the gradients of the first step over all ranks, weight by weight: to "
            f"{checks.GRADIENT_TOLERANCES[_precision(result)]:g} of each, beyond what rounding decides"
        )
    foreign, slow = f"{100 * checks.FOREIGN_LIMIT:.0f} %", f"{100 * checks.PROBE_LIMIT:.0f} %"
    points = (
        "All contestants train the same network from the same weights with the same batches by SGD with "
        f"momentum. Their first losses agree to {tolerance}, and the very first one with what is computed "
        f"without any framework{gradients}; otherwise a row is void.",
        _INPUTS[str(result.options.get("input", MEMORY))],
        "All are started before the first turn and take turns in rounds, in an order that is drawn anew "
        "for each round. Each rank has cores of its own. The first step of a turn is not timed.",
        "Between all turns a probe of known work runs on all cores. A turn is disturbed if other processes "
        f"had more than {foreign} of its cores, or if a probe beside it took {slow} longer than usual, or "
        "if heat slowed a processor of the first node down meanwhile, where the kernel counts that. "
        "Disturbed turns are repeated. If they stay disturbed they are left out, or used and marked where "
        "fewer than three others are left.",
        "Rows whose medians are not known well enough (option limit, in percent to either side) get further "
        "rounds, and are marked “uncertain” if that does not help.",
        "Figures are medians of turns with 95 % intervals: of the order of five turns or more, and by "
        "Student's t of fewer; one that goes on beyond its picture ends with an arrow. "
        "Two contestants are compared round by round. Where most rows of a network are "
        "uncertain, the few others had luck, too: trust none of them to the limit.",
        "Predicted is what carme_runtime.scaling expects of a step, from a probe of some seconds on one rank "
        "and of the links between the ranks, with an interval that is to hold 8 of 10 runs.",
        "The time to half the loss is that of the steps after which the mean loss over all batches was "
        "at most half of the first loss. It is empty, or has no column, where the comparison made too few "
        "steps for that.",
        "Lines are those that a user writes to train like this, without the network and its data. Start is "
        "the time from the command to ranks that are ready for their first step. Memory is the most that a "
        "rank had at once. J a step is the energy that the first node's processors (RAPL) and GPUs (NVML) "
        "drew meanwhile, for all programs; it has no column where these counters cannot be read.",
    )
    return [_headed("how"), "<ul>", *(f"<li>{point}</li>" for point in points), "</ul>"]


def _environment(result: Result) -> list[str]:
    found: dict[str, Any] = {**result.environment, "seed": result.seed}
    if "least_mhz" in result.noise:
        found["clocks"] = f"{result.noise['least_mhz']:.0f} to {result.noise['most_mhz']:.0f} MHz"
    requested = {name: value for name, value in result.options.items() if value not in (None, "", {})}
    found |= {f"option {name}": _option(value) for name, value in requested.items()}
    versions = {name: version for row in result.rows for name, version in row.versions.items()}
    found |= {f"version of {name}": version for name, version in sorted(versions.items())}
    rows = [(name, str(value)) for name, value in found.items() if value != ""]
    return [_headed("machine"), _table([("what", "value"), *rows], texts=(1,))]


def _headed(place: str) -> str:
    return f'<h2 id="{place}">{dict(_ENDS)[place]}</h2>'


def _option(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(rows: Sequence[tuple[str, ...]], texts: Iterable[int] = ()) -> str:
    left = set(texts)

    def cells(row: tuple[str, ...], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if at in left else ''}>{escape(cell)}</{tag}>"
            for at, cell in enumerate(row)
        )

    head, *body = rows
    lines = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
    # With the keyboard one can scroll only what can be focused.
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="Table: {escape(head[0])}">'
        f"<table><thead><tr>{cells(head, 'th')}</tr></thead>\n<tbody>{lines}</tbody></table></div>"
    )
