"""Training by a library above PyTorch that chooses its backend itself; says what the model became.

Argument: lightning, trainer (of transformers), accelerate; or lightning_named, which names the backend.
"""

# pyright: reportOptionalMemberAccess=false, reportMissingImports=false, reportPrivateImportUsage=false

import hashlib
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

how = sys.argv[1]
ranks = int(os.environ["WORLD_SIZE"])  # which Lightning takes away
warnings.simplefilter("ignore")
os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
folder = tempfile.mkdtemp()
torch.manual_seed(3)
torch.set_num_threads(1)
x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def with_lightning() -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            self.log("seen", torch.tensor(index + 1), sync_dist=True)
            self.log("ranks", 1, sync_dist=True, reduce_fx="sum")
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = DDPStrategy(process_group_backend="carme") if how == "lightning_named" else "ddp"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(x, y), batch_size=8))
    assert trainer.callback_metrics["ranks"] == dist.get_world_size()
    assert trainer.callback_metrics["seen"] == 4, trainer.callback_metrics


def with_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.model(inputs)
            return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=5, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", disable_tqdm=True, learning_rate=0.05, logging_steps=2,
    )  # fmt: skip

    class Samples(Dataset[dict[str, torch.Tensor]]):
        def __init__(self, count: int) -> None:
            self.count = count

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"inputs": x[index], "labels": y[index]}

    trainer = Trainer(Classifier(), arguments, train_dataset=Samples(len(x)), eval_dataset=Samples(10))
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def with_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(x, y), batch_size=8)
    wrapped, optimizer, data = accelerator.prepare(model, optimizer, data)
    for inputs, labels in data:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(wrapped(inputs), labels))
        optimizer.step()
    seen = accelerator.gather(torch.tensor([accelerator.process_index]))
    threes = accelerator.reduce(torch.tensor([3]), reduction="sum")
    assert isinstance(seen, torch.Tensor) and seen.tolist() == list(range(accelerator.num_processes))
    assert isinstance(threes, torch.Tensor) and threes.tolist() == [3 * ranks]


{"lightning": with_lightning, "trainer": with_trainer, "accelerate": with_accelerate}[how.partition("_")[0]]()
assert dist.is_initialized() and dist.get_world_size() == ranks
state = torch.cat([p.detach().flatten() for p in model.parameters()])
print("BACKEND", dist.get_backend())
print("RESULT", hashlib.sha256(state.numpy().tobytes()).hexdigest())
dist.destroy_process_group()
