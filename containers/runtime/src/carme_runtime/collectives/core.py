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


def group_type(context: Any) -> Any:
    """The class of groups on a context: the native core's, or that of another transport."""
    return getattr(context, "group_type", None) or load().Group


def segments(context: Any) -> int:
    """How many segments there are that groups on a context reduce in place; other transports' copy."""
    return 0 if hasattr(context, "group_type") else load().SEGMENTS


def plan_type(context: Any) -> Any:
    """The same for plans."""
    return getattr(context, "plan_type", None) or load().Plan
