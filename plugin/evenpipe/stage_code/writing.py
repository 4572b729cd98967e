"""The source of each stage of a plan."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from evenpipe.partition.profile import Profile
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.trace import Graph, PartNodes
from evenpipe.runtime.recompute_swap import Keeping
from evenpipe.stage_code.body import WIDTH, Body, bracketed, value_text, write_body
from evenpipe.stage_code.keeping import kept
from evenpipe.stage_code.part import StageCodeError

__all__ = ["constants_apart", "digest_of", "stage_sources"]

#: Constants of more elements are saved beside the code.
_MOST_INLINE: Final = 16
#: How torch.export names tensors that the user's code makes while it runs.
_LIFTED: Final = "lifted_tensor_"
#: Fields of a `Keeping` that are sets, and that are tables.
_SETS: Final = ("again", "dropped", "swapped")
_TABLES: Final = ("made", "ordinals", "out", "gone", "back")


def stage_sources(graph: Graph, profile: Profile, plan: Plan) -> tuple[str, ...]:
    """Return one file a stage. `graph`: the one that the profile is of.

    Raises PartitionError where the plan is of another profile, StageCodeError for what cannot be written.
    """
    plan.check(profile)
    if graph.digest != profile.origin.digest or graph.micro_batch_size != profile.origin.micro_batch_size:
        raise StageCodeError(
            "the graph is not the one that the profile is of: trace the same model with the same inputs"
        )
    nodes_of_parts = graph.parts(plan.cuts)
    sources = []
    for stage in range(plan.stage_count):
        files: dict[str, str] = {}
        classes = {}
        for position, (part, nodes) in enumerate(zip(plan.stages, nodes_of_parts, strict=True)):
            if part.stage == stage:
                calls = kept(graph, profile, part, plan.host_gbps, nodes)
                body = write_body(graph, nodes, calls, files)
                files = body.files
                classes[f"Part{position}"] = _class(graph, nodes, position, body, calls.keeping)
        sources.append(_file(plan, stage, files, classes))
    return tuple(sources)


def digest_of(plan: Plan) -> str:
    """Return which plan code is of: the digest of all that the plan says."""
    return hashlib.sha256(plan.model_dump_json(exclude={"code"}).encode()).hexdigest()[:16]


def constants_apart(graph: Graph) -> dict[str, Tensor]:
    """Return the constants that are too large for the code."""
    return {name: tensor for name, tensor in _constants(graph).items() if tensor.numel() > _MOST_INLINE}


def _constants(graph: Graph) -> dict[str, Tensor]:
    constants: dict[str, Tensor] = {}
    for node in graph.module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if _is_lifted(name):
            held = operator.attrgetter(name)(graph.module)
            tensor: Tensor | None = held.constant if isinstance(held, FakeTensor) else held
            if tensor is None:
                raise StageCodeError(
                    f"{name}: a tensor that the model's code makes has no values: trace it with weights"
                )
            constants[name] = tensor
    return constants


def _is_lifted(name: str) -> bool:
    """Return whether the user's code makes it; it is named by the module whose forward does."""
    return name.rpartition(".")[2].startswith(_LIFTED)


def _file(plan: Plan, stage: int, files: Mapping[str, str], classes: Mapping[str, str]) -> str:
    origin = plan.origin
    bpipe = " with BPipe" if plan.bpipe else ""
    model = _quoted(origin.model)
    title = f"Stage {stage} of {plan.stage_count} of {model}, micro-batches of {origin.micro_batch_size}"
    listed = "".join(f"    {_text(name)}: {_text(file)},\n" for name, file in sorted(files.items()))
    code = "\n\n".join(classes.values())
    used = ("Boundary", "Keeping", "Part", "device_of")
    names = ", ".join(name for name in used if name in ("Boundary", "Part") or f"{name}(" in code)
    modules = "import operator\n\nimport torch" if "operator." in code else "import torch"
    return (
        f'"""{title}, for {plan.schedule}{bpipe}: written by `evenpipe partition`."""\n\n'
        f"{modules}\n\nfrom evenpipe.stage_code import {names}\n\n"
        "aten = torch.ops.aten\n\n"
        f"# The plan that this is of.\nPLAN = {_text(digest_of(plan))}\n\n"
        f"# Where the lines that comments quote are.\nFILES = {{\n{listed}}}\n\n\n"
        f"{code}\n\nPARTS = ({', '.join(classes)}{',' * (len(classes) == 1)})\n"
    )


def _class(graph: Graph, part: PartNodes, position: int, body: Body, keeping: Keeping) -> str:
    inputs = list(dict.fromkeys(body.inputs))
    read = {node.target for node in graph.module.graph.find_nodes(op="placeholder") if node.users}
    unread = [name for name in graph.inputs if position == 0 and name not in read]
    state = [*body.held, *(graph.unread if position == 0 else ())]
    first, last = (_quoted(graph.names[number]) for number in (part.first, part.last))
    lines = [
        f"class Part{position}(Part):",
        f'    """Nodes {part.first} to {part.last}: from {first} to {last}."""',
        "",
        *_table("INPUTS", "(", [_text(name) for name in inputs]),
        *_table("INPUT_SHAPES", "(", [_text(tuple(graph.inputs[name].shape)) for name in inputs]),
        *_table("INPUT_DTYPES", "(", [str(graph.inputs[name].dtype) for name in inputs]),
        *(_table("UNREAD", "(", [_text(name) for name in unread]) if unread else []),
        *_table("RECEIVES", "(", _boundaries(graph, part.received)),
        *_table("SENDS", "(", _boundaries(graph, part.sent)),
        *_table("RANDOM", "(", [str(ordinal) for ordinal in body.random]),
        f"    LAST = {part.last == len(graph.nodes) - 1}",
        *_table("STATE", "{", _state(graph, state)),
        *_table("MODULES", "{", _modules(part)),
        *_table("CONSTANTS", "{", _inline(graph, body.held)),
        *_keeping(keeping),
        "",
        "    def forward(self, inputs, draws, keep, *received):",
        *(f"        {line}".rstrip() for line in body.lines),
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a name for a docstring, which it cannot end."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _text(value: Any) -> str:
    return value_text(value, str)


def _table(name: str, opening: str, entries: Sequence[str]) -> list[str]:
    """Return the lines of a class attribute; a dictionary's entries have a line each."""
    width = 0 if opening == "{" and entries else WIDTH - 4
    return _indented(bracketed(f"{name} = {opening}", entries, _closing(opening, entries), width))


def _closing(opening: str, entries: Sequence[str]) -> str:
    return "}" if opening == "{" else ",)" if len(entries) == 1 else ")"


def _indented(lines: str, by: int = 4) -> list[str]:
    return [" " * by + line for line in lines.split("\n")]


def _boundaries(graph: Graph, nodes: Sequence[Any]) -> list[str]:
    names = dict(zip(graph.nodes, graph.names, strict=True))
    values = [(names[node], graph.observed[node].values[0]) for node in nodes]
    return [f"Boundary({_text(name)}, {v.shape}, {v.dtype}, gradient={v.requires_grad})" for name, v in values]


def _state(graph: Graph, names: Sequence[str]) -> list[str]:
    entries = []
    for name in sorted({name for name in names if not _is_lifted(name)}):
        tensor = graph.unread[name] if name in graph.unread else operator.attrgetter(name)(graph.module)
        entries.append(f"{_text(name)}: ({tensor.dtype}, {_text(tuple(tensor.shape))})")
    return entries


def _modules(part: PartNodes) -> list[str]:
    """Return the innermost module of each node, where it is not the model itself, under its type."""
    modules: dict[str, dict[str, None]] = {}
    for node in part.body:
        name, kind = next(reversed((node.meta.get("nn_module_stack") or {"": ("", "")}).values()))
        if name:
            kind = kind if isinstance(kind, str) else kind.__name__
            modules.setdefault(kind.rpartition(".")[2], {})[name] = None
    entries = []
    for kind, names in sorted(modules.items()):
        entry = bracketed(f"{_text(kind)}: (", [_text(name) for name in names], _closing("(", [*names]), WIDTH - 9)
        entries.append(entry.replace("\n", "\n    "))
    return entries


def _inline(graph: Graph, names: Sequence[str]) -> list[str]:
    """Return the constants in the code: None for one that is saved apart."""
    constants = _constants(graph)
    entries = []
    for name in dict.fromkeys(names):
        if name in constants:
            tensor = constants[name]
            small = tensor.numel() <= _MOST_INLINE
            value = f"torch.tensor({_text(tensor.tolist())}, dtype={tensor.dtype})" if small else "None"
            entries.append(f"{_text(name)}: {value}")
    return entries


def _keeping(keeping: Keeping) -> list[str]:
    """Return the lines of the table of what is recomputed and swapped; none where autograd keeps all."""
    if not keeping.nodes:
        return []
    fields = [
        *((name, "{", [str(number) for number in sorted(getattr(keeping, name))]) for name in _SETS),
        *((name, "{", [f"{key}: {value}" for key, value in getattr(keeping, name).items()]) for name in _TABLES),
        ("early", "(", [str(number) for number in keeping.early]),
    ]
    lines = [
        line
        for name, opening, entries in fields
        if entries
        for line in _indented(bracketed(f"{name}={opening}", entries, f"{_closing(opening, entries)},", WIDTH - 8), 8)
    ]
    return ["    KEEPING = Keeping(", *lines, "    )"]
