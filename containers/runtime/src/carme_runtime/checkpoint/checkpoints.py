"""What a training script does with checkpoints."""

import contextlib
import functools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from carme_runtime.checkpoint import files, ranks, states, streamed
from carme_runtime.checkpoint.relay import Relay
from carme_runtime.checkpoint.stream import (
    Filling,
    Layout,
    Stream,
    copy_range,
    pieces,
    share,
    take_apart,
)
from carme_runtime.collectives.errors import GaspiError, InvalidCall, Timeout
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.logs import log
from carme_runtime.out_of_core import limits_host
from carme_runtime.starts import check_start

_SLOWER = 10  # times that another rank may take longer to write than this one
_AT_LEAST = 60.0  # seconds that it may take in any case
_PIECE = 16 << 20  # bytes that are written and hashed at once

Result = TypeVar("Result")
_Read = Callable[[Path], Any]  # a checkpoint's folder; what has received it


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._over = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is written, or was given up."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is written, at most `timeout` seconds. Raises what went wrong."""
        if not self._over.wait(timeout):
            raise Timeout(f"The checkpoint of step {self.step} was not written in time.", "Wait longer.")
        if self._error:
            raise self._error

    def settle(self) -> None:
        """Wait until it is written, or was given up."""
        self._over.wait()

    def conclude(self, error: BaseException | None) -> None:
        """It is over."""
        self._error = error
        self._over.set()


@dataclass
class _Writing:
    """A checkpoint on its way to the disk."""

    saving: Saving
    partial: Path  # the folder that the ranks write into
    left: str  # what names of earlier ones look like that are cleared
    packed: bytes
    layout: Layout
    patience: float = _AT_LEAST  # seconds to wait for the other ranks
    error: BaseException | None = None

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Note what goes wrong, for the other ranks too."""
        try:
            yield
        except BaseException as reason:
            self.error = reason
            with contextlib.suppress(OSError):
                (self.partial / files.FAILED).touch()
            log.error("The checkpoint of step %d was not written: %s", self.saving.step, reason)


class Checkpoints:
    """The checkpoints of one run in one folder. All ranks make it, and call its methods in the same order.

    The ranks have joined before, by `parallelize`, `pipeline`, `hvd.init()` or `init_process_group`, or for
    Keras.

    The state is the same on all ranks, as it is with DistributedDataParallel, `parallelize`, Horovod or
    `carme_runtime.keras`, or FSDP or `pipeline` has divided it among all of them. Each rank writes an equal
    share of it, and any number of ranks can load it, divided or not. One run at a time uses the folder.

    Args:
        folder: On a file system that all nodes of the run share; it is made if it is not there.
        keep: How many checkpoints are kept, the newest.
        start: `streamed`: rank 0 alone reads a checkpoint, and it travels to the others. `resume` returns
            while it does: a model of PyTorch waits for each parameter in its first forward pass, and its
            optimizer for its state before the first step. Also before `parallelize`, which then sends
            nothing again with the same `start`. Where `carme_runtime.memory` limits the host's memory on any
            rank, `resume` returns when all is there, and holds to the limit.

    Raises:
        InvalidCall: An argument that cannot be, or ranks that have not joined.
    """

    def __init__(self, folder: str | Path, keep: int = 3, start: str = "") -> None:
        if keep < 1:
            raise InvalidCall(f"Checkpoints got keep={keep}.", "Keep at least one.")
        check_start(start)
        self._folder, self._keep = Path(folder), keep
        if start and "carme_runtime.torch.parallel" in sys.modules:
            sys.modules["carme_runtime.torch.parallel"].join_run()
        self._ranks = ranks.joined()
        self._rank, self._size = self._ranks.rank, self._ranks.size
        self._carrier = streamed.carrier_of(self._ranks) if start and self._size > 1 else None
        self._saves = 0
        self._last: Saving | None = None
        self._room = np.empty(0, np.uint8)
        self._overtaken: set[str] = set()
        #: Whether a checkpoint was loaded, and whether those of an earlier run were named.
        self._has_loaded = self._earlier_named = False
        # A name of this run's own: what an earlier one left unfinished must not be taken for its work.
        self._token = self._from_rank_0(self._begin)

    def _begin(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        return secrets.token_hex(4)

    def save(self, step: int, /, **state: Any) -> Saving:
        """Begin to write a checkpoint; the state may change again when this returns.

        Where `carme_runtime.memory` limits the host's memory, this rank's share is on the disk when this
        returns: a copy of it would count.

        Args:
            step: Its number; the highest is the newest.
            state: Models, optimizers, or whatever has `state_dict` and `load_state_dict`; and values:
                numbers, strings, tensors, NumPy arrays, and lists and dictionaries of them. Rank 0's numbers
                and strings count.

        Raises:
            InvalidCall: The state has something else in it, or the optimizer of a FullyShardedDataParallel
                without its model.
            Exception: What went wrong with the one before.
        """
        self.wait()
        full = {name: states.take(name, part, state.values()) for name, part in state.items()}
        packed, layout, tensors = take_apart(full)
        begin, end = share(layout.size, self._rank, self._size)
        partial = self._folder / f".partial-{self._token}-{self._saves}"
        # At first what an earlier run left, and then what this one gave up; not before it saves: a run that
        # only loads may do so beside a run that saves.
        left = f".partial-{self._token}-*" if self._saves else ".partial-*"
        self._saves += 1  # before anything is written: what is interrupted leaves its name to nobody
        work = _Writing(Saving(step), partial, left, packed, layout)
        if limits_host():
            # What can leave memory is for the thread alone that the limit holds in.
            self._write_share(work, of_rank := pieces(layout, tensors, begin, end))
            for _ in of_rank:  # where it failed: the other ranks wait for this one's parts of divided tensors
                pass
            if work.error and not isinstance(work.error, Exception):
                raise work.error  # an interrupt
            act = functools.partial(self._commit, work)
        else:
            if len(self._room) != end - begin:
                self._room = np.empty(end - begin, np.uint8)
            copy_range(layout, tensors, begin, end, self._room)
            act = functools.partial(self._write, work, self._room)
        self._last = work.saving
        # Not a daemon: a script that ends has its last checkpoint.
        threading.Thread(target=act).start()
        return work.saving

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises what went wrong."""
        last, self._last = self._last, None
        if last:
            last.wait()

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, the newest first."""
        return [files.step_of(checkpoint) for checkpoint in files.found(self._folder)]

    def load(
        self, step: int | None = None, own: Callable[[Any], Any] = lambda structure: structure
    ) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest checkpoint that is undamaged, or of that of `step`; None without any.

        Training goes on from it: what is saved next takes the place of those that are later than that.

        Args:
            step: Which.
            own: From the state without its tensors to what is wanted of it.

        Raises:
            Damaged: There are some, and none is undamaged.
        """
        if not self._streams():
            newest = self._newest(step, self._reader(functools.partial(Filling, own=own)))
            return newest and (newest[0], newest[1].state)
        assert self._carrier is not None
        newest = self._newest(step, _read_as(Stream) if self._rank == 0 else None)
        if newest is None:
            return None
        arriving = streamed.Arriving(self._ranks, self._carrier, newest[1], lambda _: [])
        return newest[0], arriving.part(own(arriving.structure))

    def load_on_rank_0(
        self, step: int | None = None, own: Callable[[Any], Any] = lambda structure: structure
    ) -> tuple[int, dict[str, Any] | None] | None:
        """What `load` gives, where rank 0 alone reads; on the others None stands for the state.

        All ranks call it together. Raises what `load` raises.
        """
        receiver = functools.partial(Filling, own=own)
        newest = self._newest(step, _read_as(receiver) if self._rank == 0 else None)
        return newest and (newest[0], newest[1] and newest[1].state)

    def _streams(self) -> bool:
        """Whether a checkpoint travels while training begins; not where a rank's memory is limited."""
        return self._carrier is not None and not any(self._ranks.exchange(limits_host()))

    def _reader(self, receiver: Callable[[bytes, Layout], Filling]) -> _Read:
        """What reads a checkpoint on all ranks, or on rank 0 for all."""
        if self._carrier is None:
            return _read_as(receiver)
        return Relay(self._rank, self._carrier, receiver).read

    def _newest(self, step: int | None, read: _Read | None) -> tuple[int, Any] | None:
        """Step, and what has received the checkpoint; None in its place where this rank does not read."""
        if self._last:
            self._last.settle()
        error: GaspiError | None = None
        tried: set[str] = set()
        while True:
            # A run that trains meanwhile writes newer ones, and removes those that were the newest.
            found: list[str] = self._from_rank_0(lambda: [c.name for c in files.found(self._folder)])
            suitable = (n for n in found if n not in tried and step in (None, files.step_of(Path(n))))
            name = next(suitable, None)
            if name is None:
                break
            tried.add(name)
            number = files.step_of(Path(name))
            state: Any = None
            own_error: Exception | None = None
            try:
                state = read(self._folder / name) if read else None
            except Exception as reason:
                own_error = reason
            damage = own_error.message if isinstance(own_error, files.Damaged) else None
            problem = f"{type(own_error).__name__}: {own_error}" if own_error and not damage else None
            troubles = self._ranks.exchange((damage, problem))
            failure = next((text for _, text in troubles if text), None)
            if failure:
                # Not the checkpoint's fault: an older one would not do better.
                raise own_error or CarmeRuntimeError(
                    f"Another rank could not load the checkpoint of step {number}: {failure}",
                    "See what that one says.",
                )
            trouble = next((text for text, _ in troubles if text), None)
            if trouble is None:
                self._has_loaded = True
                self._overtaken = {later for later in found if files.step_of(Path(later)) > number}
                return number, state
            error = files.Damaged(trouble, "Use an older checkpoint.")
            log.warning("%s", error)
        if error:
            raise error
        return None

    def resume(self, step: int | None = None, /, **state: Any) -> dict[str, Any] | None:
        """Load the newest checkpoint, or that of `step`, into models, optimizers and the like.

        Returns:
            All values of the checkpoint that were not named, and its number as `step`; None without any.
        """
        if self._streams():
            return self._resume_streamed(step, state)
        receiver = functools.partial(Filling, own=functools.partial(_own, state))
        newest = self._newest(step, self._reader(receiver))
        if newest is None:
            return None
        number, parts = newest[0], newest[1].state
        _check_has(number, parts, state)
        for name, target in state.items():
            states.give(name, target, parts.pop(name), state.values())
        return {"step": number} | parts

    def _resume_streamed(self, step: int | None, state: dict[str, Any]) -> dict[str, Any] | None:
        newest = self._newest(step, _read_as(Stream) if self._rank == 0 else None)
        if newest is None:
            return None
        assert self._carrier is not None
        early = functools.partial(streamed.first_of, state)
        arriving = streamed.Arriving(self._ranks, self._carrier, newest[1], early)
        parts = arriving.structure
        _check_has(newest[0], parts, state)
        for name, target in state.items():
            streamed.give(name, target, parts.pop(name), arriving, state.values())
        return {"step": newest[0]} | arriving.part(parts)

    def _write(self, work: _Writing, room: np.ndarray) -> None:
        self._write_share(work, [room[cut : cut + _PIECE] for cut in range(0, len(room), _PIECE)])
        self._commit(work)

    def _write_share(self, work: _Writing, of_rank: Iterable[np.ndarray]) -> None:
        """Write what this rank has of a checkpoint."""
        begun = time.monotonic()
        with work.failing():
            if self._rank == 0:
                files.clear(self._folder, work.left, work.partial)
            files.write_share(work.partial, self._rank, of_rank, work.layout)
            work.patience = _AT_LEAST + _SLOWER * (time.monotonic() - begun)

    def _commit(self, work: _Writing) -> None:
        """Give a checkpoint its name when all ranks have written, or see that rank 0 has done so."""
        if not work.error:
            with work.failing():
                self._conclude(work)
        work.saving.conclude(work.error)

    def _conclude(self, work: _Writing) -> None:
        if self._rank != 0:
            _await_commit(work.partial, work.patience)
            return
        size, step = work.layout.size, work.saving.step
        ends = [share(size, rank, self._size)[1] for rank in range(self._size)]
        newest = files.commit(work.partial, step, work.packed, work.layout, ends, work.patience)
        files.prune(self._folder, self._keep, newest, self._overtaken)
        later = [c for c in files.found(self._folder) if files.step_of(c) > step]
        if later and not self._has_loaded and not self._earlier_named:
            self._earlier_named = True
            log.warning(
                "The folder %s has a checkpoint of step %d that this run has not loaded, and saves step %d. "
                "The next resume() goes on from %d. Resume before you train, or use a folder of its own.",
                self._folder, files.step_of(later[0]), step, files.step_of(later[0]),
            )  # fmt: skip

    def _from_rank_0(self, action: Callable[[], Result]) -> Result:
        """What `action` gives there. If it fails, it does so for all ranks."""
        result = error = None
        if self._rank == 0:
            try:
                result = action()
            except OSError as reason:
                error = f"The folder {self._folder} for checkpoints cannot be used: {reason.strerror}."
        result, error = self._ranks.exchange((result, error))[0]
        if error:
            raise CarmeRuntimeError(error, "Choose a folder that you may write to.")
        return result


def _read_as(receiver: Callable[[bytes, Layout], Any]) -> _Read:
    return lambda checkpoint: files.read(checkpoint, receiver)


def _own(targets: dict[str, Any], structure: dict[str, Any]) -> dict[str, Any]:
    """Of a checkpoint's structure: what this rank needs of it for these targets, and all values."""
    return {
        name: states.own(targets[name], part) if name in targets else part for name, part in structure.items()
    }


def _check_has(number: int, parts: dict[str, Any], state: dict[str, Any]) -> None:
    """Raise InvalidCall for a part that the checkpoint of a step does not have."""
    for name in state:
        if name not in parts:
            raise InvalidCall(
                f"The checkpoint of step {number} has no '{name}'.", f"It has: {', '.join(parts)}."
            )


def _await_commit(partial: Path, seconds: float) -> None:
    """Wait until rank 0 has given the checkpoint its name."""
    end = time.monotonic() + seconds
    while partial.exists():
        files.raise_if_given_up(partial)
        if time.monotonic() > end:
            raise Timeout("Rank 0 did not finish the checkpoint in time.", "See what it says.")
        time.sleep(0.02)
