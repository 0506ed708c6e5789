"""Reads a model and finds what is wrong with it before anything runs.

The format is that of https://onnx.ai/onnx/repo-docs/IR.html.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.folding import fold_constants
from carme_runtime.onnx.library import library
from carme_runtime.onnx.nodes import graphs, needed, sorted_nodes

_OWN_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Input:
    """What a model is given.

    Args:
        name: Of the value.
        dtype: As NumPy names it.
        shape: A number for each dimension, or its name; None: unknown. Empty for scalars.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name} ({self.dtype} of any shape)"
        return (
            f"{self.name} ({self.dtype}[{', '.join(str(d if d is not None else '?') for d in self.shape)}])"
        )


@dataclass
class Model:
    """A checked model: local functions are inlined, nodes sorted and named, constants are initializers.

    Args:
        proto: The `onnx.ModelProto`.
        name: For people: of its file.
        inputs: What has to be given; initializers are not inputs.
        outputs: Names of what it returns.
        opset: Of the standard's operators.
        notices: What was changed or is unusual, in sentences.
    """

    proto: Any
    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    opset: int
    notices: list[str] = field(default_factory=list)

    @property
    def nodes(self) -> list[Any]:
        """Of the main graph, in an order in which they can run."""
        return list(self.proto.graph.node)


def load(source: "str | os.PathLike[str] | bytes | Any", *, fold: bool = True) -> Model:
    """Read and check a model.

    Args:
        source: A file, its bytes, or an `onnx.ModelProto`. Weights in other files lie beside the file.
        fold: Compute what depends on constants alone.

    Raises:
        OnnxError: It is not a model, or one that cannot run; the sentence names the node or the file.
    """
    onnx = library("onnx")
    proto, name, folder = _read(onnx, source)
    _check_versions(onnx, proto, name)
    if proto.functions:
        library("onnx.inliner")
        proto = onnx.inliner.inline_local_functions(proto)
    _check_weights(onnx, proto, name, folder)
    _name_nodes(proto.graph)
    _check_operators(onnx, proto, name)
    _sort(proto.graph, name)
    _check_shapes(onnx, proto, name)
    notices: list[str] = []
    if fold:
        proto = fold_constants(proto, notices)
    constants = {each.name for each in proto.graph.initializer}
    own = [each for each in proto.graph.input if each.name not in constants]
    del proto.graph.input[:]
    proto.graph.input.extend(own)
    opset = next((e.version for e in proto.opset_import if e.domain in _OWN_DOMAINS), 1)
    inputs = tuple(_input(onnx, each) for each in own)
    return Model(proto, name, inputs, tuple(e.name for e in proto.graph.output), opset, notices)


def _read(onnx: Any, source: Any) -> tuple[Any, str, Path | None]:
    if isinstance(source, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(source)
        return copy, "The model", None
    data, name, folder = source, "The model", None
    if not isinstance(source, bytes):
        path = Path(source)
        name, folder = path.name, path.absolute().parent
        try:
            data = path.read_bytes()
        except OSError as error:
            raise OnnxError(
                f"{path} cannot be read: {error.strerror}.", "Name a file with a model."
            ) from None
    try:
        proto = onnx.ModelProto.FromString(data)
    except Exception:
        proto = None
    if proto is None or not proto.ir_version or not proto.graph.node:
        raise OnnxError(
            f"{name} is not an ONNX model: there is no graph with nodes in it.",
            "Export the model again, for example with torch.onnx.export.",
        )
    return proto, name, folder


def _check_versions(onnx: Any, proto: Any, name: str) -> None:
    if proto.ir_version > onnx.IR_VERSION:
        raise OnnxError(
            f"{name} is of IR version {proto.ir_version}, and onnx {onnx.__version__} reads up to "
            f"{onnx.IR_VERSION}.",
            "Install a newer onnx and onnxruntime, or export the model for an older version.",
        )
    newest = onnx.defs.onnx_opset_version()
    for each in proto.opset_import:
        if each.domain in _OWN_DOMAINS and not 1 <= each.version <= newest:
            raise OnnxError(
                f"{name} is of opset {each.version}, and onnx {onnx.__version__} knows 1 to {newest}.",
                "Install a newer onnx and onnxruntime, or export the model with an older opset.",
            )
    if not proto.opset_import:
        raise OnnxError(f"{name} names no opset.", "Export the model again.")


def _check_weights(onnx: Any, proto: Any, name: str, folder: Path | None) -> None:
    """Bring weights in from other files. Raises OnnxError where one is missing or too short."""
    helper = library("onnx.external_data_helper")
    for graph in graphs(proto.graph):
        for tensor in graph.initializer:
            if not helper.uses_external_data(tensor):
                continue
            where = {each.key: each.value for each in tensor.external_data}
            location = where.get("location", "")
            if folder is None:
                raise OnnxError(
                    f"The weights {tensor.name} of {name.lower()} are in another file, {location}.",
                    "Load the model from its file, which lies beside that one.",
                )
            cached = _cached(folder, location)
            if cached:
                next(each for each in tensor.external_data if each.key == "location").value = cached.name
            elif not (folder / location).resolve().is_relative_to(folder.resolve()):
                raise OnnxError(
                    f"The weights {tensor.name} of {name} are in {location}, which is outside of the folder "
                    f"of the model, {folder}.",
                    "Copy the model and its weights into one folder; of links what they lead to: cp -L.",
                )
            try:
                helper.load_external_data_for_tensor(tensor, str(cached.parent if cached else folder))
            except (OSError, ValueError, onnx.checker.ValidationError):
                raise OnnxError(
                    f"The weights {tensor.name} of {name} are missing: {folder / location} cannot be read, "
                    "or is too short.",
                    "Copy that file into the folder of the model.",
                ) from None
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]


def _cached(folder: Path, location: str) -> Path | None:
    """The file that a link in Hugging Face's cache leads to; None: it is no such link.

    There `models--NAME/snapshots/REVISION/model.onnx_data` leads to a file of `models--NAME/blobs`. A link to
    anything else, another model's files too, is none.
    """
    snapshots = next((each for each in folder.parents if each.name == "snapshots"), None)
    link = folder / location
    if snapshots is None or not snapshots.parent.name.startswith("models--"):
        return None
    if ".." in Path(location).parts or not link.is_relative_to(folder) or not link.is_symlink():
        return None
    found = link.resolve()
    is_own = found.parent == snapshots.parent.resolve() / "blobs"
    return found if is_own and found.is_file() else None


def _name_nodes(graph: Any) -> None:
    """Give each node a name of its own: messages, plans and profiles use it."""
    seen: set[str] = set()
    for place, node in enumerate(graph.node):
        name = node.name or f"{node.op_type}_{place}"
        while name in seen:
            name = f"{name}_{place}"
        node.name = name
        seen.add(name)


def _check_operators(onnx: Any, proto: Any, name: str) -> None:
    """Refuse operators of the standard that its opset does not have; other domains are ONNX Runtime's."""
    versions = {each.domain if each.domain != "ai.onnx" else "": each.version for each in proto.opset_import}
    for graph in graphs(proto.graph):
        for node in graph.node:
            domain = "" if node.domain in _OWN_DOMAINS else node.domain
            if domain not in versions and domain != "com.microsoft":
                raise OnnxError(
                    f"Node {node.name or node.op_type} of {name} is of the domain {domain or 'ai.onnx'}, "
                    "whose opset the model does not name.",
                    "Export the model again.",
                )
            if domain and not domain.startswith("ai.onnx"):
                continue
            if not onnx.defs.has(node.op_type, versions[domain], domain):
                raise OnnxError(
                    f"Node {node.name or node.op_type} of {name} is a {node.op_type}, which opset "
                    f"{versions[domain]} of {domain or 'ai.onnx'} does not have.",
                    "Export the model with another opset, or without this operator.",
                )


def _sort(graph: Any, name: str) -> None:
    """Put nodes into an order in which they can run. Raises OnnxError for cycles and for missing values."""
    defined = {each.name for each in graph.input} | {each.name for each in graph.initializer}
    defined |= {each.values.name for each in graph.sparse_initializer}
    makers = {output: node for node in graph.node for output in node.output if output}
    twice = _twice(graph.node, defined)
    if twice:
        raise OnnxError(f"Two nodes of {name} make the value {twice}.", "Export the model again.")
    for node in graph.node:
        for value in needed(node):
            if value not in defined and value not in makers:
                raise OnnxError(
                    f"Node {node.name} of {name} uses {value}, which nothing makes: no input, no weight, "
                    "no node.",
                    "Export the model again, with its weights.",
                )
    for each in graph.output:
        if each.name not in defined and each.name not in makers:
            raise OnnxError(f"Nothing in {name} makes its output {each.name}.", "Export the model again.")
    nodes = sorted_nodes(list(graph.node), defined)
    if len(nodes) < len(graph.node):
        done = {node.name for node in nodes}
        circle = [node.name for node in graph.node if node.name not in done]
        raise OnnxError(
            f"The graph of {name} has a cycle: node {circle[0]} needs what depends on its own result.",
            "Export the model again: a graph must be acyclic; loops are Loop or Scan nodes.",
        )
    if [node.name for node in nodes] != [node.name for node in graph.node]:
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _twice(nodes: Iterable[Any], defined: set[str]) -> str:
    seen = set(defined)
    for node in nodes:
        for output in node.output:
            if output and output in seen:
                return output
            seen.add(output)
    return ""


def _check_shapes(onnx: Any, proto: Any, name: str) -> None:
    """Refuse models whose types or fixed shapes contradict each other."""
    if proto.ByteSize() > 1 << 30:  # inference copies the model, and protobuf ends at 2 GiB
        return
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    except Exception as error:
        text = " ".join(str(error).split())
        raise OnnxError(
            f"The shapes in {name} contradict each other: {text[:300]}", "Export it again."
        ) from None
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(inferred.graph.value_info)


def _input(onnx: Any, value: Any) -> Input:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise OnnxError(
            f"Input {value.name} is not a tensor.", "Export the model so that its inputs are plain tensors."
        )
    dtype = "str" if tensor.elem_type == 8 else onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    if not tensor.HasField("shape"):
        return Input(value.name, dtype, None)
    shape = tuple(_dimension(each) for each in tensor.shape.dim)
    return Input(value.name, dtype, shape)


def _dimension(dim: Any) -> int | str | None:
    if dim.HasField("dim_value") and dim.dim_value > 0:
        return dim.dim_value
    return dim.dim_param or None
