"""Names that had others before: the earlier ones work, and warn."""

import pytest

from carme_runtime.gaspi.process import Process
from carme_runtime.scaling.prediction import Remedy


def test_a_remedy_has_its_earlier_name():
    with pytest.warns(DeprecationWarning, match="change"):
        assert Remedy("a larger batch").what == "a larger batch"


def test_a_process_has_the_earlier_name_of_the_group_of_all():
    process = object.__new__(Process)  # without ranks to join
    process.group_all = group = object()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.warns(DeprecationWarning, match="group_all"):
        assert process.everyone is group
