"""Tasks that fail, again and again: how often that counts, and what a run says when it gives up."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carme_runtime.petri.activation import Task, Token
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.model import Place, short

#: How often a task runs again whose worker was killed, unless its transition has more retries.
KILLED_RETRIES = 3
#: Bytes of a token that is shown in a message.
_MOST_SHOWN = 1 << 16


def count_failure(task: Task) -> int:
    """How often a task has failed, this time too."""
    for token in task.taken:
        token.failures += 1
    # Without tokens there is nothing to count by: such a task may fail once.
    return max((token.failures for token in task.taken), default=KILLED_RETRIES + 1)


def overdue(task: Task) -> str:
    """What to say of a task that was ended, as it took longer than its limit."""
    transition = task.rule.transition
    tokens = ", ".join(_shown(token.data) for token in task.tokens)
    with_tokens = f" with {tokens}" if tokens else ""
    return f"Transition {transition.name} took longer than its limit of {transition.limit:g} s{with_tokens}."


def gave_up(task: Task, ending: str, folder: Path) -> PetriError:
    """What to say of a task that ends its worker each time.

    Args:
        task: Which.
        ending: Of the worker at last, such as "signal 9".
        folder: Of the run.
    """
    return PetriError(
        f"Transition {task.rule.transition.name} ended its worker {KILLED_RETRIES + 1} times or more, "
        f"at last by {ending}.",
        f"It may need more memory than there is. Its tokens are where they were: resume the run in {folder}.",
    )


def coordinator_failed(reason: str) -> PetriError:
    """What to say when the thread that runs the net cannot go on."""
    return PetriError(f"The coordinator failed: {reason}.", "Resume the run.")


def loaded(place: Place, tokens: Sequence[Token]) -> list[Any]:
    """Tokens of a place as this program has them. Raises PetriError where one cannot be read here."""
    try:
        return [pickle.loads(token.data) for token in tokens]
    except Exception as error:  # of a class that is not here, or whose own code fails
        raise PetriError(
            f"A token of place {place.name} cannot be read here: {type(error).__name__}: {error}.",
            "The tokens are where they were: import what they are made of, and take them again.",
        ) from error


def _shown(data: bytes) -> str:
    if len(data) > _MOST_SHOWN:
        return f"a token of {len(data)} bytes"
    try:
        return short(pickle.loads(data))
    except Exception:  # of a class that is not here, or cannot be shown
        return "a token that cannot be shown"
