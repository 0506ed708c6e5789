"""Named ranges of memory that tasks of a net share and that outlive them.

    @net.transition(jobs >> frames)
    def render(job, memory):
        frame = memory.allocate(f"frame-{job}", (1080, 1920, 3), "uint8")
        draw(job, frame.array())
        return frame                # a token of a few bytes; the next task maps the same memory

A range is a file in shared memory, so any program of the node can map it: `str(frame)` is its path.
"""

import contextlib
import fcntl
import math
import mmap
import os
import re
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core.sizes import parse_size
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.frames import header_of
from carme_runtime.petri.store import Description, Store, is_mapped

if TYPE_CHECKING:
    import numpy

LIFETIMES = ("task", "net", "kept")
_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
#: Bytes whose mapping ends so quickly that the next task can wait for it.
_QUICKLY_UNMAPPED = 16 << 20
#: (descriptions of what was allocated, names of what was deleted).
Changes = tuple[list[Description], list[str]]

#: The memory of runs that this process is part of, by their identities.
_known: dict[str, "Memory"] = {}


class Range:
    """A named range. As a token it is its name: tasks of the node map the same bytes.

    Attributes:
        name: By which `memory[name]` finds it.
        size: In bytes.
        lifetime: `task`, `net` or `kept`.
    """

    def __init__(self, memory: "Memory", description: Description) -> None:
        self._memory = memory
        self._description = description
        self._file = -1
        self._map: mmap.mmap | None = None
        self._deleted = False
        self.name, self.size, self.lifetime = description.name, description.size, description.lifetime

    @property
    def dtype(self) -> str:
        """Of its elements, as NumPy writes it, such as `<f4`."""
        return self._description.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it holds."""
        return self._description.shape

    @property
    def path(self) -> Path:
        """Its file, for programs: open it and map it. It has `size` bytes from its beginning.

        Raises:
            PetriError: There is no such range.
        """
        if self._memory.task:  # for as long as the task runs
            self.hold()
        return self._memory.locate(self.name)[0]

    @property
    def buffer(self) -> memoryview:
        """Its bytes. What is written there is there for all.

        Raises:
            PetriError: The range was deleted, or is not the one that it was.
        """
        if self._map is None:
            self._map = self._mapped()
        return memoryview(self._map)

    def array(self) -> "numpy.ndarray[Any, Any]":
        """Its bytes as a NumPy array of its type and shape, without a copy.

        Raises:
            PetriError: As for `buffer`, or NumPy is not installed.
        """
        numpy = _numpy()
        return numpy.frombuffer(self.buffer, dtype=self.dtype).reshape(self.shape)

    def hold(self) -> None:
        """Map it: until the task ends it stays where it is, and nobody else can delete it."""
        _ = self.buffer

    def close(self) -> None:
        """Let others delete it, and the store move it. Arrays of it that somebody still has stay valid."""
        self._release()
        if self in self._memory.opened:
            self._memory.opened.remove(self)

    def _mapped(self) -> mmap.mmap:
        if self._deleted:
            raise PetriError(f"Range {self.name} was deleted by this task.", "Delete it after its last use.")
        path, found, self._file = self._memory.open_file(self._description)
        if (found.size, found.dtype, found.shape) != (self.size, self.dtype, self.shape):
            self._release()
            raise PetriError(
                f"Range {self.name} holds {_kind(found)} now, and its token says {_kind(self._description)}.",
                "It was deleted and allocated again: give ranges names of their own.",
            )
        try:
            mapped = self._memory.reuse(self._file) or mmap.mmap(self._file, self.size)
        except OSError as error:
            self._release()
            raise PetriError(
                f"Range {self.name} in {path} cannot be mapped: {error.strerror}.", "Map fewer at a time."
            ) from None
        self._memory.remember(self)
        return mapped

    def _release(self, later: "dict[tuple[int, int], mmap.mmap] | None" = None) -> None:
        """Let others delete it; arrays of it that somebody still has stay as they are.

        Args:
            later: Takes the mapping, whose end takes long for much memory; None: it ends now.
        """
        if later is not None and self._map is not None:
            later[_identity(self._file)], self._map = self._map, None
        if self._file >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1
        if self._map is not None:
            unmap([self._map])
            self._map = None

    def __del__(self) -> None:
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # somebody has an array of it, and may write there: until then it stays
                if not sys.is_finalizing():
                    weakref.finalize(self._map, _unlock, self._file, os.getpid()).atexit = False
                    self._file = -1
            self._map = None
        self._release()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "numpy.ndarray[Any, Any]":
        array = self.array()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __len__(self) -> int:
        return self.size

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<Range {self.name}: {_kind(self._description)}, {self.lifetime}>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Range)
            and self._description == other._description
            and self._memory.identity == other._memory.identity
        )

    def __hash__(self) -> int:
        return hash((self.name, self._memory.identity))

    def __reduce__(self) -> Any:
        if self.lifetime == "task":
            raise PetriError(
                f"Range {self.name} ends with its task, so it cannot be a token.",
                'Allocate it with lifetime="net".',
            )
        return _restore, (
            self._memory.identity,
            str(self._memory.folder),
            self._description,
        )


class Memory:
    """The ranges of a run: what tasks get as `memory`, and programs as `run.memory` or `Memory.at(folder)`.

    A task's allocations and deletions count when the task has ended well, together with its tokens. If it
    fails or is killed, what it has allocated is gone and what it has deleted is there, so it can run again.

    Args:
        store: Where they lie.
        commit: Makes changes last at once, or refuses them; None: they are a task's, see `finish`.
    """

    def __init__(self, store: Store, commit: "Callable[[Changes], None] | None" = None) -> None:
        self._store = store
        self._commit = commit
        #: Of the task that this process is at.
        self.task = 0
        self.opened: list[Range] = []
        #: Mappings of the task before, by their files: the next one may want the same.
        self.stale: dict[tuple[int, int], mmap.mmap] = {}
        self._allocated: list[Description] = []
        self._deleted: list[str] = []
        #: Whether the task that runs has done anything here.
        self.used = False

    @classmethod
    def at(cls, folder: str | os.PathLike[str]) -> "Memory":
        """The ranges of a run that goes on elsewhere on this node, or has ended.

        Raises:
            PetriError: There is no run with ranges.
        """
        path = Path(folder).absolute()
        found = header_of(path / "journal").get("memory")
        if not found:
            raise PetriError(f"The run in {path} has no ranges.", "Name the folder of a run that has some.")
        spills = [Path(each) for each in found["spills"]]
        return _known.get(found["identity"]) or cls(
            Store(found["identity"], path, 0, spills), _refuse_changes
        )

    @property
    def identity(self) -> str:
        """Of the run."""
        return self._store.identity

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self._store.folder

    def allocate(
        self, name: str, shape: int | str | tuple[int, ...], dtype: Any = "|u1", *, lifetime: str = "net"
    ) -> Range:
        """Make a range; all its bytes are 0.

        Args:
            name: Unique in the run; empty: one is chosen.
            shape: Of the array that it is to hold, or its number of elements, or a size such as "2GiB".
            dtype: Of its elements, for NumPy; by default bytes.
            lifetime: `task`: until this task ends. `net`: until the net ends. `kept`: until it is deleted;
                when the net ends it moves to the run's folder.

        Raises:
            PetriError: The name is taken or no name, or there is no room.
        """
        if lifetime not in LIFETIMES or (lifetime == "task" and not self.task):
            raise PetriError(
                f"'{lifetime}' is no lifetime of a range here.",
                "Give 'net' or 'kept', and within tasks also 'task'.",
            )
        name = name or f"range-{secrets.token_hex(8)}"
        if not _NAME.fullmatch(name):
            raise PetriError(
                f"'{name}' is no name of a range.", "Use up to 200 letters, digits, '-', '_', '.'."
            )
        description = _described(name, shape, dtype, lifetime, self.task)
        self._begin()
        self._store.create(description)
        self._allocated.append(description)
        made = Range(self, description)
        made.hold()
        if not self.task:
            self._commit_own(([description], []))
        return made

    def __getitem__(self, name: str) -> Range:
        """The range of this name. Raises PetriError where there is none."""
        return self.open(name)

    def open(self, name: str, dtype: Any = None, shape: tuple[int, ...] | None = None) -> Range:
        """The range of this name.

        Args:
            name: Of the range.
            dtype: What its elements must be; by default anything.
            shape: What its array must be; by default anything.

        Raises:
            PetriError: There is none, or it holds something else.
        """
        found = self.locate(name)[1]
        wanted = replace(
            found,
            dtype=found.dtype if dtype is None else _dtype(dtype)[0],
            shape=found.shape if shape is None else tuple(shape),
        )
        if wanted != found:
            raise PetriError(
                f"Range {name} holds {_kind(found)}, not {_kind(wanted)}.", "Open it as what it holds."
            )
        return Range(self, found)

    def __contains__(self, name: str) -> bool:
        return name not in self._deleted and self._store.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._store.descriptions().keys() - set(self._deleted)))

    def delete(self, which: str | Range) -> None:
        """Delete a range: in a task, when the task has ended well.

        Raises:
            PetriError: There is none, or another task has it mapped.
        """
        name = which if isinstance(which, str) else which.name
        path, _ = self.locate(name)
        self._begin()
        own = [each for each in self.opened if each.name == name]
        if isinstance(which, Range) and all(each is not which for each in own):
            own.append(which)
        held = [each for each in own if each._file >= 0]
        for each in held:
            each._release()
        # Nobody else takes it meanwhile, or finds it mapped by this look alone.
        with self._store.locked():
            refused = is_mapped(path)
        if refused:
            self.opened = [each for each in self.opened if all(each is not one for one in held)]
            for each in held:
                each.hold()
            raise PetriError(
                f"Range {name} cannot be deleted: another task or the program has it mapped.",
                "Let a task delete it that starts after the last one that uses it, or close it there.",
            )
        for each in own:
            each._deleted = True
        self._deleted.append(name)
        if not self.task:
            self._commit_own(([], [name]))

    def locate(self, name: str, node: str = "") -> tuple[Path, Description]:
        """The file of a range, and what it is; `node`: where it was made, if that is known.

        Raises:
            PetriError: There is none.
        """
        if name in self._deleted:
            raise PetriError(f"Range {name} was deleted by this task.", "Delete it after its last use.")
        found = self._store.find(name)
        if found is None:
            if node not in ("", socket.gethostname()):
                raise PetriError(
                    f"Range {name} is in the memory of {node}, and this is {socket.gethostname()}.",
                    "Give places of ranges the type Range: then tasks that use them run there.",
                )
            raise PetriError(
                f"There is no range {name}: it was never allocated, or deleted.",
                "Allocate it in a task that ends before.",
            )
        return found

    def cost(self, name: str) -> tuple[str, int]:
        """Where a range is, and the bytes that a task on this node has to move to reach it.

        0 bytes for shared memory of this node, all of them for the disk. Ranges do not leave their node.

        Raises:
            PetriError: There is no such range.
        """
        path, found = self.locate(name)
        if path.parent == self._store.shared:
            return f"{found.node}, memory", 0
        return f"{socket.gethostname()}, disk", found.size

    def open_file(self, wanted: Description) -> tuple[Path, Description, int]:
        """A range's file, opened so that nobody deletes or moves it until it is closed."""
        self.used = True
        with self._store.locked():
            path, found = self.locate(wanted.name, wanted.node)
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(file, fcntl.LOCK_SH)
        return path, found, file

    def remember(self, opened: Range) -> None:
        """A range was mapped: for a task until it ends, for a program as long as that has it."""
        if self._commit is None:
            self.opened.append(opened)

    def register(self) -> None:
        """Let tokens find their ranges here."""
        _known[self.identity] = self

    def close(self) -> None:
        """Let go of what is mapped."""
        self.finish(True)
        self.unmap()
        if _known.get(self.identity) is self:
            del _known[self.identity]

    def finish(self, well: bool) -> Changes | None:
        """The task that runs has ended: what it has changed, unless it failed."""
        self.unmap()
        for each in self.opened:
            each._release(self.stale)
        changes = self._allocated, self._deleted
        self.opened, self._allocated, self._deleted, self.used = [], [], [], False
        for each in changes[0]:
            if not well or each.lifetime == "task" or each.name in changes[1]:
                self._store.remove(each.name)
        own = {each.name for each in changes[0]}
        lasting = [each for each in changes[0] if each.lifetime != "task" and each.name not in changes[1]]
        deleted = [name for name in changes[1] if name not in own]
        return (lasting, deleted) if well and (lasting or deleted) else None

    def reuse(self, file: int) -> "mmap.mmap | None":
        """The mapping of a file that the task before had."""
        return self.stale.pop(_identity(file), None) if self.stale else None

    def unmap(self) -> None:
        """Give back what tasks that have ended had mapped; much of it in another thread, as it takes long."""
        mappings, self.stale = list(self.stale.values()), {}
        if sum(map(len, mappings)) > _QUICKLY_UNMAPPED:
            threading.Thread(target=unmap, args=(mappings,), daemon=True).start()
        else:
            unmap(mappings)

    def _begin(self) -> None:
        self.used = True
        if self._commit:  # which may refuse
            self._commit(([], []))

    def _commit_own(self, changes: Changes) -> None:
        self._allocated, self._deleted = [], []
        if self._commit:
            self._commit(changes)


def _unlock(file: int, process: int) -> None:
    """Let others delete or move a range whose last array is gone; what was forked meanwhile must not."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def unmap(mappings: list[mmap.mmap]) -> None:
    """End mappings, unless somebody still has arrays of them."""
    while mappings:
        with contextlib.suppress(BufferError):
            mappings.pop().close()


def _restore(identity: str, folder: str, description: Description) -> Range:
    memory = _known.get(identity)
    if memory is None:
        try:
            memory = Memory.at(folder)
        except PetriError:  # of a run that is not here; to map the range says so
            memory = Memory(Store(identity, Path(folder), 0, []), _refuse_changes)
    return Range(memory, description)


def _refuse_changes(changes: Changes) -> None:
    raise PetriError(
        "Ranges of a run are allocated and deleted by its tasks and by the program that runs it.",
        "Use the memory parameter of a transition, or run.memory.",
    )


def _described(
    name: str, shape: int | str | tuple[int, ...], dtype: Any, lifetime: str, task: int
) -> Description:
    kind, width = _dtype(dtype)
    try:
        if isinstance(shape, str):
            shape = parse_size(shape) // width
        sizes = (shape,) if isinstance(shape, int) else tuple(int(each) for each in shape)
    except (CarmeRuntimeError, TypeError, ValueError):
        sizes = ()
    size = math.prod(sizes) * width
    if not sizes or min(sizes) < 1 or size >= 1 << 62:
        raise PetriError(
            f"{shape!r} is no size of range {name}.", 'Give a number, a shape, or a size such as "2GiB".'
        )
    return Description(name, size, lifetime, kind, sizes, task, socket.gethostname())


def _dtype(given: Any) -> tuple[str, int]:
    """A type as NumPy writes it, and its bytes; bytes need no NumPy."""
    if given in ("|u1", "uint8", "u1", bytes):
        return "|u1", 1
    try:
        found = _numpy().dtype(given)
    except TypeError:
        found = None
    if found is None or found.hasobject or found.itemsize == 0 or found.names:
        raise PetriError(f"{given!r} is no type of the elements of a range.", "Give one such as 'float32'.")
    return found.str, found.itemsize


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise PetriError(
            "NumPy is not installed, so ranges hold bytes only.", "Install numpy, or use range.buffer."
        ) from None
    return numpy


def _kind(description: Description) -> str:
    return f"{description.dtype} of shape {description.shape}"
