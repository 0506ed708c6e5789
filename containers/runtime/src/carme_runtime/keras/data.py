"""Splits the batches of a data set over ranks."""

# pyright: reportMissingImports=false

import pickle
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.library import keras
from carme_runtime.keras.optimizer import loop
from carme_runtime.keras.world import World, ranks, world

# Keras takes a data adapter for any data set, but does not export the class.
_adapters = keras.src.trainers.data_adapters
DataAdapter: Any = _adapters.data_adapter.DataAdapter

_BATCH, _END, _FAILED = range(3)
KINDS = (
    "NumPy arrays, tensors, data frames, a keras.utils.PyDataset, a torch DataLoader, a tf.data.Dataset "
    "or a Python generator"
)


@dataclass(frozen=True)
class Share:
    """This rank's part of a batch of `total` samples: `samples` from `begin` on, maybe none.

    `mark` shows whether ranks have cut the same batch: it depends on the batch's first sample.
    """

    begin: int
    samples: int
    total: int
    mark: int = 0


def share(total: int, rank: int, size: int, mark: int = 0) -> Share:
    """Shares differ by at most one sample, and the first ranks have the larger ones."""
    each, more = divmod(total, size)
    return Share(rank * each + min(rank, more), each + (rank < more), total, mark)


def rows(batch: Any, part: Share) -> Any:
    """The part of a batch. Where it is empty, one sample that will not count keeps layers working."""
    begin = part.begin if part.samples else 0
    end = begin + max(part.samples, 1)
    return keras.tree.map_structure(lambda leaf: leaf if leaf is None else leaf[begin:end], batch)


def length(batch: Any) -> int:
    """The number of samples in a batch."""
    return int(_first(batch).shape[0])


def mark_of(batch: Any) -> int:
    """A number that shows whether ranks have the same batch: it depends on the first sample."""
    return _mark(_first(batch)[0])


def _first(batch: Any) -> Any:
    return next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)


def _mark(sample: Any) -> int:
    array = np.array(keras.ops.convert_to_numpy(sample), order="C")
    # Of objects, such as texts, an array has the addresses.
    return zlib.crc32(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())


class Shares(DataAdapter):
    """What Keras reads batches from: this rank's share of each batch of a data set.

    Every rank has the whole data set at hand, and goes through it in the same order. Where batches are made
    from indices, a rank fetches only the samples of its share.

    Args:
        source: Keras' own adapter of the data set.
        world: The ranks.
        on_share: Notified of each share just before its batch is worked on.
        distribute: Whether batches are split. If not, each rank's data are a share already.
        largest: No batch may have more samples, where that is known.
        training: Whether every rank must have something to do in each full batch.
    """

    def __init__(
        self,
        source: Any,
        world: World,
        on_share: Callable[[Share], None],
        distribute: bool = True,
        largest: int | None = None,
        training: bool = False,
    ) -> None:
        self._source, self._world, self._on_share = source, world, on_share
        self._distribute, self._largest = distribute, largest
        self.history: list[Share] | None = None  # of an epoch, where somebody wants it
        self._divided: tuple[_ShareSampler, Any] | None = None
        stated = source.batch_size
        if training and distribute and stated is not None and stated < world.parts:
            raise too_small(stated, world.parts)
        if largest is not None and stated not in (None, largest):
            raise _other_size(stated, largest)
        self._training = training and distribute and stated is None

    def get_torch_dataloader(self) -> "Shares":
        """What gives the shares of one epoch."""
        return self

    def get_tf_dataset(self) -> "Shares":
        """The same; Keras' TensorFlow trainer takes any iterable."""
        return self

    def example(self) -> Any:
        """Shapes and types of a batch, for TensorFlow."""
        return self._source.get_tf_dataset().element_spec

    def __iter__(self) -> Iterator[Any]:
        # The loader's iterator is made now, as Keras would: making it draws random numbers, and where it has
        # worker processes, it draws the indices of its first batches.
        same_randomness(self._world)
        return self._epoch(self._batches())

    @property
    def num_batches(self) -> int | None:
        """In an epoch, where it is known."""
        return self._source.num_batches

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch over all ranks, where it is known."""
        return self._source.batch_size

    def on_epoch_begin(self) -> None:
        """Notify the data set."""
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notify the data set."""
        self._source.on_epoch_end()

    def _epoch(self, batches: Iterator[tuple[Any, Share]]) -> Iterator[Any]:
        same_randomness(self._world)  # what ran since the iterator was made may have drawn some here alone
        if self.history is not None:
            self.history.clear()
        step = 0
        while True:
            problem: Exception | None = None
            found = None
            try:
                found = next(batches, None)
            except Exception as error:
                problem = error
            state = _FAILED if problem else _END if found is None else _BATCH
            own_share = found[1] if found else Share(0, 0, 0)
            table = self._world.table([state, own_share.total, own_share.samples, own_share.mark])
            if problem:
                raise problem
            self._check(table, step)
            if found is None:
                if _backend() == "tensorflow":  # whose trainer knows no other end of a data set
                    raise import_module("tensorflow").errors.OutOfRangeError(None, None, "The end.")
                return
            batch, part = found
            if not self._distribute:
                counts = table[:: self._world.stages, 2]
                part = Share(int(counts[: self._world.part].sum()), part.samples, int(counts.sum()))
            if self.history is not None:
                self.history.append(part)
            self._on_share(part)
            yield batch
            step += 1

    def _check(self, table: np.ndarray, step: int) -> None:
        """All ranks are at the same batch, and it can be trained on."""
        states, totals = table[:, 0], table[:, 1]
        failed = np.flatnonzero(states == _FAILED).tolist()
        if failed:
            raise InvalidCall(
                f"The data set failed in batch {step} on {ranks(failed, small=True)}.",
                "See the error of that rank; the others stop with it.",
            )
        ended = np.flatnonzero(states == _END).tolist()
        if ended and len(ended) < self._world.size:
            raise InvalidCall(
                f"The data set ended after {step} batches on {ranks(ended, small=True)}, but not on "
                "the others.",
                "Give all ranks data sets of one length, or state steps_per_epoch.",
            )
        if not self._distribute or ended:
            return
        differing = np.flatnonzero(totals != totals[0]).tolist()
        if differing:
            raise InvalidCall(
                f"Batch {step} has {totals[0]} samples on rank 0, but {totals[differing[0]]} on "
                f"{ranks(differing, small=True)}.",
                "Give all ranks the same data set and global batch size; each takes its share of it.",
            )
        differing = np.flatnonzero(table[:, 3] != table[0, 3]).tolist()
        if differing:
            raise InvalidCall(
                f"Batch {step} has other samples on {ranks(differing, small=True)} than on rank 0.",
                "Give all ranks the same data set in the same order: seed alike what shuffles it.",
            )
        if self._largest is not None and totals[0] > self._largest:
            raise _other_size(int(totals[0]), self._largest)
        if self._training and step == 0 and totals[0] < self._world.parts:
            raise too_small(int(totals[0]), self._world.parts)

    def _batches(self) -> Iterator[tuple[Any, Share]]:
        """Shares of batches with what they are."""
        rank, size = (self._world.part, self._world.parts) if self._distribute else (0, 1)
        marked = self._distribute and self._world.size > 1
        if _backend() == "tensorflow":
            if isinstance(self._source, _adapters.TFDatasetAdapter):
                loader = self._source.get_tf_dataset()
            else:
                loader = self._source.get_numpy_iterator()
            return (_cut(batch, rank, size, marked) for batch in iter(loader))
        loader = self._source.get_torch_dataloader()
        if size > 1 and _by_index(loader):
            if self._divided is None or not loader.persistent_workers:
                # Arrays give the same sample each time; a data set of one's own may change it at random.
                arrays = isinstance(self._source, _adapters.ArrayDataAdapter)
                fetch = loader.dataset.__getitems__ if arrays else None
                sampler = _ShareSampler(
                    loader.batch_sampler, rank, size, fetch and (lambda at: _first(fetch(at)))
                )
                self._divided = sampler, _with_sampler(loader, sampler)
            sampler, divided = self._divided
            shares = iter(divided)
            return ((batch, sampler.drawn.popleft()) for batch in shares)
        return (_cut(batch, rank, size, marked) for batch in iter(loader))


def _cut(batch: Any, rank: int, size: int, marked: bool) -> tuple[Any, Share]:
    part = share(length(batch), rank, size, mark_of(batch) if marked else 0)
    return (batch if size == 1 else rows(batch, part)), part


class _ShareSampler:
    """Of each batch's indices those of this rank; `drawn` says what the shares are, in order.

    Args:
        batches: Lists of indices.
        rank: This rank,
        size: of so many.
        sample: Of a list of indices what they stand for, where all ranks must find the same.
    """

    def __init__(
        self, batches: Any, rank: int, size: int, sample: Callable[[Any], Any] | None = None
    ) -> None:
        self._batches, self._rank, self._size, self._sample = batches, rank, size, sample
        self.drawn: deque[Share] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        self.drawn.clear()  # of an epoch that was left before its end
        for indices in self._batches:
            first = indices[0] if self._sample is None else self._sample(indices[:1])
            part = share(len(indices), self._rank, self._size, _mark(first))
            self.drawn.append(part)
            yield indices[part.begin : part.begin + part.samples] or indices[:1]

    def __len__(self) -> int:
        return len(self._batches)


def _by_index(loader: Any) -> bool:
    from torch.utils.data import DataLoader, IterableDataset

    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def _with_sampler(loader: Any, sampler: _ShareSampler) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,  # pyright: ignore[reportArgumentType]
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class Dataset:
    """A data set for a training loop that a script writes itself.

        for x, y in Dataset(dataset).distribute_dataset_across_ranks():

    Args:
        dataset: What `fit` takes, in batches of the size over all ranks.
        num_ranks: All, which is meant without it, or 1: then nothing is split.
        rank: This one.
        shuffle_seed: Of no meaning: what shuffles without a seed of its own does so alike on all ranks.
    """

    def __init__(
        self, dataset: Any, num_ranks: int | None = None, rank: int | None = None, shuffle_seed: int = 42
    ) -> None:
        run = world()
        self._data = dataset if isinstance(dataset, tuple) else (dataset,)
        self._world = World(None) if num_ranks == 1 else run
        if num_ranks not in (None, 1, run.size) or rank not in (None, self._world.rank):
            raise InvalidCall(
                f"Rank {run.rank} of {run.size} cannot have the share of {rank} of {num_ranks}.",
                "Leave num_ranks and rank out.",
            )

    def distribute_dataset_across_ranks(
        self, user_micro_batch_size: int | None = None, is_training: bool = True
    ) -> "Batches":
        """This rank's part of every batch; all samples in batches of that size where it is not for training.

        All ranks call it together for training, and go through all that they get together. Every rank gets as
        many batches as there are. Where a batch has less samples than there are ranks, the last ranks get one
        that does not count: `Optimizer` knows the share.

        Args:
            user_micro_batch_size: Samples in a full batch on each rank; single samples become batches then.
            is_training: If not, each rank goes through all samples by itself, so that its metrics are those
                of all.

        Raises:
            InvalidCall: Batches that are too small for the ranks, data of an unknown kind.
        """
        size, micro = self._world.size, user_micro_batch_size
        if not is_training:
            source = self._adapted(micro)
            return Batches(lambda: _in_pieces(source, micro, world().size), None)
        whole = None if micro is None else micro * size
        found: list[Shares] = []

        def prepare() -> None:
            take = self._take if size == world().size else lambda part: None
            found.append(Shares(self._adapted(whole), self._world, take, largest=whole, training=True))

        self._world.together(prepare, call="distribute_dataset_across_ranks", user_micro_batch_size=micro)
        return Batches(lambda: _of_epoch(found[0]), found[0].num_batches)

    def _adapted(self, batch_size: int | None) -> Any:
        if batch_size is not None and batch_size < 1:
            raise InvalidCall(f"user_micro_batch_size times ranks is {batch_size}.", "Give at least 1.")
        data = self._data if batch_size is None else (batched(self._data[0], batch_size), *self._data[1:])
        return adapt(*data, batch_size=batch_size if hasattr(data[0], "shape") else None)

    def _take(self, part: Share) -> None:
        loop().take(part.samples, part.total)


class Batches:
    """What a training loop goes through, once for every epoch."""

    def __init__(self, epoch: Callable[[], Iterator[Any]], count: int | None) -> None:
        self._epoch, self._count = epoch, count

    def __iter__(self) -> Iterator[Any]:
        return self._epoch()

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("The number of batches is not known.")
        return self._count


def _of_epoch(shares: Shares) -> Iterator[Any]:
    """The shares of an epoch, which ends in Python's way on every backend."""
    shares.on_epoch_begin()
    ends = (import_module("tensorflow").errors.OutOfRangeError,) if _backend() == "tensorflow" else ()
    batches = iter(shares)
    while True:
        try:
            batch = next(batches, None)
        except ends:
            batch = None
        if batch is None:
            break
        yield batch
    loop().rest()
    shares.on_epoch_end()


def _in_pieces(source: Any, micro: int | None, size: int) -> Iterator[Any]:
    """All batches, in pieces as large as a rank's share of them."""
    for batch in _of_epoch(Shares(source, World(None), lambda part: None)):
        total = length(batch)
        most = micro or share(total, 0, size).samples
        for begin in range(0, total, most):
            yield rows(batch, Share(begin, min(most, total - begin), total))


def adapt(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool | str = False,
    class_weight: Any = None,
) -> Any:
    """Keras' adapter for a data set. Raises InvalidCall for what is none."""
    try:
        return _adapters.get_data_adapter(
            x, y, sample_weight, batch_size, steps, bool(shuffle) and shuffle, class_weight
        )
    except ValueError as error:
        if "Unrecognized data type" not in str(error):
            raise
        raise InvalidCall(
            f"An object of type {type(x).__name__} is not a data set.", f"Give {KINDS}."
        ) from None


def batched(data: Any, size: int) -> Any:
    """A `tf.data.Dataset` of single samples in batches of `size`; all else as it is."""
    tf = sys.modules.get("tensorflow")
    if tf is None or not isinstance(data, tf.data.Dataset) or _has_batches(data):
        return data
    return data.batch(size)


def _has_batches(data: Any) -> bool:
    """Whether a data set, or one that it was made from, was set to make batches."""
    name = type(data).__name__
    if "Unbatch" in name:
        return False
    return "Batch" in name or any(_has_batches(source) for source in data._inputs())


def split_for_validation(data: tuple[Any, Any, Any], fraction: float) -> tuple[Any, Any]:
    """Arrays without their last `fraction`, and that fraction."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves):
        raise InvalidCall(
            "validation_split works on arrays only.", "Give validation_data with this kind of data set."
        )
    begin = int(leaves[0].shape[0] * (1 - fraction))
    if not 0 < begin < leaves[0].shape[0]:
        raise InvalidCall(
            f"validation_split={fraction} leaves no samples for training or for validation.",
            "Give a fraction between 0 and 1 that leaves some for both.",
        )

    def cut(part: slice) -> Any:
        return keras.tree.map_structure(lambda leaf: leaf if leaf is None else leaf[part], data)

    return cut(slice(begin)), cut(slice(begin, None))


def too_small(batch_size: int, size: int) -> InvalidCall:
    """The error for a global batch that leaves ranks with nothing."""
    return InvalidCall(
        f"A global batch of {batch_size} is too small for {size} ranks: "
        f"{ranks(list(range(batch_size, size)), small=True)} would have nothing to do.",
        f"Use a batch size of {size} or more, or fewer ranks.",
    )


def _other_size(found: int, expected: int) -> InvalidCall:
    return InvalidCall(
        f"The data set comes in batches of {found} samples, but the micro-batch size asks for {expected} "
        "over all ranks.",
        "Make both agree, or leave one of them out.",
    )


def same_randomness(world: World) -> None:
    """Let all ranks shuffle alike: rank 0's state of the random generators is given to all."""
    if world.size == 1:
        return
    torch = _torch()
    states = [random.getstate(), np.random.get_state(), torch and torch.get_rng_state().numpy()]
    own = np.frombuffer(pickle.dumps(states), np.uint8)
    size = world.broadcast(np.array([own.size]))
    whole = own.copy() if world.is_master else np.empty(size[0], np.uint8)
    master_states = pickle.loads(world.broadcast(whole).tobytes())
    random.setstate(master_states[0])
    np.random.set_state(master_states[1])
    if torch:
        torch.set_rng_state(torch.from_numpy(master_states[2].copy()))


def _torch() -> Any:
    """PyTorch, where it is what Keras runs on."""
    return import_module("torch") if _backend() == "torch" else None


def _backend() -> str:
    return keras.backend.backend()
