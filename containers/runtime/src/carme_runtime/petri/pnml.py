"""Nets in the Petri Net Markup Language (ISO/IEC 15909-2), of place/transition nets.

Arcs that the standard lacks are marked as other tools do (`type` with the value "read" or "inhibitor").
Types, priorities and the rest stand in `toolspecific` elements.
"""

import re
from typing import TypeVar
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from carme_runtime.petri.definition import Definition
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.model import Arc, Flow, Place

_SPACE = "http://www.pnml.org/version-2009/grammar/pnml"
_TYPE = "http://www.pnml.org/version-2009/grammar/ptnet"
_KINDS = {"read": "read", "test": "read", "inhibitor": "empty", "count": "count"}
_TYPES = {each.__name__: each for each in (object, bool, int, float, str, bytes, list, tuple, dict, set)}
Kind = TypeVar("Kind", bound=Definition)


def to_pnml(net: Definition) -> str:
    """A net as PNML."""
    root = Element("pnml", xmlns=_SPACE)
    described = SubElement(root, "net", id=net.name, type=_TYPE)
    _text(described, "name", net.name)
    page = SubElement(described, "page", id="page")
    for place in net.places.values():
        element = SubElement(page, "place", id=f"p_{place.name}")
        _text(element, "name", place.name)
        if place.tokens:
            _text(element, "initialMarking", str(len(place.tokens)))
        own = {"type": place.type.__name__, "entry": "true" if place.entry else ""}
        _own(element, own | {"capacity": str(place.capacity or "")})
    arcs = 0
    for transition in net.transitions.values():
        element = SubElement(page, "transition", id=f"t_{transition.name}")
        _text(element, "name", transition.name)
        needs = ",".join(f"{name}:{count}" for name, count in transition.needs.items())
        own = {"priority": str(transition.priority or ""), "retries": str(transition.retries or "")}
        _own(element, own | {"needs": needs, "limit": str(transition.limit or "")})
        ends = [(arc, f"p_{arc.place.name}", f"t_{transition.name}") for arc in transition.flow.inputs]
        ends += [(arc, f"t_{transition.name}", f"p_{arc.place.name}") for arc in transition.flow.outputs]
        for arc, source, target in ends:
            arcs += 1
            element = SubElement(page, "arc", id=f"a_{arcs}", source=source, target=target)
            if arc.weight > 1:
                _text(element, "inscription", str(arc.weight))
            if arc.kind != "take":
                SubElement(element, "type", value="inhibitor" if arc.kind == "empty" else arc.kind)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def from_pnml(text: str, kind: type[Kind]) -> Kind:
    """A net from PNML; its tokens are None and its transitions move them, until `bind` gives them functions.

    Raises:
        PetriError: It is not PNML, or of a kind that is not known here.
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise PetriError("The PNML declares a document type.", "Remove the declaration: none is needed.")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise PetriError(f"The net is not XML: {error}.", "Give a PNML file's text.") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    described = root.find("net")
    if root.tag != "pnml" or described is None:
        raise PetriError("The XML holds no PNML net.", "Give a PNML file's text.")
    net = kind(_name(_text_of(described, "name") or described.get("id", ""), "net"))
    places = {element.get("id", ""): _read_place(net, element) for element in described.iter("place")}
    _read_transitions(net, described, places)
    return net


def _read_place(net: Definition, element: Element) -> Place:
    own = _read_own(element)
    tokens = _number(_text_of(element, "initialMarking") or "0", "initialMarking")
    kind = _TYPES.get(own.get("type", ""), object)
    if kind is not object and tokens:
        kind = object  # of the tokens only their number is known
    return net.place(
        _name(_text_of(element, "name") or element.get("id", ""), "place"),
        kind,
        capacity=_number(own["capacity"], "capacity") if own.get("capacity") else None,
        tokens=[None] * tokens,
        entry=own.get("entry") == "true",
    )


def _read_transitions(net: Definition, described: Element, places: dict[str, Place]) -> None:
    inputs: dict[str, list[Arc]] = {}
    outputs: dict[str, list[Arc]] = {}
    elements = {element.get("id", ""): element for element in described.iter("transition")}
    for element in described.iter("arc"):
        source, target = element.get("source", ""), element.get("target", "")
        weight = _number(_text_of(element, "inscription") or "1", "inscription")
        marked = element.find("type")
        kind = _KINDS.get((marked.get("value") if marked is not None else element.get("type")) or "", "take")
        if source in places and target in elements:
            inputs.setdefault(target, []).append(Arc(places[source], weight, kind))  # type: ignore[arg-type]
        elif source in elements and target in places:
            outputs.setdefault(source, []).append(Arc(places[target], weight))
        else:
            raise PetriError(
                f"Arc {element.get('id')} of the PNML goes from {source} to {target}.",
                "Arcs connect a place and a transition.",
            )
    for identity, element in elements.items():
        own = _read_own(element)
        net.add(
            _name(_text_of(element, "name") or identity, "transition"),
            Flow(tuple(inputs.get(identity, ())), tuple(outputs.get(identity, ()))),
            priority=int(own.get("priority") or 0),
            retries=int(own.get("retries") or 0),
            needs=own.get("needs", ""),
            limit=float(own["limit"]) if own.get("limit") else None,
        )


def _text(parent: Element, tag: str, text: str) -> None:
    SubElement(SubElement(parent, tag), "text").text = text


def _own(element: Element, values: dict[str, str]) -> None:
    attributes = {name: value for name, value in values.items() if value}
    if attributes:
        SubElement(SubElement(element, "toolspecific", tool="carme", version="1"), "net", attributes)


def _read_own(element: Element) -> dict[str, str]:
    for specific in element.findall("toolspecific"):
        values = specific.find("net")
        if specific.get("tool") == "carme" and values is not None:
            return values.attrib
    return {}


def _text_of(element: Element, tag: str) -> str:
    return (element.findtext(f"{tag}/text") or "").strip()


def _name(text: str, kind: str) -> str:
    """A name that a net can have; other tools allow any."""
    name = re.sub(r"\W", "_", text)
    name = name if name and not name[0].isdigit() else f"_{name}"
    return f"{kind}{name}" if name == "_" else name


def _number(text: str, kind: str) -> int:
    if not text.isdigit():
        raise PetriError(f"The {kind} '{text}' of the PNML is not a number.", "Give a place/transition net.")
    return int(text)
