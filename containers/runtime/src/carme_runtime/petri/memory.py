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
import mmap
import os
import re
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carme_runtime.petri.asking import ask
from carme_runtime.petri.elements import describe, kind_of, numpy_module, type_of
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.frames import header_of
from carme_runtime.petri.mapping import bytes_for, identity_of, unlock_in, unmap
from carme_runtime.petri.range_files import Description
from carme_runtime.petri.store import ON_DISK, Store, is_mapped, unlock

if TYPE_CHECKING:
    import numpy

LIFETIMES = ("task", "net", "kept")
_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
#: Bytes whose mapping ends so quickly that the next task can wait for it.
_QUICKLY_UNMAPPED = 16 << 20
#: (descriptions of what was allocated, names of what was deleted, copies by the names of what may have been
#: written to, which is noted where several nodes have ranges).
Changes = tuple[list[Description], list[str], dict[str, int]]

#: The memory of runs that this process is part of, by their identities.
_known: dict[str, "Memory"] = {}
_pickling, _guarding = threading.local(), threading.local()


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
        self.copy = description.copy  # that is mapped
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
            self._memory.note_writing(self)
        return self._memory.locate(self.name)[0]

    @property
    def buffer(self) -> memoryview:
        """Its bytes. What is written there is there for all.

        Raises:
            PetriError: The range was deleted, or is not the one that it was.
        """
        self.hold()
        self._memory.note_writing(self)
        assert self._map is not None
        return memoryview(self._map)

    def array(self, write: bool = True) -> "numpy.ndarray[Any, Any]":
        """Its bytes as a NumPy array of its type and shape, without a copy.

        Args:
            write: False: to be read alone, so that copies of it on other nodes stay good.

        Raises:
            PetriError: As for `buffer`, or NumPy is not installed.
        """
        numpy = numpy_module()
        self.hold()
        assert self._map is not None
        data = self.buffer if write else memoryview(self._map).toreadonly()
        return numpy.frombuffer(data, dtype=self.dtype).reshape(self.shape)

    def hold(self) -> None:
        """Map it: until the task ends it stays where it is, and nobody else can delete it."""
        if self._map is None:
            self._map = self._mapped()
            self._memory.remember(self)

    def adopt(self, file: int) -> None:
        """Map it from its file, which was made and opened just now."""
        self._file = file
        self._map = self._map_of(file)

    def close(self) -> None:
        """Let others delete it, and the store move it. Arrays of it that somebody still has stay valid."""
        self._release()
        opened = self._memory.opened  # in place: another thread may open a range meanwhile
        for at in range(len(opened) - 1, -1, -1):
            if opened[at] is self:
                del opened[at]

    def _mapped(self) -> mmap.mmap:
        if self._deleted:
            raise PetriError(f"Range {self.name} was deleted by this task.", "Delete it after its last use.")
        found, self._file = self._memory.open_file(self._description)
        self.copy = found.copy
        if (found.size, found.dtype, found.shape) != (self.size, self.dtype, self.shape):
            self._release()
            raise PetriError(
                f"Range {self.name} holds {kind_of(found)} now, and its token says "
                f"{kind_of(self._description)}.",
                "It was deleted and allocated again: give ranges names of their own.",
            )
        return self._memory.reuse(self._file) or self._map_of(self._file)

    def _map_of(self, file: int) -> mmap.mmap:
        # All of a small one at once costs less than a fault for each of its pages.
        ahead = mmap.MAP_POPULATE if self.size <= _QUICKLY_UNMAPPED else 0
        try:
            return mmap.mmap(file, self.size, flags=mmap.MAP_SHARED | ahead)
        except OSError as error:
            path = Path(f"/proc/self/fd/{file}").readlink()
            self._release()
            raise PetriError(
                f"Range {self.name} in {path} cannot be mapped: {error.strerror}.", "Map fewer at a time."
            ) from None

    def _release(self, later: "dict[tuple[int, int], mmap.mmap] | None" = None) -> None:
        """Let others delete it; arrays of it that somebody still has stay as they are.

        Args:
            later: Takes the mapping, whose end takes long for much memory; None: it ends now.
        """
        if self.copy == ON_DISK and self._map is not None:
            self._map.flush()  # for the next node that maps it
        if later is not None and self._map is not None:
            later[identity_of(self._file)], self._map = self._map, None
        if self._file >= 0:
            unlock(self._file)
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
                    weakref.finalize(self._map, unlock_in, self._file, os.getpid()).atexit = False
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
        return f"<Range {self.name}: {kind_of(self._description)}, {self.lifetime}>"

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
        getattr(_pickling, "ranges", []).append(self)
        return restore, (
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
        self._written: dict[str, int] = {}
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
        self,
        name: str,
        shape: int | str | tuple[int, ...],
        dtype: Any = "|u1",
        *,
        lifetime: str = "net",
        copies: int = 1,
        content: Any = None,
    ) -> Range:
        """Make a range; all its bytes are 0, or those of `content`.

        Args:
            name: Unique in the run; empty: one is chosen.
            shape: Of the array that it is to hold, or its number of elements, or a size such as "2GiB".
            dtype: Of its elements, for NumPy; by default bytes.
            lifetime: `task`: until this task ends. `net`: until the net ends. `kept`: until it is deleted;
                when the net ends it moves to the run's folder.
            copies: 2: when a task has ended that has written to it, a copy lies on another node of the job,
                or in the run's folder where there is no other, so that the range survives its node.
            content: Its bytes, as anything has them that lies in one piece, such as an array.

        Raises:
            PetriError: The name is taken or no name, there is no room, or the content is of another size.
        """
        if lifetime not in LIFETIMES or (lifetime == "task" and not self.task):
            raise PetriError(
                f"'{lifetime}' is no lifetime of a range here.",
                "Give 'net' or 'kept', and within tasks also 'task'.",
            )
        name = name or f"range-{secrets.token_hex(8)}"
        if not _NAME.fullmatch(name):
            raise PetriError(
                f"'{name}' is not a valid name of a range.", "Use up to 200 letters, digits, '-', '_', '.'."
            )
        if copies not in (1, 2):
            raise PetriError(f"A range cannot have {copies} copies.", "Give 1 or 2.")
        description = describe(name, shape, dtype, lifetime, self.task)
        description = replace(description, copies=copies, node=self._store.node)
        data = None if content is None else bytes_for(description, content)
        self._begin()
        file = self._store.create(description, data)
        self._allocated.append(description)
        allocated = Range(self, description)
        if data is None:
            allocated.adopt(file)
            self.remember(allocated)
        else:  # it is mapped when it is used
            unlock(file)
        if not self.task:
            self._commit_own(([description], [], {}))
        return allocated

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
            dtype=found.dtype if dtype is None else type_of(dtype)[0],
            shape=found.shape if shape is None else tuple(shape),
        )
        if wanted != found:
            raise PetriError(
                f"Range {name} holds {kind_of(found)}, not {kind_of(wanted)}.", "Open it as what it holds."
            )
        return Range(self, found)

    def __contains__(self, name: str) -> bool:
        return name not in self._deleted and self._exists(name)

    def __iter__(self) -> Iterator[str]:
        names = self._store.descriptions().keys() | set(self._ask("names"))
        return iter(sorted(names - set(self._deleted)))

    def delete(self, which: str | Range) -> None:
        """Delete a range: in a task, when the task has ended well.

        Raises:
            PetriError: There is none, or another task has it mapped.
        """
        name = which if isinstance(which, str) else which.name
        if isinstance(which, Range) and which._memory.identity != self.identity:
            raise PetriError(f"Range {name} is one of another run.", "Delete it with that run's memory.")
        own = [each for each in self.opened if each.name == name]
        if isinstance(which, Range) and all(each is not which for each in own):
            own.append(which)
        held = [each for each in own if each._file >= 0]
        if name in self._deleted or not ((held and not self._store.has_peers) or self._exists(name)):
            self.locate(name)  # which says why not
        self._begin()
        for each in held:
            each._release()
        # Nobody else takes it meanwhile, or finds it mapped by this look alone.
        with self._store.locked():
            location = self._store.find(name)  # now: another task may just have moved it to the disk
            refused = location is not None and is_mapped(location[0])
        if refused:
            self.opened = [each for each in self.opened if all(each is not mapping for mapping in held)]
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
            self._commit_own(([], [name], {}))

    def locate(self, name: str, node: str = "") -> tuple[Path, Description]:
        """The file of a range, and what it is; `node`: where it was made, if that is known.

        Raises:
            PetriError: There is none.
        """
        if name in self._deleted:
            raise PetriError(f"Range {name} was deleted by this task.", "Delete it after its last use.")
        found = self._store.find(name)
        if found is None and self._store.has_peers:
            trouble = self._ask("fetch", name)
            if trouble:
                raise PetriError(*trouble)
            found = self._store.find(name)
        if found is None:
            if node not in ("", self._store.node) and not self._store.has_peers:
                raise PetriError(
                    f"Range {name} is in the memory of {node}, and this is {self._store.node}.",
                    'Resume the run there, or in a job that has that node, with workers="job".',
                )
            if self._ask("lost", name):
                raise PetriError(
                    f"Range {name} was lost with the memory of its node.",
                    "Allocate it anew; with copies=2 a range survives its node.",
                )
            raise PetriError(
                f"There is no range {name}: it was never allocated, or deleted.",
                "Allocate it in a task that ends before.",
            )
        return found

    def cost(self, name: str) -> tuple[str, int]:
        """Where a range is, and the bytes that a task on this node has to move to reach it.

        0 bytes for shared memory of this node, all of them for the disk and for another node's memory, from
        which they are copied when a task opens the range.

        Raises:
            PetriError: There is no such range.
        """
        if self._store.find(name) is None and (nodes := self._ask("holders", name)):
            *names, size = nodes
            return f"{', '.join(names)}, memory", size
        path, found = self.locate(name)
        if path.parent == self._store.shared:
            return f"{self._store.node}, memory", 0
        return f"{self._store.node}, disk", found.size

    def open_file(self, wanted: Description) -> tuple[Description, int]:
        """A range's file, opened so that nobody deletes or moves it until it is closed."""
        self.used = True
        while True:
            with self._store.locked():
                location = None if wanted.name in self._deleted else self._store.find(wanted.name)
                if location:
                    file = os.open(location[0], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                    fcntl.flock(file, fcntl.LOCK_SH)
                    path, found = location
                    if path.parent not in (self._store.shared, *self._store.spills):
                        found = replace(found, copy=ON_DISK)
                    return found, file
            # Outside of the lock, as it may have to come from elsewhere; or this says why there is none.
            self.locate(wanted.name, wanted.node)

    def note_writing(self, opened: Range) -> None:
        """A task may write to a range: then other nodes' copies of it are old when it has ended well."""
        if self._store.has_peers and self._commit is None:
            self._written.setdefault(opened.name, opened.copy)

    def remember(self, opened: Range) -> None:
        """A range was mapped: for a task until it ends, for a program as long as that has it."""
        opened_by_guard: list[Range] | None = getattr(_guarding, "ranges", None)
        if opened_by_guard is not None:
            opened_by_guard.append(opened)
        elif self._commit is None:
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
        written, self._written = self._written, {}
        self.opened, self._allocated, self._deleted, self.used = [], [], [], False
        for each in changes[0]:
            if not well or each.lifetime == "task" or each.name in changes[1]:
                self._store.remove(each.name)
        own = {each.name for each in changes[0]}
        lasting = [each for each in changes[0] if each.lifetime != "task" and each.name not in changes[1]]
        deleted = [name for name in changes[1] if name not in own]
        written = {name: copy for name, copy in written.items() if name not in {*own, *deleted}}
        if not well or not (lasting or deleted or written):
            return None
        for each in lasting:
            self._copy(each)
        for name in written:
            if found := self._store.find(name):
                self._copy(found[1])
        return lasting, deleted, written

    def _copy(self, description: Description) -> None:
        """Where a range is to have two copies, see that it has before the task counts as ended."""
        if description.copies > 1 and self._ask("copy", description.name) != "there":
            with contextlib.suppress(OSError):  # the range itself is there all the same
                self._store.save_copy(description.name)

    def _exists(self, name: str) -> bool:
        return self._store.find(name) is not None or bool(self._ask("holders", name))

    def _ask(self, kind: str, name: str = "") -> Any:
        """Ask what only the run as a whole knows; nothing where this node is all of it."""
        return ask(self._store, kind, name) if self._store.has_peers else ()

    def reuse(self, file: int) -> "mmap.mmap | None":
        """The mapping of a file that the task before had."""
        return self.stale.pop(identity_of(file), None) if self.stale else None

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
            self._commit(([], [], {}))

    def _commit_own(self, changes: Changes) -> None:
        self._allocated, self._deleted = [], []
        if self._commit:
            self._commit(changes)


@contextlib.contextmanager
def handed_over() -> Iterator[None]:
    """Close the ranges in what is pickled here, however deep: they are the tasks' from there on.

    A task may delete them as soon as its token is there.
    """
    _pickling.ranges = found = list[Range]()
    try:
        yield
        for each in found:
            each.close()
    finally:
        del _pickling.ranges


@contextlib.contextmanager
def guarding() -> Iterator[None]:
    """Let go of the ranges that a guard maps here as soon as it has ended: its task may delete them."""
    _guarding.ranges = found = list[Range]()
    try:
        yield
    finally:
        del _guarding.ranges
        for each in found:
            each._release()


def restore(identity: str, folder: str, description: Description) -> Range:
    """The range that a token has."""
    memory = _known.get(identity)
    if memory is None:
        try:
            memory = Memory.at(folder)
        except PetriError:  # of a run that is not here; to map the range says so
            memory = Memory(Store(identity, Path(folder), 0, []), _refuse_changes)
    return Range(memory, description)


_restore = restore  # as tokens name it that an earlier version has written


def _refuse_changes(changes: Changes) -> None:
    raise PetriError(
        "Ranges of a run are allocated and deleted by its tasks and by the program that runs it.",
        "Use the memory parameter of a transition, or run.memory.",
    )
