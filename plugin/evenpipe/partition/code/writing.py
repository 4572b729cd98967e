"""The source of each stage of a plan."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from evenpipe.partition.code import text
from evenpipe.partition.code.body import Body, write_body
from evenpipe.partition.code.errors import StageCodeError
from evenpipe.partition.code.keeping import Kept, keeping_text, kept
from evenpipe.partition.code.part import Boundary
from evenpipe.partition.code.selecting import Selected, boundaries, select
from evenpipe.partition.counting import graph_digest
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.trace import Graph

__all__ = ["constants_apart", "digest_of", "stage_sources"]

#: Constants of more elements are saved beside the code.
_MOST_INLINE: Final = 16
#: How torch.export names tensors that the user's code makes while it runs.
_LIFTED: Final = "lifted_tensor_"


def stage_sources(graph: Graph, profile: Profile, plan: Plan) -> tuple[str, ...]:
    """One file a stage. Raises PartitionError where the plan is of another profile, StageCodeError for what cannot be.

    `graph`: the one that the profile is of.
    """
    plan.check(profile)
    if graph_digest(graph) != profile.origin.digest or graph.micro_batch_size != profile.origin.micro_batch_size:
        raise StageCodeError(
            "the graph is not the one that the profile is of: trace the same model with the same inputs"
        )
    parts = select(graph, plan.cuts)
    sources = []
    for stage in range(plan.stage_count):
        files: dict[str, str] = {}
        classes = []
        for position, part in enumerate(parts):
            if plan.stages[position].stage == stage:
                through = kept(graph, profile, plan.stages[position], plan.host_gbps, part)
                body = write_body(graph, part, through, files)
                files = body.files
                classes.append(_class(graph, part, position, body, through, len(parts)))
        names = [f"Part{position}" for position, part in enumerate(plan.stages) if part.stage == stage]
        sources.append(_file(graph, plan, stage, files, names, classes))
    return tuple(sources)


def digest_of(plan: Plan) -> str:
    """Return which plan code is of: the digest of all that the plan says."""
    return hashlib.sha256(plan.model_dump_json(exclude={"code"}).encode()).hexdigest()[:16]


def constants_apart(graph: Graph) -> dict[str, Tensor]:
    """Those that are too large for the code."""
    return {name: tensor for name, tensor in _constants(graph).items() if tensor.numel() > _MOST_INLINE}


def _constants(graph: Graph) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {
        str(node.target): operator.attrgetter(str(node.target))(graph.module)
        for node in graph.module.graph.nodes
        if node.op == "get_attr" and _is_lifted(str(node.target))
    }
    for name, tensor in found.items():
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            found[name] = tensor.constant
        elif isinstance(tensor, FakeTensor):
            raise StageCodeError(f"{name}: a tensor that the model's code makes has no values: trace it with weights")
    return found


def _is_lifted(name: str) -> bool:
    """Whether the user's code makes it; it is named by the module whose forward does."""
    return name.rpartition(".")[2].startswith(_LIFTED)


def _file(
    graph: Graph, plan: Plan, stage: int, files: Mapping[str, str], names: Sequence[str], classes: Sequence[str]
) -> str:
    origin = plan.origin
    bpipe = " with BPipe" if plan.bpipe else ""
    title = f"Stage {stage} of {plan.stage_count} of {origin.model}, micro-batches of {origin.micro_batch_size}"
    listed = "".join(f"    {text.value(name, str)}: {text.value(file, str)},\n" for name, file in sorted(files.items()))
    return (
        f'"""{title}, for {plan.schedule}{bpipe}: written by `evenpipe partition`."""\n\n'
        f"{_imports(classes)}\n\n"
        "aten = torch.ops.aten\n\n"
        f"# The plan that this is of.\nPLAN = {text.value(digest_of(plan), str)}\n\n"
        f"# Where the lines that comments quote are.\nFILES = {{\n{listed}}}\n\n\n"
        + "\n\n".join(classes)
        + f"\n\nPARTS = ({', '.join(names)}{',' * (len(names) == 1)})\n"
    )


def _imports(classes: Sequence[str]) -> str:
    def used(name: str) -> bool:
        return any(name in code for code in classes)

    more = [name for name in ("device_of",) if used(f"{name}(")]
    names = ", ".join(["Boundary", *(["Keeping"] if used("Keeping(") else []), "Part", *more])
    modules = "import operator\n\nimport torch" if used("operator.") else "import torch"
    return f"{modules}\n\nfrom evenpipe.partition.code import {names}"


def _class(graph: Graph, part: Selected, position: int, body: Body, through: Kept, count: int) -> str:
    last = position == count - 1
    inputs = list(dict.fromkeys(body.inputs))
    nodes = {node.target: node for node in graph.module.graph.nodes if node.op == "placeholder"}
    unread = [name for name in graph.inputs if position == 0 and not nodes[name].users]
    lines = [
        f"class Part{position}(Part):",
        f'    """Nodes {part.first} to {part.last}: from {graph.names[part.first]} to {graph.names[part.last]}."""',
        "",
        _table("INPUTS", "(", [text.value(name, str) for name in inputs]),
        _table("INPUT_SHAPES", "(", [text.value(tuple(graph.inputs[name].shape), str) for name in inputs]),
        _table("INPUT_DTYPES", "(", [str(graph.inputs[name].dtype) for name in inputs]),
        *([_table("UNREAD", "(", [text.value(name, str) for name in unread])] if unread else []),
        _table("RECEIVES", "(", [_boundary(one) for one in boundaries(graph, part.received)]),
        _table("SENDS", "(", [_boundary(one) for one in boundaries(graph, part.sent)]),
        _table("RANDOM", "(", [str(ordinal) for ordinal in body.random]),
        f"    LAST = {last}",
        _table("STATE", "{", _state(graph, [*body.held, *(graph.unread if position == 0 else ())])),
        _table("MODULES", "{", _modules(part)),
        _table("CONSTANTS", "{", _inline(graph, body.held)),
        *(f"    {line}" for line in keeping_text(through.keeping)),
        "",
        "    def forward(self, inputs, draws, keep, *received):",
        *(f"        {line}".rstrip() for line in body.lines),
    ]
    return "\n".join(lines) + "\n"


def _table(name: str, opening: str, entries: Sequence[str]) -> str:
    closing = {"(": ",)" if len(entries) == 1 else ")", "{": "}"}[opening]
    width = 0 if opening == "{" and entries else text.WIDTH - 4
    return "\n".join(
        f"    {line}" for line in text.bracketed(f"{name} = {opening}", entries, closing, width).split("\n")
    )


def _boundary(of: Boundary) -> str:
    return f"Boundary({text.value(of.name, str)}, {of.shape}, {of.dtype}, gradient={of.gradient})"


def _state(graph: Graph, names: Sequence[str]) -> list[str]:
    """What a part takes from the model, by name."""
    found = []
    for name in sorted({name for name in names if not _is_lifted(name)}):
        tensor = graph.unread[name] if name in graph.unread else operator.attrgetter(name)(graph.module)
        found.append(f"{text.value(name, str)}: ({tensor.dtype}, {text.value(tuple(tensor.shape), str)})")
    return found


def _modules(part: Selected) -> list[str]:
    """The innermost module of each node, where it is not the model itself, under its type."""
    found: dict[str, dict[str, None]] = {}
    for node in part.body:
        name, kind = next(reversed((node.meta.get("nn_module_stack") or {"": ("", "")}).values()))
        if name:
            kind = kind if isinstance(kind, str) else kind.__name__
            found.setdefault(kind.rpartition(".")[2], {})[name] = None
    entries = []
    for kind, names in sorted(found.items()):
        closing = ",)" if len(names) == 1 else ")"
        listed = [text.value(name, str) for name in names]
        entries.append(text.bracketed(f"{text.value(kind, str)}: (", listed, closing, text.WIDTH - 9))
    return [entry.replace("\n", "\n    ") for entry in entries]


def _inline(graph: Graph, names: Sequence[str]) -> list[str]:
    constants = _constants(graph)
    wanted = [name for name in dict.fromkeys(names) if name in constants]
    return [f"{text.value(name, str)}: {_constant(constants[name])}" for name in wanted]


def _constant(tensor: Tensor) -> str:
    """None where it is saved apart."""
    if tensor.numel() > _MOST_INLINE:
        return "None"
    values: Any = tensor.tolist()
    return f"torch.tensor({text.value(values, str)}, dtype={tensor.dtype})"
