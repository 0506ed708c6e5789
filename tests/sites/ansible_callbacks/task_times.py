"""Writes how long each task of a playbook took to the file that CARME_TASK_TIMES names, after every task."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: task_times
type: aggregate
short_description: write how long tasks took
description: The seconds of each task, on all its hosts together, in the order of the tasks.
requirements: [the variable CARME_TASK_TIMES]
"""


class CallbackModule(CallbackBase):
    """Notes a task's time when the next one begins, as no event ends a task."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "task_times"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._file = Path(os.environ["CARME_TASK_TIMES"])
        self._times: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def _begin(self, task: Any) -> None:
        self._end()
        self._times.append({"task": task.get_name(), "seconds": None})
        self._began = time.monotonic()

    def _end(self) -> None:
        if self._times and self._times[-1]["seconds"] is None:
            self._times[-1]["seconds"] = round(time.monotonic() - self._began, 1)
        draft = self._file.with_name(f".{self._file.name}")
        draft.write_text(json.dumps(self._times))
        draft.replace(self._file)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self._begin(task)

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        self._begin(task)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._end()
