"""The net as its user writes it."""

import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.model import Flow, Place, Transition, parse_needs

if TYPE_CHECKING:
    from carme_runtime.petri.checks import Finding
    from carme_runtime.petri.control import Attached
    from carme_runtime.petri.draw import Drawing
    from carme_runtime.petri.run import Run

Function = TypeVar("Function", bound=Callable[..., Any])

_CLASS = type  # `place` has a parameter of that name

#: Every net that this process has made: resuming runs the script of a run and finds its net here.
nets: "weakref.WeakSet[Net]" = weakref.WeakSet()


class Net:
    """A Petri net whose transitions are Python functions and programs."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise PetriError(f"'{name}' is no name of a net.", "Use letters, digits, '-', '_' and '.'.")
        self.name = name
        caller = sys._getframe(1).f_globals
        #: The module and the file that made it, for who resumes a run of it.
        self.origin: tuple[str, str] = (caller.get("__name__", ""), caller.get("__file__") or "")
        self.places: dict[str, Place] = {}
        self.transitions: dict[str, Transition] = {}
        nets.add(self)

    def place(
        self,
        name: str,
        type: type = object,
        *,
        capacity: int | None = None,
        tokens: Iterable[Any] = (),
        entry: bool = False,
    ) -> Place:
        """Add a place.

        Args:
            name: Unique in the net; commands use it as `{name}`.
            type: What its tokens are instances of.
            capacity: The most tokens that it holds; transitions wait for room.
            tokens: Those that it has when a run starts.
            entry: The program puts tokens here, although a transition does too.

        Raises:
            PetriError: The name is taken, the capacity too small, or a token of another type.
        """
        if name in self.places:
            raise PetriError(f"Net {self.name} has a place {name} already.", "Choose another name.")
        if not name.isidentifier():
            raise PetriError(f"'{name}' is no name of a place.", "Use letters, digits and '_'.")
        if not isinstance(type, _CLASS):
            raise PetriError(f"The type of place {name} is {type!r}, which is no class.", "Give a class.")
        place = Place(name, type, capacity, tuple(tokens), entry, len(self.places))
        if capacity is not None and capacity < max(1, len(place.tokens)):
            raise PetriError(
                f"Place {name} has a capacity of {capacity}.", "Give at least 1, and enough for its tokens."
            )
        for refusal in filter(None, map(place.refusal, place.tokens)):
            raise PetriError(refusal, "Give tokens of the place's type.")
        self.places[name] = place
        return place

    @overload
    def transition(
        self,
        flow: Flow,
        /,
        *,
        name: str = "",
        guard: Callable[..., Any] | None = None,
        priority: int = 0,
        retries: int = 0,
        needs: str = "",
    ) -> Callable[[Function], Function]: ...

    @overload
    def transition(
        self,
        command: str | Sequence[str],
        flow: Flow,
        /,
        *,
        name: str = "",
        guard: Callable[..., Any] | None = None,
        priority: int = 0,
        retries: int = 0,
        needs: str = "",
        gives: str | Sequence[str] = "{stdout}",
    ) -> Transition: ...

    def transition(self, first: Any, second: Any = None, /, **options: Any) -> Any:
        """Add a transition: decorate a function, or give a command and its arcs.

        Args:
            first: `inputs >> outputs`, or a command whose words may have fields such as `{mesh}`: what the
                input place of that name gives. No shell sees it.
            second: `inputs >> outputs` of a command.
            options: `name` (default: the function's or program's), `guard` (a function of the inputs; runs
                in the coordinator, so keep it quick and free of effects), `priority` (higher ones start
                first), `retries` (how often a task that fails runs again), `needs` (such as "gpu:1"), and
                for commands `gives`: the text of each output's token, default what the program printed.

        Raises:
            PetriError: Something does not fit.
        """
        if isinstance(first, Flow):
            return lambda body: self._decorate(body, first, options)
        if not isinstance(first, str | list | tuple) or not isinstance(second, Flow):
            raise PetriError(
                "A transition needs its arcs.",
                "Write @net.transition(inputs >> outputs) or net.transition('program {input}', "
                "inputs >> outputs).",
            )
        from carme_runtime.petri.commands import Command

        command = Command(first, second, options.pop("gives", "{stdout}"))
        return self.add(options.pop("name", "") or command.name, second, command, **options)

    def _decorate(self, body: Callable[..., Any], flow: Flow, options: dict[str, Any]) -> Callable[..., Any]:
        named = dict(options)
        self.add(named.pop("name", "") or getattr(body, "__name__", "transition"), flow, body, **named)
        return body

    def add(
        self,
        name: str,
        flow: Flow,
        body: Callable[..., Any] | None = None,
        *,
        guard: Callable[..., Any] | None = None,
        priority: int = 0,
        retries: int = 0,
        needs: str = "",
    ) -> Transition:
        """Add a transition by its parts; without a body it moves plain tokens.

        Raises:
            PetriError: The name is taken, or an arc goes to a place of another net.
        """
        if name in self.transitions:
            raise PetriError(
                f"Net {self.name} has a transition {name} already.", "Give it a name= of its own."
            )
        for arc in (*flow.inputs, *flow.outputs):
            if self.places.get(arc.place.name) is not arc.place:
                raise PetriError(
                    f"Place {arc.place.name} of transition {name} is not of net {self.name}.",
                    "Make it with net.place.",
                )
        if retries < 0:
            raise PetriError(f"Transition {name} has {retries} retries.", "Give 0 or more.")
        index = len(self.transitions)
        made = Transition(name, flow, None, guard, priority, retries, parse_needs(needs), index)
        made.use(body)
        self.transitions[name] = made
        return made

    def bind(self, name: str, body: Callable[..., Any]) -> None:
        """Give a transition, of an imported net for example, what it does.

        Raises:
            PetriError: There is no such transition, or the function does not fit.
        """
        if name not in self.transitions:
            raise PetriError(
                f"Net {self.name} has no transition {name}.", "Its names are in net.transitions."
            )
        self.transitions[name].use(body)

    def check(self) -> "list[Finding]":
        """What is wrong with the net, before it runs; an empty list where nothing is."""
        from carme_runtime.petri.checks import check

        return check(self)

    def start(
        self,
        workers: str | int = "here",
        *,
        folder: str | os.PathLike[str] | None = None,
        offers: str = "",
        checked: bool = True,
        resume: bool = False,
        memory: int | str | None = None,
        spill: str | os.PathLike[str] | None = None,
    ) -> "Run":
        """Start a run.

        Args:
            workers: "here" for one process per processor of this program, "job" for those of all nodes of
                the job that it runs in, or their number.
            folder: For the journal; default a new one named after the net in the working directory.
            offers: Resources of each node for transitions with `needs`, such as "gpu:2".
            checked: Refuse a net in which `check` finds something.
            resume: Go on with the run of the folder, if there is one; `run.resumed` says so.
            memory: What ranges may take of the node's shared memory, such as "8GiB"; default half of what
                is free.
            spill: A folder on a large, quick disk for ranges beyond that; default one in the run's folder.

        Raises:
            PetriError: The net has findings, or the folder a run of its own.
        """
        from carme_runtime.petri.run import Run

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
        workers: str | int = "here",
        offers: str = "",
        memory: int | str | None = None,
        spill: str | os.PathLike[str] | None = None,
    ) -> "Run":
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
        from carme_runtime.petri.scripts import net_of

        if not (Path(folder) / "journal").exists():
            raise PetriError(f"There is no run in {folder}.", "Name the folder that run.folder said.")
        return (net or net_of(Path(folder))).start(
            workers,
            folder=folder,
            offers=offers,
            checked=False,
            resume=True,
            memory=memory,
            spill=spill,
        )

    @staticmethod
    def attach(folder: str | os.PathLike[str]) -> "Attached":
        """The run that another program on this node has: look at it, and put tokens.

        Raises:
            PetriError: No program runs it here now.
        """
        from carme_runtime.petri.control import Attached

        return Attached(folder)

    def draw(self) -> "Drawing":
        """The net as SVG; notebooks show it."""
        from carme_runtime.petri.draw import draw

        return draw(self)

    def to_pnml(self) -> str:
        """The net in the Petri Net Markup Language; functions are not part of it."""
        from carme_runtime.petri.pnml import to_pnml

        return to_pnml(self)

    @staticmethod
    def from_pnml(text: str) -> "Net":
        """A net from its markup; give its transitions functions with `bind`.

        Raises:
            PetriError: It is no such net.
        """
        from carme_runtime.petri.pnml import from_pnml

        return from_pnml(text)
