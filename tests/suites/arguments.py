"""The command line of `./test`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from suites.benchmarks import BENCHMARKS
from suites.demo_hosts import ON_DEMO
from suites.running import Stop, report

__all__ = ["SITES", "SUITES", "USAGE", "Request", "parse"]

SUITES = (
    "lint", "unit", "cluster", "browser", "native", "models", "security", "monitoring", "faults",
    "frameworks", "end-to-end", "sites",
)  # fmt: skip
DEFAULT = ("lint", "unit", "cluster", "browser", "security")
NEED_ROOT = ON_DEMO | {"sites"}
#: Earlier names of suites, which still work.
EARLIER = {"showings": "end-to-end"}
SITES = ("existing-22.05", "existing-26.05", "own-24.11", "own-13", "two-heads", "upgrade")
USAGE = Path(__file__).with_name("usage.txt")


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        suites: Names of suites, or `bench` alone, in the order in which they were named.
        arguments: What pytest gets, or the benchmark.
        benchmark: The name of the benchmark.
        sites: The names of sites that the suite `sites` installs.
        quick: The files of `lint --quick`; None: this is another call.
        all: Whether also what is the same as when it passed is checked; see `unchanged.py`.
        help: Only the usage is wanted.
    """

    suites: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    benchmark: str = ""
    sites: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
    all: bool = False
    help: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether whole suites run; a part of a suite runs by itself."""
        return not self.arguments

    def runs_beside_cluster(self, suite: str) -> bool:
        """Whether this suite and the cluster's are both requested, as wholes."""
        return self.is_whole and suite in self.suites and "cluster" in self.suites


def parse(words: Sequence[str]) -> Request:
    """Read the words of the command line.

    Raises:
        Stop: A name is wrong, or root is needed; with exit code 2.
    """
    if list(words[:2]) == ["lint", "--quick"]:
        return Request(("lint",), quick=tuple(words[2:]) or (".",))
    checks_all = bool(words) and words[0] == "--all"
    words = words[checks_all:]
    suites: list[str] = []
    sites: list[str] = []
    arguments: tuple[str, ...] = ()
    for place, word in enumerate(words):
        if word in ("-h", "--help"):
            return Request(help=True)
        if word == "--":
            arguments = tuple(words[place + 1 :])
            break
        if word == "bench":
            return _benchmark(words[place + 1 :])
        if word in EARLIER:
            report(f"the suite {word} is {EARLIER[word]} now. Use the new name.")
            word = EARLIER[word]
        if word in SUITES:
            suites.append(word)
        elif word in SITES:
            sites.append(word)
        else:
            choice = ", ".join(SUITES)
            raise Stop(f"there is no suite called '{word}'. Choose from {choice}, or see ./test --help.")
    if sites and "sites" not in suites:
        names = " ".join(sites)
        raise Stop(f"{names} is a site of the suite 'sites'. Use: ./test sites {names}")
    for suite in suites or DEFAULT:
        if suite in NEED_ROOT:
            _need_root(suite)
    return Request(tuple(suites) or DEFAULT, arguments, sites=tuple(sites) or SITES[:1], all=checks_all)


def _benchmark(words: Sequence[str]) -> Request:
    name = words[0] if words else ""
    if name not in BENCHMARKS:
        raise Stop(f"there is no benchmark called '{name}'. Choose from {', '.join(BENCHMARKS)}.")
    if BENCHMARKS[name].needs_root:
        _need_root(name)
    return Request(("bench",), tuple(words[1:]), benchmark=name)


def _need_root(name: str) -> None:
    if os.geteuid() != 0:
        raise Stop(f"{name} starts real hosts and needs root. Run it with sudo")
