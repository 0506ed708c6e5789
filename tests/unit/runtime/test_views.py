"""Views of what crosses a cut are made behind it, not sent."""

import dataclasses

import pytest

from carme_runtime.graph import Graph, GraphError, Operator, Parameter, Timing, Value
from carme_runtime.graph.files import from_json, to_json
from carme_runtime.pipeline import Pieces, Request, plan
from carme_runtime.pipeline.partition import _crossing

KIB = 1024


def operator(name: str, *inputs: str, view: bool = False, kind: str = "linear") -> Operator:
    timings = () if view else (Timing(8, 1.0, 2.0),)
    return Operator(name, kind, name, inputs, (name,), timings=timings, view_of=inputs[0] if view else "")


def graph_of(*operators: Operator, sizes: dict[str, int] | None = None) -> Graph:
    """Of these operators; the last one makes the result. `sizes` in KiB, 4 where none is given."""
    values = tuple(
        Value(name, (8, 128), "float32", KIB * (sizes or {}).get(name, 4), True, name != "x")
        for name in ("x", *(o.outputs[0] for o in operators))
    )
    return Graph("test", "cpu", 8, ("x",), (operators[-1].outputs[0],), values, operators, ())


def attention() -> Graph:
    """A value, what is turned of it twice, and two users of all three."""
    return graph_of(
        operator("base", "x"),
        operator("turned", "base", view=True),
        operator("again", "turned", view=True),
        operator("first", "base", "turned"),
        operator("second", "first", "again", "base"),
        operator("last", "second"),
    )


@pytest.mark.parametrize(
    ("cuts", "sent", "views"),
    [
        ((3,), {(0, 1): ("base",)}, {"turned", "again"}),
        ((4,), {(0, 1): ("base", "first")}, {"again", "turned"}),
        ((2,), {(0, 1): ("base",)}, {"turned"}),
        ((1,), {(0, 1): ("base",)}, set[str]()),
    ],
)
def test_a_value_that_crosses_a_cut_is_sent_once_and_its_views_are_made_behind(
    cuts: tuple[int, ...], sent: dict[tuple[int, int], tuple[str, ...]], views: set[str]
) -> None:
    pieces = Pieces(attention(), cuts)
    assert pieces.channels == sent
    assert pieces.views(1) == views and not pieces.views(0)
    assert pieces.bytes((0, 1), 8) == 4 * KIB * len(sent[0, 1])


def test_a_view_whose_value_is_not_used_behind_the_cut_is_sent_itself() -> None:
    graph = graph_of(
        operator("base", "x"), operator("half", "base", view=True), operator("last", "half"),
        sizes={"half": 2},
    )  # fmt: skip
    assert Pieces(graph, (2,)).channels == {(0, 1): ("half",)}
    assert not Pieces(graph, (2,)).views(1)


def test_a_value_is_sent_instead_of_views_that_take_more_bytes_together() -> None:
    """One that repeats it, or several that overlap; parts that share it out are sent as they are."""
    parts = [operator(f"part{n}", "base", view=True) for n in range(3)]
    graph = graph_of(operator("base", "x"), *parts, operator("last", "part0", "part1", "part2"))
    for size, sent in ((2, ("base",)), (1, ("part0", "part1", "part2"))):
        sizes = {"base": 4, **{each.name: size for each in parts}}
        values = tuple(dataclasses.replace(v, bytes=KIB * sizes.get(v.name, 4)) for v in graph.values)
        pieces = Pieces(dataclasses.replace(graph, values=values), (4,))
        assert pieces.channels == {(0, 1): sent}
        assert pieces.views(1) == ({"part0", "part1", "part2"} if sent == ("base",) else set())


def test_what_is_no_tensor_is_never_sent() -> None:
    """A value is taken apart into a list, and operators take single ones."""
    graph = graph_of(
        operator("base", "x"),
        operator("list", "base", view=True),
        operator("left", "list", view=True, kind="getitem"),
        operator("right", "list", view=True, kind="getitem"),
        operator("last", "left", "right"),
        sizes={"base": 9, "list": 1, "left": 4, "right": 4},
    )
    assert Pieces(graph, (4,)).channels == {(0, 1): ("left", "right")}
    used = dataclasses.replace(graph.operators[-1], inputs=("left", "right", "base"))
    pieces = Pieces(dataclasses.replace(graph, operators=(*graph.operators[:-1], used)), (4,))
    assert pieces.channels == {(0, 1): ("base",)} and pieces.views(1) == {"list", "left", "right"}


def test_views_of_inputs_are_made_where_they_are_used() -> None:
    graph = graph_of(
        operator("turned", "x", view=True), operator("first", "turned"), operator("last", "first", "turned")
    )
    pieces = Pieces(graph, (2,))
    assert pieces.channels == {(0, 1): ("first",)} and pieces.views(1) == {"turned"}
    assert _crossing(graph, 8) == [0, 0, 4 * KIB, 0]


def test_no_other_stage_has_to_send_the_value_of_a_view() -> None:
    """It may be a smaller one, but a message of its own takes longer."""
    graph = graph_of(
        operator("base", "x"), operator("first", "base"), operator("wide", "base", view=True),
        operator("last", "first", "wide"), sizes={"wide": 64},
    )  # fmt: skip
    assert Pieces(graph, (1, 3)).channels == {(0, 1): ("base",), (1, 2): ("first", "wide")}
    assert Pieces(graph, (3,)).channels == {(0, 1): ("base", "first")}


@pytest.mark.parametrize("what", ["needs another value", "needs a parameter", "changes the type"])
def test_what_is_more_than_a_view_is_sent(what: str) -> None:
    graph = attention()
    turned = graph.operators[1]
    values, earlier = graph.values, tuple[Operator, ...]()
    if what == "needs another value":
        earlier = (operator("other", "x"),)
        turned = dataclasses.replace(turned, inputs=("base", "other"))
        values = (*values, dataclasses.replace(values[1], name="other"))
    elif what == "needs a parameter":
        turned = dataclasses.replace(turned, parameters=("weight",))
    else:
        values = tuple(dataclasses.replace(v, dtype="int32") if v.name == "turned" else v for v in values)
    graph = dataclasses.replace(
        graph,
        values=values,
        operators=(*earlier, graph.operators[0], turned, *graph.operators[2:]),
        parameters=(Parameter("weight", 4, False),),
    )
    assert "turned" in Pieces(graph, (3 + len(earlier),)).channels[0, 1]


def test_the_plan_counts_the_bytes_that_are_sent() -> None:
    request = Request(2, 32, stages=2, micro_batches=4, cut_points=("first",))
    found = plan(attention(), request)
    # Of four micro-batches of 8 samples: base forward, and its gradient back.
    assert [stage.sent_bytes for stage in found.stages] == [4 * 4 * KIB, 4 * 4 * KIB]


def test_cuts_are_chosen_by_the_bytes_that_are_sent() -> None:
    assert _crossing(attention(), 8) == [0, 4 * KIB, 4 * KIB, 4 * KIB, 8 * KIB, 4 * KIB, 0]


def test_views_stay_in_files_and_name_an_input() -> None:
    graph = attention()
    assert from_json(to_json(graph)) == graph
    with pytest.raises(GraphError, match="Operator first uses nothing_like_it"):
        wrong = dataclasses.replace(graph.operators[3], view_of="nothing_like_it")
        dataclasses.replace(graph, operators=(*graph.operators[:3], wrong, *graph.operators[4:]))
