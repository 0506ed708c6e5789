"""Train a small network on handwritten digits with Keras, with as many ranks as there are.

    python digits_keras.py                          one process
    carme-run -n 4 digits_keras.py --epochs 6       four ranks, wherever the job has room for them

The losses do not depend on the number of ranks. Keras may be on PyTorch or on TensorFlow (KERAS_BACKEND).
"""

import argparse

import keras
from sklearn.datasets import load_digits

import carme_runtime.keras as ck

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=5, help="default: 5")
options = parser.parse_args()

keras.utils.set_random_seed(1)
images, digits = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
model = ck.Model(
    keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
# 100 samples are those of a step on all ranks together; the last step of an epoch has 37.
history = model.fit(images, digits, batch_size=100, epochs=options.epochs, validation_split=0.2, verbose=0)
if ck.is_master_rank():
    print(f"{ck.get_size()} ranks, Keras {keras.__version__} on {keras.backend.backend()}")
    losses, accuracies = history.history["loss"], history.history["val_accuracy"]
    for epoch, (loss, right) in enumerate(zip(losses, accuracies, strict=True), 1):
        print(f"epoch {epoch}/{options.epochs}: loss {loss:.7f}, {right:.1%} of the others right")
