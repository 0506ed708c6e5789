"""The net as its user writes it, checks it, draws it and starts it."""

import os
from pathlib import Path
from typing import Any

from carme_runtime.petri.checks import Finding, check
from carme_runtime.petri.control import Attached
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.draw import Drawing, draw
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.model import parse_needs
from carme_runtime.petri.run import Run
from carme_runtime.petri.scripts import net_of


class Net(Definition):
    """A Petri net whose transitions are Python functions and programs."""

    def check(self) -> list[Finding]:
        """What is wrong with the net, before it runs; an empty list where nothing is."""
        return check(self)

    def start(
        self,
        workers: Any = "here",
        *,
        folder: str | os.PathLike[str] | None = None,
        offers: str = "",
        checked: bool = True,
        resume: bool = False,
        memory: int | str | None = None,
        spill: str | os.PathLike[str] | None = None,
    ) -> Run:
        """Start a run.

        Args:
            workers: "here" for one process per processor of this program, "job" for those of all nodes of
                the job that it runs in, "job:4" for four on each of them, their number, a client of Dask's
                `distributed`, or `SlurmJobs`: then functions run on its cluster or as jobs, but for those
                that use ranges.
            folder: For the journal; default a new one named after the net in the working directory.
            offers: Resources of each node for transitions with `needs`, such as "gpu:2".
            checked: Refuse a net in which `check` finds something.
            resume: Go on with the run of the folder, if there is one; `run.resumed` says so.
            memory: What ranges may take of each node's shared memory, such as "8GiB"; default half of
                what is free.
            spill: A folder on a large, quick disk for ranges beyond that; default one in the run's folder.

        Raises:
            PetriError: The net has findings, or the folder a run of its own.
        """
        findings = self.check() if checked else []
        if findings:
            more = f" (and {len(findings) - 1} more: see net.check())" if len(findings) > 1 else ""
            raise PetriError(findings[0].sentence + more, "Change the net, or start it with checked=False.")
        return Run(self, workers, folder, parse_needs(offers), resume, memory, spill)

    @staticmethod
    def resume(
        folder: str | os.PathLike[str],
        *,
        net: "Net | None" = None,
        workers: Any = "here",
        offers: str = "",
        memory: int | str | None = None,
        spill: str | os.PathLike[str] | None = None,
    ) -> Run:
        """Go on with a run whose program has ended, however it ended.

        Args:
            folder: The run's.
            net: The net; by default the script that started the run is read again, as a module (what
                stands under `if __name__ == "__main__":` does not run).
            workers: As for `start`.
            offers: As for `start`.
            memory: As for `start`.
            spill: As for `start`.

        Raises:
            PetriError: There is no run, another program has it, or its net is not to be found.
        """
        if not (Path(folder) / "journal").exists():
            raise PetriError(f"There is no run in {folder}.", "Name the folder that run.folder holds.")
        return (net or net_of(Path(folder), Net)).start(
            workers,
            folder=folder,
            offers=offers,
            checked=False,
            resume=True,
            memory=memory,
            spill=spill,
        )

    @staticmethod
    def attach(folder: str | os.PathLike[str]) -> Attached:
        """The run that another program on this node has: look at it, and put tokens.

        Raises:
            PetriError: No program runs it here now.
        """
        return Attached(folder)

    def draw(self) -> Drawing:
        """The net as SVG; notebooks show it."""
        return draw(self)

    def to_pnml(self) -> str:
        """The net in the Petri Net Markup Language; functions are not part of it."""
        from carme_runtime.petri.pnml import to_pnml  # few nets need XML

        return to_pnml(self)

    @staticmethod
    def from_pnml(text: str) -> "Net":
        """A net from its markup; give its transitions functions with `bind`.

        Raises:
            PetriError: It is no such net.
        """
        from carme_runtime.petri.pnml import from_pnml

        return from_pnml(text, Net)
