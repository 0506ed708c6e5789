"""`ansible-playbook` for many runs: Ansible is imported once, and each run is a process forked from that.

Importing it takes longer than most playbooks of the tests. A line of the input is a run, as JSON: its
`arguments`, its `environment`, its `folder`, and the files that get its `output` and its `errors`. The answer
is a line with its exit code. The environment's variables of Ansible itself are those of this program.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any, NoReturn

from ansible.cli.playbook import PlaybookCLI

# What every run imports later.
from ansible.executor import module_common, playbook_executor, task_executor  # noqa: F401
from ansible.plugins.strategy import linear  # noqa: F401


def main() -> None:
    """Run what the input says, until it ends."""
    # What a run prints by mistake before its own output exists must not count as the answer.
    answers = os.dup(1)
    # A run is short, and so are the processes that it forks: none of them collects garbage.
    gc.disable()
    for line in sys.stdin:
        run = json.loads(line)
        process = os.fork()
        if not process:
            os.close(answers)
            _run(**run)
        _, status = os.waitpid(process, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run(
    arguments: list[str], environment: dict[str, str], folder: str, output: str, errors: str
) -> NoReturn:
    """Run as `ansible-playbook` up to its end."""
    code: Any = 1
    try:
        for name, number in ((os.devnull, 0), (output, 1), (errors, 2)):
            opened = os.open(name, os.O_RDWR)
            os.dup2(opened, number)
            os.close(opened)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = ["ansible-playbook", *arguments]
        code = PlaybookCLI.cli_executor(sys.argv)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without what Python does at a program's end: Ansible's temporary folder is that of the next run, too.
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
