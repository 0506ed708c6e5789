"""Nodes of ONNX graphs: what they use, and in which order they can run."""

from collections.abc import Iterator
from typing import Any

#: Operators that give something else each time; they are never folded.
RANDOM = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
)


def graphs(graph: Any) -> Iterator[Any]:
    """A graph and all graphs in attributes of its nodes (bodies of If, Loop, Scan)."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)
            for each in attribute.graphs:
                yield from graphs(each)


def needed(node: Any) -> list[str]:
    """Names of values that a node uses, those that graphs in its attributes take from outside too."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            names += _free(graph)
    return list(dict.fromkeys(names))


def _free(graph: Any) -> list[str]:
    own = {each.name for each in graph.input} | {each.name for each in graph.initializer}
    found: list[str] = []
    for node in graph.node:
        found += [name for name in needed(node) if name not in own]
        own.update(node.output)
    return found + [each.name for each in graph.output if each.name not in own]


def sorted_nodes(nodes: list[Any], defined: set[str]) -> list[Any]:
    """The nodes that can run, each as early as this order allows, after the values that are defined."""
    known, waiting, found = set(defined), list(nodes), []
    needs = {id(node): needed(node) for node in nodes}
    while waiting:
        later = []
        for node in waiting:
            if all(value in known for value in needs[id(node)]):
                known.update(node.output)
                found.append(node)
            else:
                later.append(node)
        if len(later) == len(waiting):
            break
        waiting = later
    return found


def late_constants(nodes: list[Any], constants: set[str]) -> list[Any]:
    """The nodes with those that depend on constants alone right before the first one that uses them.

    So no cut between them and their user has to send what they make, unless several parts use it.

    Args:
        nodes: In an order in which they can run.
        constants: Their names.
    """
    constant, makers, found = set(constants), dict[str, int](), []
    waiting = set[int]()

    def take(names: list[str]) -> None:
        wanted, taken = list(names), set[int]()
        while wanted:
            place = makers.get(wanted.pop(), -1)
            if place in waiting:
                waiting.remove(place)
                taken.add(place)
                wanted += needed(nodes[place])
        found.extend(nodes[place] for place in sorted(taken))

    for place, node in enumerate(nodes):
        names = needed(node)
        if constant.issuperset(names):
            constant.update(node.output)
            makers.update(dict.fromkeys(node.output, place))
            waiting.add(place)
        else:
            take(names)
            found.append(node)
    return found + [nodes[place] for place in sorted(waiting)]
