"""How long a plan of DenseNet-121 takes for four ranks, with everything chosen; prints JSON.

Its operators and its depth decide that, so channels are few and images small. Seconds are those of the
processor: measuring the model is not counted to the plan.
"""

import json
import time
from typing import Any

import pipeline_models
import torch

from carme_runtime.pipeline import Plan, Request, plan
from carme_runtime.torch import trace

RANKS, SAMPLES = 4, 16


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = pipeline_models.DenseNet()
    began = time.process_time()
    costs = trace(model, torch.randn(SAMPLES, 3, 64, 64), seconds=1.0)
    traced = time.process_time() - began
    began = time.process_time()
    free = plan(costs, Request(RANKS, SAMPLES, may_recompute=True))
    took = [time.process_time() - began]
    # Half of what one rank needs for the whole model: stages, micro-batches and recomputation are searched.
    memory = free.stages[0].memory_bytes // 2
    began = time.process_time()
    tight = plan(costs, Request(RANKS, SAMPLES, memory=memory, may_recompute=True))
    took.append(time.process_time() - began)
    found = {"operators": len(costs.operators), "traced_s": traced, "plan_s": max(took)}
    found |= {"free": _shown(free), "tight": _shown(tight), "memory": memory}
    print(json.dumps(found))


def _shown(found: Plan) -> dict[str, Any]:
    return {
        "stages": found.schedule.ranks,
        "micro_batches": found.schedule.micro_batches,
        "memory": [stage.memory_bytes for stage in found.stages],
    }


if __name__ == "__main__":
    main()
