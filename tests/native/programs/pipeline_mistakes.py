"""What users get wrong with pipelines, and a stage that ends in the middle of training."""

import itertools
import os
import re
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from carme_runtime import CarmeRuntimeError
from carme_runtime.checkpoint import Checkpoints
from carme_runtime.collectives import Group
from carme_runtime.collectives.mailboxes import Mailboxes
from carme_runtime.torch import pipeline

torch.set_num_threads(1)
INPUTS, TARGETS = torch.randn(12, 4), torch.randint(0, 3, (12,))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 3))


def make(module: Any = None, **options: Any) -> Any:
    module = module or model()
    optimizer = torch.optim.SGD(options.pop("of", module).parameters(), 0.1)
    return pipeline(module, optimizer, **{"example": INPUTS, **options})


def refused(sentence: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except CarmeRuntimeError as error:
        assert sentence in str(error) and error.remedy, str(error)
        return
    raise AssertionError(f"no error says: {sentence}")


def dropping(share: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(share), nn.Linear(4, 3))


def settings() -> None:
    rank = dist.get_rank()
    share = 0.1 + 0.4 * rank
    refused("settings of layers differ", lambda: make(dropping(share)))
    refused("settings of layers differ", lambda: make(dropping(share), whole_layers=["1"]))

    def optimized(kind: type[torch.optim.Optimizer], rate: float) -> Any:
        chosen = dropping(0.1)
        return pipeline(chosen, kind(chosen.parameters(), lr=rate), example=INPUTS, stages=2, micro_batches=2)  # pyright: ignore

    refused("different optimizers", lambda: optimized([torch.optim.SGD, torch.optim.Adam][rank], 0.1))
    refused("different optimizers", lambda: optimized(torch.optim.SGD, 0.1 + 0.1 * rank))
    torch.manual_seed(rank)  # ranks may begin with other numbers: they get those of rank 0
    for whole in ([], ["1"]):
        make(dropping(0.1), stages=2, micro_batches=2, whole_layers=whole)
    optimized(torch.optim.Adam, 0.1)


def mistakes() -> None:
    refused("2 ranks do not divide into pipelines of 3 stages. Use stages=2", lambda: make(stages=3))
    refused("Use micro_batches=4, or another", lambda: make(stages=2, micro_batches=5))
    refused(
        "at 2 places, which is too few for 4 pieces. Use stages=1",
        lambda: make(stages=2, micro_batches=2, schedule="interleaved"),
    )
    refused("no schedule 'fast'", lambda: make(stages=2, schedule="fast"))
    refused("stages='2' is not a whole number", lambda: make(stages="2"))
    refused("micro_batches=2.0 is not a whole number", lambda: make(micro_batches=2.0))
    refused("The model is a function", lambda: make(lambda x: x, of=model()))
    refused("The optimizer is a NoneType", lambda: pipeline(model(), None, example=INPUTS))  # pyright: ignore
    refused("no layer 'nine' to cut at. Its layers are 0, 1, 2, 3", lambda: make(cut_points=["nine"]))
    refused("begin with layer '1'", lambda: make(cut_points=["1"], micro_batches=2))
    refused("A stage needs", lambda: make(stages=2, micro_batches=2, memory="0.5K"))
    refused("is not a size of memory", lambda: make(memory="much"))
    refused("no batch_norm='whole'", lambda: make(batch_norm="whole"))
    refused("parameters that the model does not have", lambda: make(of=nn.Linear(2, 2)))
    refused("Ranks have different models", lambda: make(model()[: 4 - dist.get_rank()]))
    settings()

    refused(
        "Ranks requested different pipelines", lambda: make(stages=2, micro_batches=2 + 2 * dist.get_rank())
    )

    refused("no strategy 'fast'", lambda: make(strategy="fast"))
    refused("2 ranks cannot train as a hybrid", lambda: make(strategy="hybrid"))
    refused("exclude each other with 2 ranks. Use stages=1", lambda: make(stages=2, strategy="data"))
    refused("Call model.train() before pipeline()", lambda: make(model().eval()))
    cannot_run = "The model fails with the example" if dist.get_rank() == 0 else "Rank 0 could not measure"
    refused(cannot_run, lambda: make(stages=2, example=torch.randn(12, 5)))
    calls()
    nothing_is_dropped()

    tested, optimizer = make(stages=2, micro_batches=4)
    loss = functional.cross_entropy
    refused("has samples of shape [5]", lambda: tested.step(torch.randn(12, 5), TARGETS, loss=loss))
    refused("type float64", lambda: tested.step(INPUTS.double(), TARGETS, loss=loss))
    refused("targets have 8 samples, and the inputs 12", lambda: tested.step(INPUTS, TARGETS[:8], loss=loss))
    refused("13 samples, and the example had 12", lambda: tested.step(torch.randn(13, 4), TARGETS, loss=loss))
    refused("The batch has 2 tensors", lambda: tested.step((INPUTS, INPUTS), TARGETS, loss=loss))
    count = 12 - dist.get_rank()
    refused("got batches of [12, 11]", lambda: tested.step(INPUTS[:count], TARGETS[:count], loss=loss))
    assert float(tested.step(INPUTS, TARGETS, loss=loss)) > 0  # none of them did any harm
    weighted = tested.step(INPUTS, (TARGETS, torch.ones(3)), loss=lambda y, t: loss(y, t[0], weight=t[1]))
    assert float(weighted) > 0  # what counts classes is no mistake
    optimizer.step()
    tested.close()


class Unused(nn.Module):
    """Seven layers, and one that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)))
        self.extra = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def nothing_is_dropped() -> None:
    """Uneven layers are all in one stage or the other, and layers that nobody calls stay in the state."""
    torch.manual_seed(0)
    module = Unused()
    names = list(module.state_dict())
    tested, _ = make(module, stages=2, micro_batches=4)
    assert sum(stage.operators for stage in tested.plan().stages) == len(tested.plan().graph.operators) == 7
    assert list(tested.state_dict()) == (names if dist.get_rank() == 0 else [])
    tested.close()


class OtherInEvaluation(nn.Module):
    """Leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = model(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return self.head(x) if self.training else x


class Mean(nn.Module):
    """Its output does not count samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean()


def calls() -> None:
    """What is wrong with calls of a pipeline."""
    tested, _ = make(stages=2, micro_batches=4)
    wants = INPUTS.clone().requires_grad_()
    refused("wants a gradient", lambda: tested(wants))
    refused("13 samples, and the example had 12", lambda: tested(torch.randn(13, 4)))
    outputs = tested(INPUTS)
    outputs.sum().backward(retain_graph=True)
    refused("A second backward pass", lambda: outputs.sum().backward())
    refused("The state lacks", lambda: tested.load_state_dict({}))
    refused("The model is in evaluation", lambda: tested.eval().step(INPUTS, TARGETS, loss=None))
    tested.train().close()
    peer, _ = make(OtherInEvaluation(), stages=2, micro_batches=4)
    refused("In evaluation the model does something else", lambda: peer.eval()(INPUTS))
    assert float(peer.train().step(INPUTS, TARGETS, loss=functional.cross_entropy)) > 0
    peer.close()
    scalar, _ = make(Mean(), stages=2, micro_batches=4)
    refused("cannot be put together. Use step()", lambda: scalar(INPUTS))
    scalar.close()
    partly = model()
    partly[0].requires_grad_(False)
    frozen, _ = make(partly, stages=2, micro_batches=4, cut_points=["2"])
    frozen.step(INPUTS, TARGETS, loss=functional.cross_entropy)
    partly[0].requires_grad_(True)
    refused("0.bias was frozen", lambda: frozen.step(INPUTS, TARGETS, loss=functional.cross_entropy))
    refused("0.bias was frozen", lambda: frozen(INPUTS))
    partly[0].requires_grad_(False)
    frozen.step(INPUTS, TARGETS, loss=functional.cross_entropy)
    frozen.close()
    unfrozen_with_a_harmless_one()


def unfrozen_with_a_harmless_one() -> None:
    """The sentence names the layer whose gradient is lost, not the one behind the cut that may be trained."""
    layers = {"first": nn.Linear(4, 4), "middle": nn.Linear(4, 4), "a_head": nn.Linear(4, 3)}
    module = nn.Sequential(OrderedDict(layers))
    for name in ("first", "a_head"):
        layers[name].requires_grad_(False)
    frozen, _ = make(module, stages=2, micro_batches=4, cut_points=["middle"])
    module.requires_grad_(True)
    refused("first.bias was frozen", lambda: frozen.step(INPUTS, TARGETS, loss=functional.cross_entropy))
    layers["first"].requires_grad_(False)
    frozen.step(INPUTS, TARGETS, loss=functional.cross_entropy)
    frozen.close()


def sparse() -> None:
    """The first stage has sparse gradients, which cannot be summed over replicas: all ranks say so."""
    torch.manual_seed(0)
    layers = [nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 3)]
    words = torch.randint(0, 5, (12, 2))
    tested, _ = make(nn.Sequential(*layers), example=words, stages=2, micro_batches=2, cut_points=["2"])
    refused("A gradient is sparse", lambda: tested.step(words, TARGETS, loss=functional.cross_entropy))
    refused("A gradient is sparse", lambda: functional.cross_entropy(tested(words), TARGETS).backward())
    tested.close()


def lost() -> None:
    """Rank 1 ends; all others say so, within a second at one of several tries."""
    tested, _ = make(stages=3, micro_batches=4)
    ended = Path(sys.argv[2])
    if dist.get_rank() == 1:
        puts, put = itertools.count(), Mailboxes.put

        def dying(*arguments: Any) -> None:
            if next(puts) == 19:  # in the middle of the third step
                ended.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            put(*arguments)

        setattr(Mailboxes, "put", dying)  # noqa: B010
    for _ in range(1000):
        try:
            tested.step(INPUTS, TARGETS, loss=functional.cross_entropy)
        except CarmeRuntimeError as error:
            seconds = time.time() - float(ended.read_text())
            known = r"Rank 1 ended while rank (\d) waited for a message from rank 1 "
            assert re.match(rf"{known}\(stage \1, (forward|backward) pass of micro-batch \d\)\.", str(error))
            print(f"LATE {seconds:.3f} s: {error}", flush=True)
            os._exit(0)
    raise AssertionError("rank 1 was not missed")


def checkpoints() -> None:
    """Those of other models and optimizers do not fit, and change nothing."""
    tested, optimizer = make(stages=2, micro_batches=4)
    folder = Checkpoints(sys.argv[2])
    folder.save(1, model=tested, optimizer=optimizer, epoch=3).wait()
    wide = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5), nn.Linear(5, 3))
    peer, _ = make(wide, stages=2, micro_batches=4)
    before = [parameter.detach().clone() for parameter in peer.parameters()]
    # The rank whose stage it is names the tensor.
    refused("checkpoint", lambda: folder.resume(model=peer))
    for now, earlier in zip(peer.parameters(), before, strict=True):
        assert torch.equal(now, earlier)
    deep, few = nn.Sequential(*model(), nn.Linear(3, 3)), model()
    longer, _ = make(deep, stages=2, micro_batches=4)
    refused("The checkpoint lacks 4.weight, which the model has", lambda: folder.resume(model=longer))
    shorter, _ = make(model()[:3], stages=2, micro_batches=4)
    refused("The checkpoint has 3.weight, which the model lacks", lambda: folder.resume(model=shorter))
    _, partly = pipeline(
        few, torch.optim.SGD(few[0].parameters(), 0.1), example=INPUTS, stages=2, micro_batches=4
    )
    refused("groups of [6] parameters, and this one of [2]", lambda: folder.resume(optimizer=partly))
    assert folder.resume(model=tested, optimizer=optimizer) == {"step": 1, "epoch": 3}
    assert float(tested.step(INPUTS, TARGETS, loss=functional.cross_entropy)) > 0


def lost_start() -> None:
    """Rank 0 ends while its parameters travel; anyone who needs one of them says so."""
    ended = Path(sys.argv[2])
    if dist.get_rank() == 0:
        begun, broadcast = itertools.count(), Group.broadcast

        def dying(*arguments: Any, **options: Any) -> Any:
            if options.get("asynchronous") and next(begun) == 3:
                ended.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            return broadcast(*arguments, **options)

        setattr(Group, "broadcast", dying)  # noqa: B010
    try:
        tested, _ = make(stages=3, micro_batches=4, start="streamed")
        tested.step(INPUTS, TARGETS, loss=functional.cross_entropy)
    except CarmeRuntimeError as error:
        seconds = time.time() - float(ended.read_text())
        assert re.search(r"[Rr]ank 0 (was lost|ended)", str(error)) and error.remedy, str(error)
        print(f"LATE {seconds:.3f} s: {error}", flush=True)
        os._exit(0)
    raise AssertionError("rank 0 was not missed")


def unlike() -> None:
    """Targets that the loss cannot take: the last stage says so, and the other one that it ended."""
    squares, entropy = functional.mse_loss, functional.cross_entropy
    loss, targets = {
        "wide": (squares, torch.randn(12, 5)),
        "rows": (entropy, TARGETS.view(3, 4).repeat(4, 1)),
        "sums": (lambda y, _: squares(y, 2 * y, reduction="none"), TARGETS),
    }[sys.argv[2]]
    tested, _ = make(stages=2, micro_batches=4)
    try:
        tested.step(INPUTS, targets, loss=loss)
    except CarmeRuntimeError as error:
        assert error.remedy
        print(f"REFUSED {error}", flush=True)
        os._exit(0)
    raise AssertionError("the loss took it")


dist.init_process_group("carme")
actions = {
    "mistakes": mistakes,
    "checkpoints": checkpoints,
    "sparse": sparse,
    "lost": lost,
    "lost start": lost_start,
    "unlike": unlike,
}
actions[sys.argv[1]]()
