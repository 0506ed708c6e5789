"""The same as horovod_itself.py, with TensorFlow."""

# pyright: reportMissingImports=false

import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

BATCH, STEPS = 12, 8

hvd.init()
start = tf.random.Generator.from_seed(hvd.rank())  # other weights on each rank: rank 0's are to be broadcast
weights = [tf.Variable(start.normal(shape, stddev=0.3)) for shape in ((6, 16), (16, 1))]
hvd.broadcast_variables(weights, root_rank=0)

data = np.random.default_rng(7)
for _ in range(STEPS):
    inputs = data.normal(size=(BATCH, 6)).astype("float32")
    share = tf.constant(inputs[hvd.rank() :: hvd.size()])
    with tf.GradientTape() as tape:
        outputs = tf.tanh(share @ weights[0]) @ weights[1]
        loss = tf.reduce_mean((outputs - tf.reduce_sum(share, 1, keepdims=True)) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.1 * gradient)

where = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
places = hvd.allgather_object(where)
trained = tf.concat([tf.reshape(weight, [-1]) for weight in weights], 0)
everywhere = hvd.allgather(trained[None]).numpy()
if hvd.rank() == 0:
    np.savez(sys.argv[1], places=places, weights=everywhere)
