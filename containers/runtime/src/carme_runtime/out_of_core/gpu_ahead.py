"""What a GPU's blocks do ahead of need: which leave before their room is needed, and which come.

Python launches kernels and copies long before the GPU carries them out, so how far the GPU has come says
nothing here. All is counted in the order of the launches.
"""

from operator import attrgetter

from carme_runtime.out_of_core.gpu_store import GpuStore
from carme_runtime.out_of_core.steps import Steps
from carme_runtime.out_of_core.trace import NEVER, Trace

_SLACK = 1.5  # a block is fetched so much earlier than the link should need
_SLACK_SECONDS = 0.002
_DEPTH = 256 << 20  # bytes that are fetched before they are used, at most
_SOON = 24  # operations whose results find room beforehand


class Growth:
    """How the bytes that are alive grow in a recorded step, wherever they are.

    Args:
        trace: The step.

    Attributes:
        to_peak: From the end of each operation to the most that is alive at a time, one step further at most.
        peak_at: The operation that has the most.
        soon: From the end of each operation to the most within the next `_SOON` operations.
    """

    def __init__(self, trace: Trace) -> None:
        operations, sizes = trace.operations, trace.sizes
        made_in_step = set(trace.made_at)
        died = {label for operation in operations for label in operation.dies}
        # What a step leaves to the next one is gone there some time.
        left = sum(sizes.get(label, 0) for label in made_in_step - died)
        whiles, afters, alive = [], [], 0
        for place, operation in enumerate(operations):
            if place == trace.leftovers_end:
                alive -= left
            whiles.append(alive + operation.made_bytes + operation.workspace)
            alive += operation.made_bytes
            alive -= sum(sizes.get(label, 0) for label in operation.dies if label in made_in_step)
            afters.append(alive)
        most = max(whiles, default=0)
        self.peak_at = whiles.index(most) if whiles else 0
        self.to_peak = [max(most - after, 0) for after in afters]
        further = whiles + [each + alive for each in whiles[:_SOON]]
        self.soon = [
            max(max(further[place + 1 : place + 1 + _SOON], default=0) - after, 0)
            for place, after in enumerate(afters)
        ]


class Ahead:
    """Looks ahead after each launch of a step that goes as the last one went.

    Args:
        steps: Of the program.
        store: Of the GPU.
    """

    def __init__(self, steps: Steps, store: GpuStore) -> None:
        self._steps, self._store = steps, store
        self._growth: Growth | None = None
        self._of: object = None

    def plan_moves(self) -> None:
        """Let blocks leave for what will be made, and blocks come that are used soon."""
        steps, store = self._steps, self._store
        trace = steps.trace
        if trace is None or not steps.in_step or steps.position < 0:
            return
        if self._growth is None or self._of is not trace.operations:
            self._growth, self._of = Growth(trace), trace.operations
        place = steps.position
        if place == trace.leftovers_end:
            steps.bury(store.collect())
        elif dies := trace.operations[place - 1].dies:
            steps.bury(store.collect_of(steps.blocks_of(dies)))
        self._leave(trace, self._growth)
        if store.absent:
            self._fetch(trace)

    def _leave(self, trace: Trace, growth: Growth) -> None:
        steps, store = self._steps, self._store
        place = steps.position
        room = store.expected_free()
        short = growth.soon[place] - room
        if short > 0:
            room += store.leave_ahead(short, steps.now, _SOON)
        to_peak = (growth.peak_at - place - 1) % len(trace) + 1
        # What is away, and is used before then, comes until then.
        until = steps.now + to_peak
        coming = sum(block.size for block in store.absent if block.next_use <= until)
        short = growth.to_peak[place] + coming - room
        if short > 0:
            store.leave_ahead(short, steps.now, to_peak)

    def _fetch(self, trace: Trace) -> None:
        steps, store = self._steps, self._store
        depth = min(store.capacity // 4, _DEPTH)
        queued = store.unused_bytes()
        while store.absent and queued < depth:
            block = min(store.absent, key=attrgetter("next_use"))
            if block.next_use == NEVER:
                return
            distance = block.next_use - steps.now
            wrapped, place = divmod(steps.position + int(distance), len(trace))
            until = trace.clock[place] + wrapped * trace.seconds - trace.clock[steps.position + 1]
            if until > _SLACK * (queued + block.size) / store.file.read_rate + _SLACK_SECONDS:
                return
            short = block.size - store.expected_free()
            if short > 0 and store.leave_ahead(short, steps.now, distance) < short:
                return
            if not store.fetch_ahead(block):
                return
            queued += block.size
