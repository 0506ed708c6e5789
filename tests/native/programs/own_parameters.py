"""A pipeline that was just made leaves nothing to the garbage collector: not the weights of other stages."""

import gc

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.out_of_core import pages
from carme_runtime.torch import pipeline, trace

torch.set_num_threads(1)
dist.init_process_group("carme")
layers = [nn.TransformerEncoderLayer(512, 4, 1024, 0.0, batch_first=True, norm_first=True) for _ in range(3)]
model, example = nn.Sequential(*layers), torch.ones(4, 8, 512)
weights = sum(p.numel() * p.element_size() for p in model.parameters())
optimizer = torch.optim.AdamW(model.parameters())
gc.collect()
gc.disable()
graph = trace(model, example, seconds=0.1)
tested, optimizer = pipeline(model, optimizer, example=example, stages=2, micro_batches=2, graph=graph)
pages.trim()
before = pages.resident()
gc.collect()
pages.trim()
freed = before - pages.resident()
print(f"{freed >> 10} KiB of {weights >> 10} KiB were freed", flush=True)
assert freed < weights / 4
tested.close()
dist.destroy_process_group()
