"""Rules by which axe checks pages, and its findings as text: for tests of the portal and of JupyterLab."""

from typing import Any

from axe_playwright_python.sync_playwright import Axe

__all__ = ["AXE", "EVERY", "FIND", "readable"]

#: The success criteria of WCAG 2.2, levels A and AA, as far as a program can judge them.
EVERY: dict[str, object] = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]},
    "resultTypes": ["violations"],
}
#: Makes `axe` in a page.
AXE = Axe().axe_script
#: What axe finds by the rules, in all of the page or in what the selectors name; for `Page.evaluate`.
FIND = """async ([rules, include]) =>
  (await axe.run(include.length ? { include: include.map(one => [one]) } : document, rules)).violations"""


def readable(found: list[dict[str, Any]]) -> list[str]:
    """Each finding in one line: the rule and the first element."""
    return [f"{finding['id']} ({finding['help']}): {finding['nodes'][0]['html'][:200]}" for finding in found]
