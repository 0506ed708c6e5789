"""JAX: a step compiled over all ranks' devices, each with its share of the batch."""

# JAX is optional.
# pyright: reportMissingImports=false

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from carme_runtime.compare.layers import EPSILON, Layer
from carme_runtime.compare.programs import Gradients, Mark, Step, Work
from carme_runtime.compare.tasks import MOMENTUM

VERSIONS = ("jax", "jaxlib")


def prepare(work: Work) -> tuple[Step, Gradients]:
    """The step of one rank, and the first one's gradients."""
    inputs, targets = map(work.batches, work.task.share(work.rank, work.ranks))
    layers, initial = work.task.network.layers, work.task.weights
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rate, is_bf16 = work.task.network.rate, work.is_bf16
    # user: begin
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("ranks",))
    shared, split = PartitionSpec(), PartitionSpec("ranks")

    def globally(value: Any, where: PartitionSpec) -> Any:
        return jax.make_array_from_process_local_data(NamedSharding(mesh, where), value)

    def loss_of(weights: Any, x: Any, y: Any) -> Any:
        if is_bf16:
            weights, x = jax.tree.map(lambda value: value.astype(jnp.bfloat16), (weights, x))
        logits = forward(layers, weights, x).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)
        return -chosen.mean()

    def train(weights: Any, velocities: Any, x: Any, y: Any) -> Any:
        found = jax.value_and_grad(loss_of)(weights, x, y)
        if jax.default_backend() == "cpu":
            # There JAX reduces each array by itself, and ranks wait for each other every time.
            own, unflatten = ravel_pytree(found)
            loss, gradients = unflatten(jax.lax.pmean(own, "ranks"))
        else:
            loss, gradients = jax.lax.pmean(found, "ranks")
        velocities = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocities, gradients)
        weights = jax.tree.map(lambda w, v: w - rate * v, weights, velocities)
        return weights, velocities, loss

    places = (shared, shared, split, split)
    sharded = jax.shard_map(train, mesh=mesh, in_specs=places, out_specs=shared, check_vma=False)
    compiled = jax.jit(sharded, donate_argnums=(0, 1))
    weights = {name: globally(value, shared) for name, value in initial.items()}
    velocities = jax.tree.map(jnp.zeros_like, weights)

    def step(number: int, mark: Mark) -> float:
        nonlocal weights, velocities
        x, y = globally(inputs[number], split), globally(targets[number], split)
        mark("input")
        weights, velocities, loss = compiled(weights, velocities, x, y)
        return float(loss)

    # user: end
    return step, lambda: ((name, np.asarray(value)) for name, value in velocities.items())


def forward(layers: tuple[Layer, ...], weights: Any, values: Any) -> Any:
    """The network's result."""
    for layer in layers:
        values = _join(layer, weights, values) if layer.branches else _apply(layer, weights, values)
    return values


def _join(layer: Layer, weights: Any, values: Any) -> Any:
    parts = [forward(branch, weights, values) for branch in layer.branches]
    return jnp.concatenate(parts, -1) if layer.kind == "concat" else sum(parts[1:], parts[0])


def _apply(layer: Layer, weights: Any, values: Any) -> Any:
    def dense(name: str) -> Any:
        return values @ weights[f"{name}.kernel"] + weights[f"{name}.bias"]

    name, kind, half = layer.name, layer.kind, (layer.padding, layer.padding)
    if kind == "dense":
        return dense(name)
    if kind == "conv":
        order = ("NHWC", "HWIO", "NHWC")
        kernel, strides = weights[f"{name}.kernel"], (layer.stride, layer.stride)
        return (
            jax.lax.conv_general_dilated(values, kernel, strides, (half, half), dimension_numbers=order)
            + weights[f"{name}.bias"]
        )
    if kind == "relu":
        return jax.nn.relu(values)
    if kind == "pool":
        window, strides = ((1, number, number, 1) for number in (layer.size, layer.stride))
        padding = ((0, 0), half, half, (0, 0))
        return jax.lax.reduce_window(values, -jnp.inf, jax.lax.max, window, strides, padding)
    if kind == "up":
        return values.repeat(2, 1).repeat(2, 2)
    if kind == "pixels":
        return values
    if kind == "flatten":
        return values.reshape(len(values), -1)
    if kind == "mean":
        return values.mean(tuple(range(1, values.ndim - 1)))
    if kind == "attention":
        return _attend(layer, weights, values)
    axes = -1 if kind == "layer_norm" else tuple(range(values.ndim - 1))
    normal = jax.nn.standardize(values, axes, epsilon=EPSILON)
    return normal * weights[f"{name}.scale"] + weights[f"{name}.bias"]


def _attend(layer: Layer, weights: Any, values: Any) -> Any:
    def dense(part: str, x: Any) -> Any:
        return x @ weights[f"{layer.name}.{part}.kernel"] + weights[f"{layer.name}.{part}.bias"]

    samples, length, width = values.shape
    split = (samples, length, layer.heads, width // layer.heads)
    q, k, v = (dense(part, values).reshape(split) for part in "qkv")
    return dense("o", jax.nn.dot_product_attention(q, k, v).reshape(samples, length, width))
