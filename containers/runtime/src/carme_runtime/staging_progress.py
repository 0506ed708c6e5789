"""How far a copy to the nodes of a job is, in a notebook: a bar for each node, drawn again as events come."""

import json
import re
import sys
from html import escape
from typing import Any

from carme_runtime.graph.show import size_text
from carme_runtime.wording import translate

__all__ = ["StagingProgress"]

_LINE = re.compile(r"(?:\[rank (\d+)\] )?(.*)", re.DOTALL)


class StagingProgress:
    """What the events of `carme data copy --json` on each node come to; other lines are printed as they are.

    Where there is no notebook, only the result is printed.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, dict[str, Any]] = {}
        self._rest = ""
        self._handle: Any = None
        self._notebook = False

    def __enter__(self) -> "StagingProgress":
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        self._notebook = hasattr(get_ipython(), "kernel")
        if self._notebook:
            self._handle = display(self, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._rest:
            self.feed("\n")
        if not self._notebook:
            print(self, flush=True)

    def feed(self, text: str) -> None:
        """Take a part of the output."""
        *lines, self._rest = (self._rest + text).split("\n")
        changed = False
        for line in lines:
            changed = self._take(line) or changed
        if changed and self._handle is not None:
            self._handle.update(self)

    def _take(self, line: str) -> bool:
        """Take a line; whether it says how far a node is."""
        found = _LINE.fullmatch(line)
        assert found is not None
        try:
            event = json.loads(found[2])
            kind = event["event"]
        except (ValueError, TypeError, KeyError):
            print(line, flush=True)
            return False
        node = int(found[1] or 0) + 1
        if kind == "problem":
            problem = f"{_name(node)}: {event.get('path')}: {event.get('reason')}"
            print(problem, file=sys.stderr, flush=True)
        if kind not in ("progress", "end"):
            return False
        self.nodes[node] = event
        return True

    def __repr__(self) -> str:
        return "\n".join(f"{_name(node)}: {_words(event)}" for node, event in sorted(self.nodes.items()))

    def _repr_html_(self) -> str:
        rows = []
        for node, event in sorted(self.nodes.items()):
            share = _share(event)
            value = "" if share is None else f' value="{share:.3f}"'
            name = escape(translate("Node {number}", number=node))
            bar = f'<progress aria-label="{name}"{value}></progress>'
            rows.append(f"<tr><th>{name}</th><td>{bar}</td><td>{escape(_words(event))}</td></tr>")
        return (
            f"<table>{''.join(rows)}</table>"
            if rows
            else f"<p>{escape(translate('Looking at the source'))}</p>"
        )


def _name(node: int) -> str:
    return translate("node {number}", number=node)


def _done(event: dict[str, Any]) -> int:
    return int(event.get("bytes_copied", 0)) + int(event.get("bytes_unchanged", 0))


def _share(event: dict[str, Any]) -> float | None:
    """The part that is there, 0 to 1; None: how much there is in all is not known yet."""
    if event["event"] == "end":
        return 1.0
    total = event.get("total_bytes")
    return min(1.0, _done(event) / total) if total else None


def _words(event: dict[str, Any]) -> str:
    files = int(event.get("copied", 0)) + int(event.get("unchanged", 0))
    parts = [translate("{files} files", files=files), size_text(_done(event))]
    if event["event"] == "end":
        copied, seconds = size_text(int(event.get("bytes_copied", 0))), float(event.get("seconds", 0))
        parts.append(translate("{size} of it copied in {seconds:.1f} s", size=copied, seconds=seconds))
        text = ", ".join(parts)
        return text if event.get("ok") else translate("{text}; not complete", text=text)
    share = _share(event)
    if share is not None:
        parts.insert(0, f"{100 * share:.0f} %")
    parts.append(f"{size_text(int(event.get('bytes_per_second') or 0))}/s")
    left = event.get("seconds_left")
    if left is not None:
        parts.append(translate("{seconds:.0f} s left", seconds=float(left)))
    return ", ".join(parts)
