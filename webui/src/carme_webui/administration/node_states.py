"""The state of a node in words, from Slurm's compound ones: `MIXED+PLANNED`, `IDLE+DRAIN`, `DOWN*`.

See the states in https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES.
"""

from django.utils.translation import gettext as _

__all__ = ["state_words"]

_BUSY = {"ALLOCATED", "MIXED", "COMPLETING"}
_MARKS = "*~#!%$@^-"


def state_words(state: str) -> str:
    """What a node's state means.

    Args:
        state: As Slurm has it, like `MIXED+PLANNED`.
    """
    parts = [part.rstrip(_MARKS) for part in state.split("+")]
    known = {
        "IDLE": _("idle"),
        "ALLOCATED": _("in use"),
        "MIXED": _("partly in use"),
        "COMPLETING": _("ending jobs"),
        "DRAIN": _("draining: its jobs go on") if _BUSY & set(parts) else _("drained"),
        "DRAINING": _("draining: its jobs go on"),
        "DRAINED": _("drained"),
        "DOWN": _("down"),
        "FAIL": _("failing"),
        "NOT_RESPONDING": _("does not answer"),
        "PLANNED": _("planned for a job that waits"),
        "RESERVED": _("reserved"),
        "MAINTENANCE": _("in maintenance"),
        "REBOOT_REQUESTED": _("to be restarted"),
        "REBOOT_ISSUED": _("restarts"),
        "POWERED_DOWN": _("switched off"),
        "POWERING_DOWN": _("being switched off"),
        "POWERING_UP": _("being switched on"),
        "UNKNOWN": _("not known"),
    }
    words = [known.get(part, part.replace("_", " ").lower()) for part in parts if part]
    if "*" in state and "NOT_RESPONDING" not in parts:
        words.append(_("does not answer"))
    # Of a drained node it does not matter that it is idle.
    if {"DRAIN", "DRAINED"} & set(parts) and len(words) > 1:
        words = [word for word in words if word != known["IDLE"]]
    return ", ".join(dict.fromkeys(words))
