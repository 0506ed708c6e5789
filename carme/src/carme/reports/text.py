"""A report as people read it: plain text for a terminal, or one page of HTML that needs nothing else."""

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple

from carme.jobs import minutes_text
from carme.reports.models import Curve, RankUse, Report, TrainingUse, Usage
from carme.scaling import outcome_text
from carme.scaling.outcomes import prediction_text
from carme.translation import Message, joined, language_shown, noop, translated
from carme.translation import message as _
from carme.wording import memory, number, size

__all__ = ["Fact", "as_html", "as_text", "facts"]

GIB = 1 << 30
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60  # of a curve in a terminal
_MOST_RANKS = 16  # that are reported one by one
_TITLES = {
    "gpu": noop("GPU: share of time in which it worked"),
    "gpu_memory": noop("GPU: memory in use"),
    "cpu": noop("Processors that worked, of those requested"),
    "memory": noop("Memory in use, of that requested"),
    "io": noop("Disks: read and written in each second"),
    "network": noop("Network: received and sent in each second"),
    "wait": noop("Training: share of time for which ranks waited"),
    "steps": noop("Training: steps in each second"),
    "samples": noop("Training: samples in each second"),
    "loss": noop("Training: loss"),
}
_FLOWS = ("io", "network")  # in bytes per second
_COLOURS = ("#1f6fb2", "#c2571a", "#2e8540", "#7a3e9d", "#a81c3a", "#00727a", "#8a6d00", "#555")


class Fact(NamedTuple):
    """Something that is known of a job, in words that `translated` renders.

    Attributes:
        title: What it is about; of a part of the job with two spaces before it.
        words: What is known.
        share: The share of it that the job used, 0 to 1, where the words are about one.
    """

    title: str
    words: str
    share: float | None = None


def identity(report: Report) -> list[Fact]:
    """Which job it is, and how it stands."""
    job = report.job
    return [
        Fact(_("Job"), f"{job.id}  {job.name}"),
        Fact(_("State"), joined([f"{job.state.lower()}{'.' if job.explanation else ''}", job.explanation])),
    ]


def facts(report: Report) -> list[Fact]:
    """What is known of it."""
    usage = report.usage
    found = [*_times(report), *_prediction(report)]
    if usage is None:
        return [*found, Fact(_("Used"), _why_unknown(report))]
    if report.trouble:
        words = _("from the accounting, without curves. {trouble}", trouble=report.trouble)
        found.append(Fact(_("Used"), words))
    if report.source == "exporters":
        words = _("{time}, while somebody watches: this site stores no metrics", time=span(usage.seconds))
        found.append(Fact(_("Seen for"), words))
    found += [*_efficiency(report), *_gpus(usage), *_nodes(usage)]
    if usage.training:
        found += _training(usage.training)
    if usage.nodes_left_out:
        found.append(Fact("", _("and {nodes}", nodes=number(usage.nodes_left_out, "more node"))))
    if report.energy_joules is not None:
        found.append(Fact(_("Energy of GPUs"), _("{energy:.3f} kWh", energy=report.energy_joules / 3.6e6)))
    return found


def _times(report: Report) -> Iterator[Fact]:
    """What the job was to have, and how long it waited and ran."""
    job = report.job
    gpus = number(job.gpus, "GPU")
    parts = [
        number(job.nodes, "node"),
        _("{gpus} ({kind})", gpus=gpus, kind=job.gpu_type) if job.gpu_type else gpus,
        number(job.cpus, "processor"),
        memory(job.memory_mb),
        minutes_text(job.minutes_limit) if job.minutes_limit else _("no time limit"),
    ]
    yield Fact(_("Requested"), joined(parts, ", "))
    if report.waited_seconds is not None:
        yield Fact(_("Waited"), span(report.waited_seconds))
    if report.ran_seconds is not None:
        yield Fact(_("Ran"), span(report.ran_seconds))


def _prediction(report: Report) -> Iterator[Fact]:
    """What was predicted of a step of training, and what came of it."""
    prediction = report.job.prediction
    if not prediction:
        return
    training = report.usage.training if report.usage else None
    yield Fact(_("Predicted"), prediction_text(prediction))
    if prediction.reason:
        yield Fact(_("Reason"), prediction.reason)
    if report.job.started is not None:
        outcome = outcome_text(prediction, training.step_seconds if training else None)
        yield Fact(_("Measured"), outcome)


def _efficiency(report: Report) -> Iterator[Fact]:
    """Shares of what the job had that it used, compared with the user's other jobs like it."""
    peers = report.peers
    for name, title, similar in (
        ("gpu", _("GPUs"), peers.gpu_busy),
        ("cpu", _("Processors"), peers.cpu),
        ("memory", _("Memory"), peers.memory),
    ):
        if name in report.efficiency:
            share = report.efficiency[name]
            words = _("{share:.0f} % used", share=100 * share)
            if similar is not None:
                words = _(
                    "{used} (your {count} similar jobs: {other:.0f} %)",
                    used=words,
                    count=peers.jobs,
                    other=100 * similar,
                )
            yield Fact(title, words, share)


def _gpus(usage: Usage) -> Iterator[Fact]:
    """Each GPU's load and memory."""
    for gpu in usage.gpus:
        memory = (
            _(
                "{used:.1f} of {most:.1f} GiB",
                used=gpu.memory_bytes / GIB,
                most=gpu.memory_total_bytes / GIB,
            )
            if gpu.memory_bytes is not None and gpu.memory_total_bytes
            else ""
        )
        yield Fact(f"  {gpu.node} GPU {gpu.gpu}", joined([f"{gpu.busy * 100:.0f} %", memory], ", "), gpu.busy)


def _nodes(usage: Usage) -> Iterator[Fact]:
    """Each node's processors, memory and disks, as far as they are known."""
    for node in usage.nodes:
        cpu = (
            _("{used:.1f} of {given:g} processors", used=node.cpus_used, given=node.cpus)
            if node.cpus_used is not None and node.cpus
            else ""
        )
        memory = (
            _(
                "{used:.1f} of {limit:.1f} GiB at most",
                used=node.memory_bytes / GIB,
                limit=node.memory_limit_bytes / GIB,
            )
            if node.memory_bytes is not None and node.memory_limit_bytes
            else ""
        )
        moved = (
            _(
                "{read} read from disks, {written} written",
                read=size(node.read_bytes),
                written=size(node.written_bytes),
            )
            if node.read_bytes is not None and node.written_bytes is not None
            else ""
        )
        if cpu or memory or moved:
            yield Fact(f"  {node.node}", joined([cpu, memory, moved], ", "))


def _training(training: TrainingUse) -> Iterator[Fact]:
    """How training went, over all ranks and on the first of them."""
    yield Fact(_("Training"), training_text(training))
    for rank in training.each[:_MOST_RANKS]:
        yield Fact(_("  {node} rank {rank}", node=rank.node, rank=rank.rank), _parts(rank))
    if len(training.each) > _MOST_RANKS:
        more = number(training.ranks - _MOST_RANKS, "more rank")
        yield Fact("", _("and {ranks}; carme report --json has them", ranks=more))


def _why_unknown(report: Report) -> str:
    """Why it is not known what the job used."""
    if report.trouble:
        return _("not known. {trouble}", trouble=report.trouble)
    if not report.monitored:
        return _("not measured: this site has no monitoring")
    if report.job.is_pending:
        return _("nothing yet: it has not started")
    if not report.job.is_over:
        return _("not known yet: the first measurements come about a minute after the start")
    return _("not known: nothing was measured, or the record is gone")


def training_text(training: TrainingUse) -> str:
    """How training went, in one line."""
    return joined([number(training.ranks, "rank"), _parts(training)], ", ")


def _parts(training: TrainingUse | RankUse) -> str:
    parts: list[str] = []
    if training.step_seconds is not None:
        parts.append(_("{seconds:.3g} s for a step", seconds=training.step_seconds))
    if training.samples_per_second is not None:
        parts.append(_("{samples:.3g} samples in a second", samples=training.samples_per_second))
    if training.data_wait is not None:
        parts.append(_("{share:.0f} % of the time waiting for data", share=100 * training.data_wait))
    if training.rank_wait is not None:
        parts.append(_("{share:.0f} % for other ranks", share=100 * training.rank_wait))
    if training.loss is not None:
        parts.append(_("last loss {loss:.4g}", loss=training.loss))
    return joined(parts, ", ")


def _curve_title(curve: Curve) -> str:
    if curve.top is None:
        return curve.name
    most = _rate(curve.top) if curve.what in _FLOWS else _("{value:.4g}", value=curve.top)
    return translated(_("{name}, at most {most}", name=curve.name, most=most))


def as_text(report: Report) -> str:
    """For a terminal."""
    rows = [(translated(fact.title), _in_text(fact)) for fact in identity(report) + facts(report)]
    width = max(len(title) for title, _value in rows)
    lines = [f"{title:<{width}}  {value}".rstrip() for title, value in rows]
    for what, title in _TITLES.items():
        curves = [curve for curve in report.curves if curve.what == what]
        if curves:
            names = max(len(_curve_title(curve)) for curve in curves)
            lines += [
                "",
                translated(_(title)),
                *(f"  {_curve_title(curve):<{names}} |{spark(curve)}|" for curve in curves[:16]),
            ]
    lines += ["", translated(_("Advice") if report.advice else _explain_no_advice(report))]
    for advice in report.advice:
        lines.append(f"- {translated(advice.text)}")
        if advice.change:
            lines.append(f"    {translated(advice.change)}")
    return "\n".join(lines)


def _explain_no_advice(report: Report) -> str:
    """Why there is no advice."""
    if not report.seen_enough:
        return _("Advice: not yet, too little of the run was seen.")
    return _("Advice: none; the job used its resources well.") if report.usage else _("Advice: none.")


def _in_text(fact: Fact) -> str:
    words = translated(fact.words)
    return words if fact.share is None else f"{bar(fact.share)} {words}"


def _details(report: Report) -> str:
    """The facts, the plots and the advice."""
    plots = "".join(
        f"{_marked('h3', _(title))}{plot([curve for curve in report.curves if curve.what == what])}"
        for what, title in _TITLES.items()
        if any(curve.what == what for curve in report.curves)
    )
    advice = "".join(
        f"<li>{_marked('span', each.text)}{_marked('pre', each.change) if each.change else ''}</li>"
        for each in report.advice
    )
    none = (
        (_("None; the job used its resources well.") if report.usage else _("None."))
        if report.seen_enough
        else _("Not yet: too little of the run was seen.")
    )
    heading = _marked("h3", _("Advice"))
    shown = f"<ul>{advice}</ul>" if advice else _marked("p", none)
    return f"{_table(facts(report))}{plots}{heading}{shown}"


def _marked(tag: str, text: str) -> str:
    """An element with a sentence in the reader's language, which it names where that is not the page's."""
    language = language_shown(text)
    named = "" if language == _language() else f' lang="{escape(language)}"'
    return f"<{tag}{named}>{escape(translated(text))}</{tag}>"


def _language() -> str:
    """The language of the page: that of its headings."""
    return language_shown(_("Advice"))


def _cell(tag: str, text: str, meter: str = "") -> str:
    """A title or value, after a meter; of figures and names alone no language is marked."""
    if not isinstance(text, Message):
        return f"<{tag}>{meter}{escape(text)}</{tag}>"
    return f"<{tag}>{meter}{_marked('span', text)}</{tag}>" if meter else _marked(tag, text)


def _table(rows: list[Fact]) -> str:
    lines = (f"<tr>{_cell('th', row.title)}{_cell('td', row.words, _meter(row))}</tr>" for row in rows)
    return f"<table>{''.join(lines)}</table>"


def _meter(fact: Fact) -> str:
    return (
        "" if fact.share is None else f'<meter max="1" value="{fact.share:.3f}" aria-hidden="true"></meter> '
    )


def as_html(report: Report) -> str:
    """One page, with plots; it loads nothing from elsewhere."""
    title = escape(translated(_("Job {number}", number=report.job.id)))
    return (
        f'<!doctype html><html lang="{_language()}"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
        "th{text-align:left;vertical-align:top;padding-right:1.5rem;font-weight:600;white-space:pre}"
        "td{white-space:pre-wrap}pre{background:#f3f3f3;padding:.4rem .6rem;margin:.2rem 0}"
        "svg{width:100%;max-width:44rem;height:auto;background:#fafafa}"
        "h3{font-size:1rem;margin:1.5rem 0 .3rem}"
        "</style></head><body>"
        f"<h1>{title}</h1>{_table(identity(report))}{_details(report)}</body></html>\n"
    )


def plot(curves: list[Curve]) -> str:
    """Curves over time as SVG, with the times in UTC below and what the height means on the left."""
    shown = curves[: len(_COLOURS)]
    bytes_moved = bool(shown) and shown[0].what in _FLOWS
    top = shown[0].top if shown else None
    height = _speed if bytes_moved else _height
    heights = [height(share, top) for share in (1.0, 0.5, 0.0)]
    wide, high, left, above = 480, 120, max(48, 14 + 7 * max(map(len, heights))), 10
    start, end = _window(shown)
    lines, names = [], []
    widest = 20 + 7 * max((len(_curve_title(curve)) for curve in shown), default=0)
    columns = max(1, int(wide // widest))
    for place, curve in enumerate(shown):
        colour = _COLOURS[place]
        part: list[str] = []
        for moment, value in enumerate([*curve.values, None]):
            if value is not None:
                x = left + wide * (curve.start + moment * curve.step - start) / (end - start)
                part.append(f"{x:.1f},{above + high - high * min(1.0, max(0.0, value)):.1f}")
            elif part:  # a gap: nothing was measured
                lines.append(
                    f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(part)}"/>'
                )
                part = []
        x, y = left + widest * (place % columns), above + high + 40 + 18 * (place // columns)
        names.append(f'<text x="{x:.0f}" y="{y}" fill="{colour}">{escape(_curve_title(curve))}</text>')
    grid = [
        f'<line x1="{left}" x2="{left + wide}" y1="{y}" y2="{y}" stroke="currentColor" opacity=".2"/>'
        f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" fill="currentColor">{words}</text>'
        for words, y in zip(heights, (above, above + high // 2, above + high), strict=True)
    ]
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        moment = _clock(start + (end - start) * share, end - start) + (" UTC" if share == 1 else "")
        grid.append(
            f'<text x="{left + wide * share:.0f}" y="{above + high + 18}" text-anchor="{anchor}" '
            f'fill="currentColor">{moment}</text>'
        )
    tall = above + high + 34 + 18 * -(-len(shown) // columns)
    label = translated(
        _("From 0 to {top}: {names}", top=heights[0], names=", ".join(map(_curve_title, shown)))
    )
    label = escape(label, quote=True)
    return (
        f'<svg viewBox="0 0 {left + wide + 10} {tall + 8}" role="img" aria-label="{label}" font-size="12">'
        f"{''.join(grid)}{''.join(lines)}{''.join(names)}</svg>"
    )


def _window(curves: list[Curve]) -> tuple[float, float]:
    """The time that curves show, in seconds since 1970; never empty."""
    start = min((curve.start for curve in curves), default=0.0)
    ends = (curve.start + curve.step * (len(curve.values) - 1) for curve in curves)
    return start, max(start + 1.0, *ends, start)


def _height(share: float, top: float | None) -> str:
    return f"{share * 100:.0f} %" if top is None else translated(_("{value:.3g}", value=share * top))


def _speed(share: float, top: float | None) -> str:
    return translated(_rate(share * (top or 0.0)))


def _rate(count: float) -> str:
    return _("{size}/s", size=size(count))


def _clock(moment: float, whole: float) -> str:
    at = datetime.fromtimestamp(moment, UTC)
    return f"{at:%H:%M:%S}" if whole < 300 else f"{at:%H:%M}" if whole < 86400 else f"{at:%d %b %H:%M}"


def spark(curve: Curve) -> str:
    """A curve of ratios in one line."""
    values = curve.values
    places = min(_WIDTH, len(values))
    letters = []
    for place in range(places):
        part = values[place * len(values) // places : (place + 1) * len(values) // places]
        known = [value for value in part if value is not None]
        if not known:
            letters.append(" ")
            continue
        share = min(1.0, max(0.0, sum(known) / len(known)))
        # What is nothing and what was not measured look alike otherwise.
        letters.append("_" if share < 0.01 else _BARS[max(1, round(share * 8))])
    return "".join(letters)


def bar(share: float) -> str:
    """A ratio as ten letters."""
    full = round(min(1.0, max(0.0, share)) * 10)
    return "[" + "#" * full + "." * (10 - full) + "]"


def span(seconds: float) -> str:
    """A length of time."""
    return f"{seconds:.0f} s" if seconds < 120 else minutes_text(round(seconds / 60))
