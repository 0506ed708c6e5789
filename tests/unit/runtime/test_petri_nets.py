"""Nets as they are written: arcs, checks before a run, pictures, PNML."""

import json
import os
import queue
import sys
import time
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from carme.broker.files import NET_BYTES
from carme_runtime.petri import Net, PetriError, live
from carme_runtime.petri.draw import Drawing
from patience import HANG


def kinds(net: Net) -> list[tuple[str, str]]:
    return [(finding.kind, finding.where) for finding in net.check()]


def workshop() -> Net:
    net = Net("workshop")
    parts, tool = net.place("parts", int), net.place("tool", str, tokens=["saw"])
    stop, created = net.place("stop"), net.place("made", int, capacity=2)
    net.add(
        "build",
        2 * parts + tool.read + stop.empty >> created,
        lambda pair, tool: pair[0],
        priority=3,
        retries=1,
    )
    net.add("sell", created >> None, print, needs="gpu:1")
    return net


def test_arcs_are_written_as_a_sum():
    build = workshop().transitions["build"]
    assert [(arc.place.name, arc.weight, arc.kind) for arc in build.flow.inputs] == [
        ("parts", 2, "take"),
        ("tool", 1, "read"),
        ("stop", 1, "empty"),
    ]
    assert [arc.place.name for arc in build.flow.outputs] == ["made"]


def test_a_sound_net_has_no_findings():
    assert workshop().check() == []


def test_a_transition_that_nothing_reaches_is_found():
    net = Net("loop")
    a, b = net.place("a"), net.place("b")
    net.add("there", a >> b)
    net.add("back", b >> a)
    assert ("unreachable", "a") in kinds(net)
    assert "no token ever comes to place a" in net.check()[0].sentence


def test_a_place_that_the_program_fills_is_reachable():
    net = Net("loop")
    a, b = net.place("a", entry=True), net.place("b")
    net.add("there", a >> b)
    net.add("back", b >> a)
    assert net.check() == []


def test_a_place_without_bound_is_found():
    net = Net("source")
    seed, heap = net.place("seed", tokens=[1]), net.place("heap")
    net.add("grow", seed >> seed + heap, lambda x: (x, x))
    assert kinds(net) == [("unbounded", "heap")]
    with pytest.raises(PetriError, match="Place heap can grow without bound"):
        net.start()


def test_a_capacity_or_an_inhibitor_bounds_a_place():
    net = Net("source")
    full, rare = net.place("full", capacity=3), net.place("rare")
    net.add("fill", None >> full, lambda: 1)
    net.add("once", rare.empty >> rare, lambda: 1)
    assert net.check() == []


def test_a_guard_may_bound_a_loop():
    net = Net("while")
    number, log = net.place("number", int, tokens=[0]), net.place("log", int)
    net.add("count", number >> number + log, lambda x: (x + 1, x), guard=lambda x: x < 3)
    assert net.check() == []


def test_a_deadlock_is_found():
    net = Net("philosophers")
    forks = [net.place(f"fork{i}", tokens=["f"]) for i in range(2)]
    for i in range(2):
        hungry, holds = net.place(f"hungry{i}", tokens=["p"]), net.place(f"holds{i}")
        net.add(f"left{i}", hungry + forks[i] >> holds)
        net.add(f"right{i}", holds + forks[1 - i] >> forks[i] + forks[1 - i] + hungry)
    finding = net.check()[0]
    assert finding.kind == "deadlock" and finding.where in ("holds0", "holds1")
    assert (
        f"in place {finding.where}" in finding.sentence
        and "waits for a token in place fork" in finding.sentence
    )


def test_parameters_and_results_of_any_type_fit():
    net = Net("any")
    x, y = net.place("x", int), net.place("y", str)

    @net.transition(x >> y)
    def convert(value: Any) -> Any:
        return str(value)

    assert net.check() == []


def test_types_that_do_not_fit_are_found():
    net = Net("types")
    a, b = net.place("a", int), net.place("b", Path)

    @net.transition(a >> b)
    def wrong(x: str) -> int:
        return 3

    assert kinds(net) == [("types", "a"), ("types", "b")]
    assert "Place a holds int, and parameter x of transition wrong is str" in net.check()[0].sentence


def test_arcs_that_never_fit_a_capacity_are_found():
    net = Net("capacity")
    a, b = net.place("a"), net.place("b", capacity=1)
    net.add("two", a >> 2 * b)

    @net.transition(a >> b)
    def some(x):
        yield x

    assert kinds(net) == [("capacity", "b"), ("capacity", "b")]
    c = net.place("c")
    net.add("never", c + c.empty >> None)
    assert ("unreachable", "c") in kinds(net)


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda net, a: net.place("a"), "has a place a already"),
        (lambda net, a: net.place("a b"), "'a b' is not a valid name"),
        (lambda net, a: net.place("b", "int"), "which is not a class"),
        (lambda net, a: net.place("b", capacity=0), "capacity of 0"),
        (lambda net, a: net.place("b", int, tokens=["x"]), "Place b holds int, not str"),
        (lambda net, a: net.add("t", Net("other").place("a") >> a), "is not of net bad"),
        (lambda net, a: net.add("t", a >> a.read), "among the outputs"),
        (lambda net, a: net.add("t", 0 * a >> a), "is not positive"),
        (lambda net, a: net.add("t", a >> a, lambda x, y: x), "takes \\(x, y\\)"),
        (lambda net, a: net.add("t", a >> a, needs="gpu:many"), "'gpu:many' is not a resource"),
        (lambda net, a: net.add("t", a >> a, needs="gpu:1.5"), "'gpu:1.5' is not a resource"),
        (lambda net, a: net.add("t", a >> a, needs="memory:0GiB"), "'memory:0GiB' is not a resource"),
        (lambda net, a: net.transition("cat {b}", a >> a), "has a field {b}"),
        (lambda net, a: net.transition("cat 'a", a >> a), "cannot be split"),
        (lambda net, a: net.transition("", a >> a), "empty command"),
        (lambda net, a: net.transition("true", a >> a, gives=["x", "y"]), "gives= is for 2"),
        (lambda net, a: net.transition("true"), "needs its arcs"),
        (lambda net, a: net.bind("none", print), "has no transition none"),
        (lambda net, a: Net("a/b"), "not a valid name of a net"),
        (lambda net, a: Net.from_pnml("<pnml"), "is not XML"),
        (lambda net, a: Net.from_pnml("<a/>"), "holds no PNML net"),
        (lambda net, a: Net.from_pnml('<!DOCTYPE x [<!ENTITY a "b">]><pnml/>'), "declares a document type"),
    ],
)
def test_bad_nets_end_in_one_sentence(write, sentence: str):
    net = Net("bad")
    with pytest.raises(PetriError, match=sentence) as caught:
        write(net, net.place("a"))
    assert caught.value.remedy


def test_a_net_is_drawn():
    drawing = workshop().draw()
    root = ElementTree.fromstring(drawing)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"parts", "tool", "stop", "made", "build", "sell", "2"} <= set(texts)
    assert "stroke-dasharray" in drawing and "#circle" in drawing
    assert drawing._repr_svg_() == drawing


def test_a_net_goes_through_pnml():
    net = workshop()
    again = Net.from_pnml(net.to_pnml())
    assert again.to_pnml() == Net.from_pnml(again.to_pnml()).to_pnml()
    assert again.name == "workshop" and list(again.places) == list(net.places)
    assert again.places["made"].capacity == 2 and again.places["parts"].type is int
    assert again.places["tool"].tokens == (None,)
    build = again.transitions["build"]
    assert (build.priority, build.retries, again.transitions["sell"].needs) == (3, 1, {"gpu": 1})
    assert [(a.place.name, a.weight, a.kind) for a in build.flow.inputs] == [
        (a.place.name, a.weight, a.kind) for a in net.transitions["build"].flow.inputs
    ]


def test_pnml_of_other_tools_is_read():
    net = Net.from_pnml(
        '<pnml xmlns="http://www.pnml.org/version-2009/grammar/pnml"><net id="n1"><page id="g">'
        '<place id="1"><name><text>in '
        "put</text></name><initialMarking><text>2</text></initialMarking></place>"
        '<place id="2"/><transition id="3"/><arc id="4" source="1" target="3" type="inhibitor"/>'
        '<arc id="5" source="3" '
        'target="2"><inscription><text>2</text></inscription></arc></page></net></pnml>'
    )
    assert list(net.places) == ["in_put", "_2"] and net.places["in_put"].tokens == (None, None)
    flow = net.transitions["_3"].flow
    assert flow.inputs[0].kind == "empty" and flow.outputs[0].weight == 2


def test_a_picture_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    net = Net("live")
    gates, opened = net.place("gates", str), net.place("opened", str)

    @net.transition(gates >> opened)
    def wait_for(gate: str) -> str:
        return Path(gate).read_text()

    shown: queue.SimpleQueue[str] = queue.SimpleQueue()
    handle = types.SimpleNamespace(update=shown.put)
    notebook = types.SimpleNamespace(display=lambda drawing, display_id: shown.put(drawing) or handle)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    os.mkfifo(tmp_path / "gate")
    with net.start(1, folder=tmp_path / "run") as run:
        run.show(seconds=0.01)
        run.put(gates, str(tmp_path / "gate"))
        while "wait_for: 1 running, 0 ended" not in shown.get(timeout=HANG):
            pass
        (tmp_path / "gate").write_text("open")
        run.wait(HANG)
        assert "wait_for: 0 running, 1 ended" in run.draw()
        assert set(run._repr_mimebundle_()) == {"image/svg+xml", "text/plain"}
    while "wait_for: 0 running, 1 ended" not in shown.get(timeout=HANG):
        pass
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with Net.resume(tmp_path / "run", net=net) as run, pytest.raises(PetriError, match="need IPython"):
        run.show()


def test_the_page_of_the_job_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = tmp_path / "job"
    job.mkdir()
    monkeypatch.setenv(live.JOB_FOLDER, str(job))
    monkeypatch.setattr(live, "_PAGE_SECONDS", 0.01)
    net = Net("paged")
    gates, opened = net.place("gates", str), net.place("opened", str)
    net.add("wait_for", gates >> opened, lambda gate: Path(gate).read_text())
    os.mkfifo(tmp_path / "gate")

    def page() -> dict[str, Any]:
        found = job / live.PAGE
        return json.loads(found.read_text()) if found.exists() else {"running": -1}

    with net.start(1, folder=tmp_path / "run") as run:
        run.put(gates, str(tmp_path / "gate"))
        while page()["running"] != 1:
            time.sleep(0.01)
        assert (page()["name"], page()["state"]) == ("paged", "running")
        assert "wait_for: 1 running, 0 ended" in page()["svg"]
        (tmp_path / "gate").write_text("open")
        run.wait(HANG)
    last = page()
    assert (last["state"], last["running"], last["ended"], last["tokens"]) == ("resting", 0, 1, 1)
    assert [file.name for file in job.iterdir()] == [live.PAGE]
    # As long as it may be, and longer than the broker reads when it is written.
    escaped = "\N{MATHEMATICAL BOLD CAPITAL A}" * 100_000
    with monkeypatch.context() as patched:
        patched.setattr(live, "draw", lambda _net, _status: Drawing(escaped))
        with Net.resume(tmp_path / "run", net=net, workers=1) as run:
            run.wait(HANG)
    assert page()["svg"] == "" and page()["tokens"] == 1
    assert live._MOST_BYTES == NET_BYTES
    (job / live.PAGE).unlink()
    monkeypatch.setattr(live, "_MOST_DRAWN", 10)
    with Net.resume(tmp_path / "run", net=net, workers=1) as run:
        run.wait(HANG)
    assert page()["svg"] == "" and page()["tokens"] == 1


def test_runs_of_one_program_write_drafts_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (job := tmp_path / "job").mkdir()
    monkeypatch.setenv(live.JOB_FOLDER, str(job))
    drafts: list[str] = []
    replace = Path.replace

    def note(draft: Path, file: Path) -> Path:
        if draft.parent == job:
            drafts.append(draft.name)
        return replace(draft, file)

    monkeypatch.setattr(Path, "replace", note)
    nets = [Net("first"), Net("second")]
    for net in nets:
        net.add("move", net.place("x", int, tokens=[1]) >> net.place("y", int), lambda value: value)
    first, second = (net.start(1, folder=tmp_path / net.name) for net in nets)
    with first, second:
        assert first.wait(HANG)["y"] == second.wait(HANG)["y"] == [1]
    assert len(set(drafts)) == 2


def test_a_run_in_a_job_whose_folder_cannot_be_written_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(live.JOB_FOLDER, str(tmp_path / "none"))
    net = Net("unpaged")
    x, y = net.place("x", int, tokens=[1]), net.place("y", int)
    net.add("t", x >> y, lambda value: value)
    with net.start(1, folder=tmp_path / "run") as run:
        assert run.wait(HANG)["y"] == [1]
    assert not (tmp_path / "none").exists()
