"""Labels whose number stays bounded, whatever users and sites do."""

from collections.abc import Mapping

__all__ = ["MOST", "REMAINDER", "Bounded", "largest"]

MOST = 200  # values of a label that grows with users, accounts or the site's configuration
REMAINDER = "(others)"


class Bounded:
    """Keeps the first `most` names; all later ones are `(others)`. For counters, whose series must stay."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: set[str] = set()

    def name(self, name: str) -> str:
        """The label's value for a name."""
        if name in self._known or len(self._known) < self._most:
            self._known.add(name)
            return name
        return REMAINDER


def largest(sizes: Mapping[str, tuple[float, ...]], most: int = MOST) -> dict[str, str]:
    """The label's value for each name: the `most` largest keep theirs. For gauges, made anew each time."""
    ordered = sorted(sizes, key=lambda name: (sizes[name], name), reverse=True)
    return {name: name if place < most else REMAINDER for place, name in enumerate(ordered)}
