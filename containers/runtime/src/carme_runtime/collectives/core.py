"""The native core, or a sentence about how to get it."""

from typing import Any

from carme_runtime.collectives.errors import CoreMissing


def load() -> Any:
    """The module `carme_runtime._core`. Raises CoreMissing where it was not built."""
    try:
        from carme_runtime import _core  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise CoreMissing(
            f"carme_runtime was installed without its native core ({error}).",
            "Install it again with a C++20 compiler at hand, and without CARME_RUNTIME_PURE.",
        ) from None
    return _core
