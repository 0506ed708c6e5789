"""Metrics as Prometheus' text format, version 0.0.4 (Prometheus: exposition formats).

Prometheus and Zabbix both read it. prometheus_client's own writer, which looks at each name and value of each
sample anew, takes several times as long; this was a quarter of a scrape of a busy node.
"""

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

__all__ = ["CONTENT_TYPE", "text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_VALUE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def text(metrics: Iterable[Metric]) -> bytes:
    """These metrics, in UTF-8; what cannot be written so in a label becomes a question mark.

    Times of samples and exemplars are left out: exporters report what is now.
    """
    lines: list[str] = []
    values: dict[str, str] = {}  # as they are written: most are in many samples
    # Likewise all labels of samples that share them; kept with them, as what is gone gives its id to others.
    shared: dict[int, tuple[dict[str, str], str]] = {}
    for metric in metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        kind = "untyped" if metric.type == "unknown" else metric.type
        lines.append(f"# HELP {name} {metric.documentation.translate(_IN_HELP)}\n# TYPE {name} {kind}\n")
        for sample in metric.samples:
            known = shared.get(id(sample.labels))
            if known is None:
                known = shared[id(sample.labels)] = (sample.labels, _labels(sample.labels, values))
            lines.append(f"{sample.name}{known[1]} {floatToGoString(sample.value)}\n")
    return "".join(lines).encode("utf-8", "replace")


def _labels(labels: dict[str, str], values: dict[str, str]) -> str:
    pairs = []
    for label, value in labels.items():
        written = values.get(value)
        if written is None:
            written = values[value] = value.translate(_IN_VALUE)
        pairs.append(f'{label}="{written}"')
    return f"{{{','.join(pairs)}}}" if pairs else ""
