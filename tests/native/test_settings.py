"""Which settings of layers must be the same on the ranks of a pipeline."""

from collections.abc import Callable
from typing import Any

import pytest

keras: Any = pytest.importorskip("keras")
functional: Any = pytest.importorskip("carme_runtime.keras.functional")


class Own(keras.layers.Dense):
    def __init__(self, config: Callable[[], Any]) -> None:
        super().__init__(2, name="own")
        self.config = config

    def get_config(self) -> Any:
        return self.config()


def checksum(layer: Any, *shape: int) -> int:
    return functional.settings_checksum(keras.Sequential([keras.Input(shape, name="in"), layer]))


def test_seeds_that_each_process_draws_are_no_difference() -> None:
    first, second = (keras.layers.RandomCrop(4, 4, name="crop") for _ in range(2))
    assert first.get_config()["seed"] != second.get_config()["seed"]
    assert checksum(first, 8, 8, 3) == checksum(second, 8, 8, 3)
    assert checksum(first, 8, 8, 3) != checksum(keras.layers.RandomCrop(4, 2, name="crop"), 8, 8, 3)


def test_how_weights_of_a_layer_in_a_layer_begin_is_no_difference_and_other_settings_are() -> None:
    def wrapped(**settings: Any) -> int:
        layer = keras.layers.Bidirectional(keras.layers.LSTM(2, name="lstm", **settings), name="both")
        return checksum(layer, 3, 4)

    assert wrapped(kernel_initializer="zeros") == wrapped(kernel_initializer="ones")
    assert wrapped(activation="tanh") != wrapped(activation="relu")


@pytest.mark.parametrize("fails", [TypeError, ValueError, KeyError])
def test_layers_of_a_script_need_no_settings(fails: type[Exception]) -> None:
    def config() -> Any:
        raise fails

    assert checksum(Own(config), 4) == checksum(Own(dict), 4)


def test_settings_that_are_no_json_are_left_out() -> None:
    cycle: dict[str, Any] = {}
    cycle["itself"] = cycle
    assert checksum(Own(lambda: cycle), 4) == checksum(Own(dict), 4)
