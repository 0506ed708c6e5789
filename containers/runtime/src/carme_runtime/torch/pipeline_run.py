"""The ranks of a run as a pipeline uses them, and the graph that they agree on."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import dataclasses
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist

from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall, Mismatch
from carme_runtime.collectives.mailboxes import free_dropped
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.graph import Graph, Links
from carme_runtime.graph.files import from_json, to_json
from carme_runtime.pipeline import Plan
from carme_runtime.pipeline.messages import links_of
from carme_runtime.torch import backend
from carme_runtime.torch.measuring import UNKNOWN, keep_busy, measured
from carme_runtime.torch.parallel import join_run
from carme_runtime.torch.settings import layer_settings, optimizer_settings
from carme_runtime.torch.traced import SelfTraced, Traced


class Run:
    """The ranks of the run, as the pipeline uses them."""

    def __init__(self) -> None:
        join_run()
        self.rank, self.size, self.timeout = 0, 1, -1
        self.context: Any = None
        self.world_group: Group | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            world = dist.group.WORLD
            if not isinstance(world, backend.ProcessGroupCarme):
                raise InvalidCall(
                    f"The run uses the backend {dist.get_backend()}.",
                    'Use torch.distributed.init_process_group("carme"), or none: pipeline() joins by itself.',
                )
            self.timeout = world.limit
            self.context, self.world_group = world.another_group()
            self.rank, self.size = self.world_group.index, self.world_group.size
            free_dropped(self.context, self.world_group, self.timeout)

    def group(self, ranks: Sequence[int]) -> Group | None:
        """Of these ranks; None where this one is alone, or not of them."""
        if len(ranks) < 2 or self.rank not in ranks:
            return None
        return Group(self.context, list(ranks), self.timeout)

    def links(self, device: torch.device) -> Links:
        """What messages of these ranks cost. All call this together; rank 0 alone knows copies within a node.

        Args:
            device: On which the ranks compute.
        """
        return links_of(self.world_group, self.rank, partial(_copying_us, device=device))

    def agreed(
        self,
        traced: Traced,
        example: tuple[torch.Tensor, ...],
        requested: Graph | None,
        samples: tuple[int, ...],
        spare: Callable[[], int],
    ) -> Graph:
        """Rank 0's graph, measured with these numbers of samples, on all ranks.

        Args:
            traced: The model.
            example: What it is called with.
            requested: The graph, where it was measured before.
            samples: Of the example.
            spare: Called by all ranks together: the bytes that each of them may take to run the model.

        Raises:
            Mismatch: A rank has another model.
        """
        found = self.links(example[0].device)
        text, failure = b"", None
        busy: list[bool] = []
        broken: list[BaseException] = []  # no fault of the model: the ranks cannot go on together

        def decide(needed: int) -> None:
            try:
                busy.append(self.minimum(needed) <= spare())
            except BaseException as error:
                broken.append(error)
                raise

        if self.rank == 0:
            text, failure = _as_text(
                lambda: requested or measured(traced, example, samples, before_times=decide), found
            )
        if broken:
            raise broken[0]
        if not busy:
            decide(UNKNOWN)
        self._end_measuring(traced, example, min(samples), busy[0])
        text = self.broadcast(text)
        if failure is not None:
            raise failure
        if not text:
            raise Mismatch("Rank 0 could not measure the model.", "See what it says.")
        graph = from_json(text.decode())
        same = numpy.array([graph.same_model(traced.graph)], numpy.int64)
        if self.world_group:
            self.world_group.allreduce(same, "min", timeout=self.timeout)
        if not same[0]:
            raise Mismatch(
                "The graph is of another model than the one that is to be trained."
                if requested
                else "Ranks have different models.",
                "Make the same model on all ranks. Layers need the same names, too.",
            )
        return graph

    def _end_measuring(
        self, traced: Traced, example: tuple[torch.Tensor, ...], samples: int, busy: bool
    ) -> None:
        """Wait until rank 0, which calls this in the end, has measured; `busy`: compute as in training.

        So it has the part of its node's memory, caches and clock that it has in training, not all of it. It
        measures alone where the memory does not do for all.
        """
        if not self.world_group:
            return
        over = self.world_group.barrier(timeout=self.timeout, asynchronous=True)
        assert over
        if busy and self.rank and example[0].device.type == "cpu":
            with contextlib.suppress(Exception):  # rank 0 reports what is wrong with the model
                keep_busy(traced, example, samples, over.done)
        over.wait()

    def check_same(self, planned: Plan) -> None:
        """Raise Mismatch where ranks have other plans than this one."""
        fits = [(fit.recomputes, fit.spilled_bytes) for fit in planned.fits]
        if not self._is_same_everywhere(
            repr((planned.cuts, planned.schedule, planned.samples, planned.batch_norm, fits))
        ):
            raise Mismatch(
                "Ranks requested different pipelines.",
                "Call pipeline() with the same arguments on all ranks.",
            )

    def check_settings(self, traced: Traced, optimizer: torch.optim.Optimizer) -> None:
        """Raise Mismatch where layers or optimizers of ranks have other settings than here."""
        if not self._is_same_everywhere(layer_settings(traced)):
            raise Mismatch(
                "Ranks have different models: settings of layers differ.",
                "Make the same model on all ranks.",
            )
        # A model that makes its graph itself has an optimizer of its framework, which we do not know.
        if not self._is_same_everywhere(
            "" if isinstance(traced.model, SelfTraced) else optimizer_settings(optimizer)
        ):
            raise Mismatch("Ranks have different optimizers.", "Make the same optimizer on all ranks.")

    def _is_same_everywhere(self, text: str) -> bool:
        """Whether all ranks have the same text."""
        checksum = zlib.crc32(text.encode())
        bounds = numpy.array([checksum, -checksum], numpy.int64)
        if self.world_group:
            self.world_group.allreduce(bounds, "min", timeout=self.timeout)
        return bool(bounds[0] == -bounds[1])

    def broadcast(self, text: bytes, root: int = 0) -> bytes:
        """What rank `root` gives, on all ranks."""
        if not self.world_group:
            return text
        size = numpy.array([len(text)], numpy.int64)
        self.world_group.broadcast(size, root, timeout=self.timeout)
        content = numpy.zeros(max(int(size[0]), 1), numpy.uint8)
        if self.rank == root:
            content[: len(text)] = numpy.frombuffer(text, numpy.uint8)
        self.world_group.broadcast(content, root, timeout=self.timeout)
        return content.tobytes()[: int(size[0])]

    def gathered(self, number: int) -> list[int]:
        """The numbers of all ranks, by rank."""
        numbers = numpy.array([number], numpy.int64)
        if not self.world_group:
            return numbers.tolist()
        by_rank = numpy.zeros(self.size, numpy.int64)
        self.world_group.allgather(by_rank, numbers, timeout=self.timeout)
        return by_rank.tolist()

    def minimum(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        numbers = numpy.array([number], numpy.int64)
        if self.world_group:
            self.world_group.allreduce(numbers, "min", timeout=self.timeout)
        return int(numbers[0])


def _as_text(graph: Callable[[], Graph], links: Links) -> tuple[bytes, BaseException | None]:
    """A graph with links between devices as text, or what is to be raised after others have heard of it."""
    try:
        return to_json(dataclasses.replace(graph(), links=links)).encode(), None
    except CarmeRuntimeError as error:
        return b"", error
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        failure = InvalidCall(
            f"The model fails with the example: {first}",
            "Give an example that the model can be called with.",
        )
        failure.__cause__ = error
        return b"", failure
    except BaseException as error:
        return b"", error


def _copying_us(size: int, device: torch.device) -> float:
    source, times = torch.ones(size, dtype=torch.uint8, device=device), []
    target = torch.empty(size, dtype=torch.uint8)
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)  # into a slot, and from there into the receiver's
        source.copy_(target)
        times.append((time.perf_counter() - began) * 1e6)
    return sorted(times)[2] + 20.0  # with the call and the notification
