"""Fast checkpoints of a training run: each rank writes its share in the background; none is ever half there.

from carme_runtime.checkpoint import Checkpoints

checkpoints = Checkpoints("run-1", keep=3)
values = checkpoints.resume(model=model, optimizer=optimizer) or {"epoch": 0}
for epoch in range(values["epoch"], 10):
    ...
    checkpoints.save(step, model=model, optimizer=optimizer, epoch=epoch + 1)
checkpoints.wait()

Models and optimizers under FSDP are saved and loaded in the same way. For `carme_runtime.keras` there is a
callback, `carme_runtime.keras.callbacks.Checkpoints`.
"""

from carme_runtime.checkpoint.checkpoints import Checkpoints, Saving
from carme_runtime.checkpoint.files import Damaged

__all__ = ["Checkpoints", "Damaged", "Saving"]
