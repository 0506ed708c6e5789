"""What daily life does to a cluster, while sessions are queued, starting, running and stopping.

    ./test faults
    ./test faults -- -k "hub or broker"

For each fault one batch of sessions, one in each phase, goes through it. Afterwards running notebooks still
work or are reported as lost, all views agree, and there is no orphan job, no orphan server, no second
submission, and no job without an end in accounting. The table goes to `artifacts/faults.md` and `.json`.
"""

import pytest

from faults.batch import Batch, Result
from faults.plan import FAULTS, PHASES


@pytest.mark.parametrize("phase", [*PHASES, "after"])
@pytest.mark.parametrize("fault", FAULTS, indirect=True, scope="module")
def test_all_views_agree_after_a_fault(fault: Batch, phase: str) -> None:
    result: Result = fault.results[phase]
    assert not result.problems
