"""Stage code beside its plan, and back to modules that share their parameters with the user's model."""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from types import ModuleType
from typing import Final

import torch
from torch import Tensor, nn

from evenpipe.partition.code.errors import StageCodeError
from evenpipe.partition.code.part import Part, Scope
from evenpipe.partition.code.placing import State, place
from evenpipe.partition.code.writing import constants_apart, digest_of, stage_sources
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.trace import Graph, attention_of
from evenpipe.report.files import write_atomically

__all__ = ["load_parts", "part_types", "tensors_of", "write_stages"]


_PLAN_LINE: Final = re.compile(r"^PLAN = ['\"]([0-9a-f]+)['\"]$", re.MULTILINE)


def write_stages(graph: Graph, profile: Profile, plan: Plan, plan_path: Path) -> tuple[Path, ...]:
    """Writes `P.stage0.py` … beside `P.json`, each whole or not at all; large constants as `P.constants.pt`.

    At last the plan itself, with their digests: without these, nothing of it is executed. Raises what `stage_sources`
    does, and OSError.
    """
    sources = stage_sources(graph, profile, plan)
    contents: dict[Path, bytes] = {}
    if constants := constants_apart(graph):
        content = io.BytesIO()
        torch.save({"plan": digest_of(plan), "tensors": constants}, content)
        contents[_constants_path(plan_path)] = content.getvalue()
    paths = tuple(_stage_path(plan_path, stage) for stage in range(len(sources)))
    contents |= {path: source.encode() for path, source in zip(paths, sources, strict=True)}
    for path, written in contents.items():
        write_atomically(path, written)
    digests = {path.name: hashlib.sha256(written).hexdigest() for path, written in contents.items()}
    plan.model_copy(update={"code": digests}).write(plan_path)
    return paths


def load_parts(
    plan_path: Path,
    stage: int,
    model: nn.Module,
    trust: bool = False,
    device: torch.device | None = None,
    state: State | None = None,
) -> tuple[Part, ...]:
    """A stage's parts, in order of chunks; what they use of the model's parameters and buffers is the model's own.

    Where that is not on `device`, or there is a `state` (see `place`), it is of the parts' own, and the model, which
    may be on the meta device, stays as it is.
    `trust`: execute files whose digests are not those of the plan. Raises StageCodeError, or PartitionError for the
    plan.
    """
    parts = tuple(made() for made in part_types(plan_path, stage, trust))
    of_name = tensors_of(model)
    path, plan = _stage_path(plan_path, stage), Plan.read(plan_path)
    device = device or next((tensor.device for tensor in of_name.values()), torch.device("cpu"))
    _check_attention(plan_path, plan.origin.attention, attention_of(model))
    for part in parts:
        _take(part, model, of_name, f"{path}: the model has")
        _check_modules(part, model, f"{path}: the model's")
    place([scope for part in parts for scope in part.modules()], model, device, state)
    for part in parts:
        _take_constants(part, plan_path, plan, device, trust)
    return parts


def part_types(plan_path: Path, stage: int, trust: bool = False) -> tuple[type[Part], ...]:
    """The classes of a stage's parts: what they take, give and use. Raises what `load_parts` does."""
    plan = Plan.read(plan_path)
    if not 0 <= stage < plan.stage_count:
        raise StageCodeError(f"{plan_path}: it has {plan.stage_count} stages, and none of number {stage}")
    path = _stage_path(plan_path, stage)
    source = _verified(path, plan_path, plan, trust).decode(errors="replace")
    named = _PLAN_LINE.search(source)
    if named is None or named[1] != digest_of(plan):
        raise StageCodeError(f"{path}: it is of another plan than {plan_path} is now: {_remedy(plan_path)}")
    return _executed(source, path, plan_path)


def _stage_path(plan_path: Path, stage: int) -> Path:
    return plan_path.with_name(f"{plan_path.stem}.stage{stage}.py")


def _constants_path(plan_path: Path) -> Path:
    return plan_path.with_name(f"{plan_path.stem}.constants.pt")


def _remedy(plan_path: Path) -> str:
    return f"write it with evenpipe partition … --out {plan_path}"


def _verified(path: Path, plan_path: Path, plan: Plan, trust: bool) -> bytes:
    """The bytes of a file beside the plan, if they are those that were written with it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StageCodeError(f"{path}: {error.strerror}: {_remedy(plan_path)}") from error
    if trust or plan.code.get(path.name) == hashlib.sha256(content).hexdigest():
        return content
    wrong = "is not as it was written with" if path.name in plan.code else "has no digest in"
    raise StageCodeError(
        f"{path}: it {wrong} {plan_path}, and is not executed: {_remedy(plan_path)}, or trust it "
        "(evenpipe train --trust, PlannedPipeline(trust=True))"
    )


def _executed(source: str, path: Path, plan_path: Path) -> tuple[type[Part], ...]:
    """Not by import, whose cache takes a file written in the same second for the one before."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
        return tuple(module.PARTS)
    except Exception as error:
        raise StageCodeError(f"{path}: {type(error).__name__}: {error}: {_remedy(plan_path)}") from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Of all names, those of tied parameters too."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _take(part: Part, model: nn.Module, of_name: dict[str, Tensor], model_has: str) -> None:
    """Shares with the model what the part uses, under each name that it has there."""
    names: dict[int, list[str]] = {}
    for name, tensor in of_name.items():
        names.setdefault(id(tensor), []).append(name)
    for name, (dtype, shape) in part.STATE.items():
        found = of_name.get(name, _attribute(model, name))
        if found is None:
            raise StageCodeError(f"{model_has} no {name!r}, which the plan's had: give the model that it was made of")
        if (found.dtype, tuple(found.shape)) != (dtype, shape):
            other = f"{name!r} of {tuple(found.shape)}, {found.dtype}"
            raise StageCodeError(f"{model_has} {other}, and the plan's had {shape}, {dtype}: make a plan of this one")
        for alias in names.get(id(found), [name]):
            _register(part, alias, found, persistent=alias in of_name and _is_persistent(model, alias))


def _check_attention(plan_path: Path, planned: str | None, found: str | None) -> None:
    if None not in (planned, found) and planned != found:
        raise StageCodeError(
            f"{plan_path}: the model has {found} attention, and the plan is of {planned}: make a plan with --attention "
            f"{found}, or the model with attn_implementation={planned!r}"
        )


def _check_modules(part: Part, model: nn.Module, models: str) -> None:
    """That the operations of the plan are those of the model's modules, as far as these tell by their types."""
    known = dict(model.named_modules(remove_duplicate=False))
    for kind, names in part.MODULES.items():
        for name in names:
            if name in known and (found := type(known[name]).__name__) != kind:
                raise StageCodeError(
                    f"{models} {name} is a {found}, and the plan's was a {kind}: make a plan of this one"
                )


def _take_constants(part: Part, plan_path: Path, plan: Plan, device: torch.device, trust: bool) -> None:
    saved: dict[str, Tensor] = {}
    if any(tensor is None for tensor in part.CONSTANTS.values()):
        saved = _constants_of(_constants_path(plan_path), plan_path, plan, trust)
    for name, tensor in part.CONSTANTS.items():
        _register(part, name, (saved[name] if tensor is None else tensor).to(device), persistent=False)


def _constants_of(path: Path, plan_path: Path, plan: Plan, trust: bool) -> dict[str, Tensor]:
    """The tensors saved apart, if they are of this plan."""
    try:
        document = torch.load(io.BytesIO(_verified(path, plan_path, plan, trust)), weights_only=True)
    except StageCodeError:
        raise
    except Exception as error:  # torch.load raises whatever its parts do
        raise StageCodeError(f"{path}: {type(error).__name__}: no constants of a plan: {_remedy(plan_path)}") from error
    if not isinstance(document, dict) or document.get("plan") != digest_of(plan):
        raise StageCodeError(f"{path}: it is of another plan than {plan_path} is now: {_remedy(plan_path)}")
    tensors: dict[str, Tensor] = document["tensors"]
    return tensors


def _attribute(model: nn.Module, name: str) -> Tensor | None:
    """A tensor that is neither parameter nor buffer."""
    found: object = model
    for step in name.split("."):
        found = getattr(found, step, None)
    return found if isinstance(found, Tensor) else None


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(path)._non_persistent_buffers_set


def _register(part: Part, name: str, tensor: Tensor, *, persistent: bool) -> None:
    scope: nn.Module = part
    *path, leaf = name.split(".")
    for step in path:
        if step not in scope._modules:
            scope.add_module(step, Scope())
        scope = getattr(scope, step)
    if isinstance(tensor, nn.Parameter):
        scope.register_parameter(leaf, tensor)
    elif leaf not in scope._buffers:
        scope.register_buffer(leaf, tensor, persistent=persistent)
