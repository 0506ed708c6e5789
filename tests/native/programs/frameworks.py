"""One step of training with the framework that the first argument names, as its users write it.

No word of where the ranks are: carme-run --backend sets that. Every rank prints `RESULT`, how many ranks the
framework sees, and the weight after the step, which is that of one process over all samples. A second
argument is MXNet's key-value store.
"""

import sys
from typing import Any

SAMPLES, RATE = [1.0, 2.0, 3.0, 4.0], 0.01


def show(ranks, weight):
    # One write, so that the lines of two ranks do not mix.
    sys.stdout.write(f"RESULT {ranks} {float(weight):.5f}\n")
    sys.stdout.flush()


def with_torch():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    share = len(SAMPLES) // dist.get_world_size()
    x = torch.tensor(SAMPLES)[dist.get_rank() * share :][:share, None]
    ((parallel(x) - 3 * x) ** 2).mean().backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    show(dist.get_world_size(), model.weight.detach())
    dist.destroy_process_group()


def with_tensorflow():
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(tf.keras.optimizers.SGD(RATE), "mse")
    x = tf.constant(SAMPLES)[:, None]
    model.fit(tf.data.Dataset.from_tensor_slices((x, 3 * x)).batch(len(SAMPLES)), verbose=0)
    show(strategy.num_replicas_in_sync, model.get_weights()[0].item())


def with_horovod():
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports] - in an image of its own
    import torch

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    share = len(SAMPLES) // hvd.size()
    x = torch.tensor(SAMPLES)[hvd.rank() * share :][:share, None]
    ((model(x) - 3 * x) ** 2).mean().backward()
    optimizer.step()
    show(hvd.size(), model.weight.detach())


def with_mpi():
    from mpi4py import MPI

    ranks, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    share = len(SAMPLES) // ranks
    summed = MPI.COMM_WORLD.allreduce(gradient(0.0, SAMPLES[rank * share :][:share]))
    show(ranks, -RATE * summed / ranks)


def with_jax():
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    own = np.split(np.array(SAMPLES, np.float32), jax.process_count())[jax.process_index()]
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), own)
    gradient = jax.jit(jax.grad(lambda weight, x: jnp.mean((weight * x - 3 * x) ** 2)))(0.0, batch)
    show(jax.process_count(), -RATE * gradient)


def gradient(weight, samples):
    return sum(2 * (weight * x - 3 * x) * x for x in samples) / len(samples)


def with_dask():
    from distributed import Client

    with Client() as client:
        scheduler: Any = client.scheduler
        assert scheduler.address.startswith("tls://")
        workers = sorted(client.scheduler_info()["workers"])
        share = len(SAMPLES) // len(workers)
        answers = [
            client.submit(gradient, 0.0, SAMPLES[number * share :][:share], workers=[worker], pure=False)
            for number, worker in enumerate(workers)
        ]
        found: Any = client.gather(answers)
        show(len(workers), -RATE * sum(found) / len(workers))


def with_ray():
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address="auto")
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    share = len(SAMPLES) // len(nodes)
    task = ray.remote(gradient)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    answers = [
        task.options(scheduling_strategy=place).remote(0.0, SAMPLES[number * share :][:share])
        for number, place in enumerate(places)
    ]
    found = ray.get(answers)
    show(len(nodes), -RATE * sum(found) / len(nodes))


def with_mxnet():
    import mxnet as mx  # pyright: ignore[reportMissingImports] - in an image of its own

    store = mx.kv.create(sys.argv[2] if len(sys.argv) > 2 else "dist_sync")
    share = len(SAMPLES) // store.num_workers
    own = SAMPLES[store.rank * share :][:share]
    store.init("gradient", mx.nd.zeros(1))
    store.push("gradient", mx.nd.array([gradient(0.0, own)]))
    summed = mx.nd.zeros(1)
    store.pull("gradient", out=summed)
    show(store.num_workers, -RATE * summed.asscalar() / store.num_workers)


def with_deepspeed():
    import deepspeed  # pyright: ignore[reportMissingImports] - in an image of its own
    import torch

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    deepspeed.init_distributed()
    ranks = torch.distributed.get_world_size()
    settings = {"train_micro_batch_size_per_gpu": len(SAMPLES) // ranks, "gradient_clipping": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    share = len(SAMPLES) // ranks
    x = torch.tensor(SAMPLES)[engine.global_rank * share :][:share, None]
    engine.backward(((engine(x) - 3 * x) ** 2).mean())
    engine.step()
    show(ranks, engine.module.weight.detach())


def with_accelerate():
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    samples: Any = torch.tensor(SAMPLES)[:, None]  # which has the methods of a Dataset
    batches = torch.utils.data.DataLoader(samples, batch_size=len(SAMPLES) // accelerator.num_processes)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for x in batches:
        accelerator.backward(((model(x) - 3 * x) ** 2).mean())
        optimizer.step()
    show(accelerator.num_processes, accelerator.unwrap_model(model).weight.detach())


def with_lightning():
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(self.layer.weight)

        def training_step(self, x):
            return ((self.layer(x) - 3 * x) ** 2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    samples: Any = torch.tensor(SAMPLES)[:, None]  # which has the methods of a Dataset
    batches = torch.utils.data.DataLoader(samples, batch_size=len(SAMPLES) // trainer.world_size)
    model = Model()
    trainer.fit(model, batches)
    show(trainer.world_size, model.layer.weight.detach())


globals()[f"with_{sys.argv[1]}"]()
