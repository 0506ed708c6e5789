"""Layers that say where a model may be cut."""

from typing import Any

from carme_runtime.keras.library import keras


@keras.saving.register_keras_serializable(package="carme_runtime")
class SplitLayer(keras.layers.Layer):
    """The stage of a pipeline ends before this layer, which passes on what it gets.

        x = SplitLayer(name="split")(x)

    A stage must be left by such layers only: mark every connection between two stages.
    """

    def __init__(self, name: str | None = None, **keywords: Any) -> None:
        super().__init__(name=name, **keywords)
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        """The same."""
        return inputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The same."""
        return input_shape


def has_split_layers(model: Any) -> bool:
    """Whether a Keras model says where to cut it."""
    return any(isinstance(layer, SplitLayer) for layer in model._flatten_layers(include_self=False))
