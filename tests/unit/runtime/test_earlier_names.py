"""Names that had others before: the earlier ones work, and warn."""

import inspect
from collections.abc import Callable

import pytest

from carme_runtime.gaspi.process import Process
from carme_runtime.graph import Graph
from carme_runtime.out_of_core.plan import Plan
from carme_runtime.pipeline import plans
from carme_runtime.scaling.prediction import Remedy


def test_a_remedy_has_its_earlier_name():
    with pytest.warns(DeprecationWarning, match="change"):
        assert Remedy("a larger batch").what == "a larger batch"


def test_a_plan_of_memory_has_the_earlier_name_of_what_does_not_move_which_json_keeps():
    figures = dict.fromkeys(("limit", "least", "outside", "room", "whole", "read", "written"), 0)
    rates = dict.fromkeys(("read_rate", "write_rate"), 1.0)
    measured = dict.fromkeys(("measured_seconds", "measured_read", "measured_written"), 0)
    plan = Plan(
        **figures, **rates, **measured, blocks={}, compute_seconds=1.0, seconds=1.0, overhead="libraries"
    )
    assert plan.as_dict()["others"] == "libraries" and "overhead" not in plan.as_dict()
    with pytest.warns(DeprecationWarning, match="overhead"):
        assert plan.others == "libraries"


def test_a_process_has_the_earlier_name_of_the_group_of_all():
    process = object.__new__(Process)  # without ranks to join
    process.group_all = group = object()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.warns(DeprecationWarning, match="group_all"):
        assert process.everyone is group


@pytest.mark.parametrize("method", [Graph.same_model, plans.Plan.travel_ms])
def test_no_program_can_depend_on_names_of_parameters_that_had_others(method: Callable[..., object]):
    kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_ONLY}
