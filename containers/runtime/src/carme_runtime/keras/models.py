"""Saving, loading and copying models, as in `keras.models`."""

from typing import Any

from carme_runtime.keras.library import keras
from carme_runtime.keras.model import Model
from carme_runtime.keras.world import world


def load_model(filepath: Any, **keywords: Any) -> Model:
    """The model in a file that all ranks can read; see `keras.models.load_model`."""
    return Model(keras.models.load_model(filepath, **keywords))


def save_model(
    model: Any, filepath: Any, *arguments: Any, tnt_save_all_devices: bool = False, **keywords: Any
) -> None:
    """Save a model, of Keras or of this package, as `Model.save` does."""
    if isinstance(model, Model):
        model.save(filepath, *arguments, tnt_save_all_devices=tnt_save_all_devices, **keywords)
    else:
        world().write(lambda: model.save(filepath, *arguments, **keywords), tnt_save_all_devices)


def clone_model(model: Any, **keywords: Any) -> Model:
    """The same layers with new weights; see `keras.models.clone_model`."""
    return Model(keras.models.clone_model(_keras(model), **keywords))


def model_from_config(config: dict[str, Any], **keywords: Any) -> Model:
    """The model that `get_config` described, with new weights."""
    return Model.from_config(config, **keywords)


def model_from_json(text: str, **keywords: Any) -> Model:
    """The model that `to_json` described, with new weights; see `keras.models.model_from_json`."""
    return Model(keras.models.model_from_json(text, **keywords))


def _keras(model: Any) -> Any:
    return model.keras_model if isinstance(model, Model) else model
