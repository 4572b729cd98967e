"""Stage code beside its plan, and back to modules that share their parameters with the user's model."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from evenpipe.partition.code.errors import StageCodeError
from evenpipe.partition.code.part import Part, Scope
from evenpipe.partition.code.writing import constants_apart, digest_of, stage_sources
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.trace import Graph
from evenpipe.report import write_atomically

__all__ = ["load_parts", "part_types", "tensors_of", "write_stages"]


def write_stages(graph: Graph, profile: Profile, plan: Plan, plan_path: Path) -> tuple[Path, ...]:
    """Writes `P.stage0.py` … beside `P.json`, each whole or not at all; large constants as `P.constants.pt`.

    Raises what `stage_sources` does, and OSError.
    """
    sources = stage_sources(graph, profile, plan)
    if constants := constants_apart(graph):
        content = io.BytesIO()
        torch.save({"plan": digest_of(plan), "tensors": constants}, content)
        write_atomically(_constants_path(plan_path), content.getvalue())
    paths = tuple(_stage_path(plan_path, stage) for stage in range(len(sources)))
    for path, source in zip(paths, sources, strict=True):
        write_atomically(path, source)
    return paths


def load_parts(plan_path: Path, stage: int, model: nn.Module) -> tuple[Part, ...]:
    """A stage's parts, in order of chunks; what they use of the model's parameters and buffers is the model's own.

    Raises StageCodeError, or PartitionError for the plan.
    """
    parts = tuple(made() for made in part_types(plan_path, stage))
    of_name = tensors_of(model)
    path, plan = _stage_path(plan_path, stage), digest_of(Plan.read(plan_path))
    device = next((tensor.device for tensor in of_name.values()), torch.device("cpu"))
    for part in parts:
        _take(part, model, of_name, f"{path}: the model has")
        _check_modules(part, model, f"{path}: the model's")
        _take_constants(part, plan_path, plan, device)
    return parts


def part_types(plan_path: Path, stage: int) -> tuple[type[Part], ...]:
    """The classes of a stage's parts: what they take, give and use. Raises what `load_parts` does."""
    plan = Plan.read(plan_path)
    if not 0 <= stage < plan.stage_count:
        raise StageCodeError(f"{plan_path}: it has {plan.stage_count} stages, and none of number {stage}")
    path = _stage_path(plan_path, stage)
    module = _module(path, plan_path)
    if getattr(module, "PLAN", None) != digest_of(plan):
        raise StageCodeError(f"{path}: it is of another plan than {plan_path} is now: {_remedy(plan_path)}")
    return tuple(module.PARTS)


def _stage_path(plan_path: Path, stage: int) -> Path:
    return plan_path.with_name(f"{plan_path.stem}.stage{stage}.py")


def _constants_path(plan_path: Path) -> Path:
    return plan_path.with_name(f"{plan_path.stem}.constants.pt")


def _remedy(plan_path: Path) -> str:
    return f"write it with evenpipe partition … --out {plan_path}"


def _module(path: Path, plan_path: Path) -> ModuleType:
    """Not by import, whose cache takes a file written in the same second for the one before."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    except OSError as error:
        raise StageCodeError(f"{path}: {error.strerror}: {_remedy(plan_path)}") from error
    except Exception as error:
        raise StageCodeError(f"{path}: {type(error).__name__}: {error}: {_remedy(plan_path)}") from error
    return module


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


def _check_modules(part: Part, model: nn.Module, models: str) -> None:
    """That the operations of the plan are those of the model's modules, as far as these tell by their types."""
    known = dict(model.named_modules(remove_duplicate=False))
    for kind, names in part.MODULES.items():
        for name in names:
            if name in known and (found := type(known[name]).__name__) != kind:
                raise StageCodeError(
                    f"{models} {name} is a {found}, and the plan's was a {kind}: make a plan of this one"
                )


def _take_constants(part: Part, plan_path: Path, plan: str, device: torch.device) -> None:
    saved: dict[str, Tensor] = {}
    if any(tensor is None for tensor in part.CONSTANTS.values()):
        saved = _constants_of(_constants_path(plan_path), plan_path, plan)
    for name, tensor in part.CONSTANTS.items():
        _register(part, name, (saved[name] if tensor is None else tensor).to(device), persistent=False)


def _constants_of(path: Path, plan_path: Path, plan: str) -> dict[str, Tensor]:
    """The tensors saved apart, if they are of this plan."""
    try:
        document = torch.load(path, weights_only=True)
    except OSError as error:
        raise StageCodeError(f"{path}: {error.strerror}: {_remedy(plan_path)}") from error
    except Exception as error:  # torch.load raises whatever its parts do
        raise StageCodeError(f"{path}: {type(error).__name__}: no constants of a plan: {_remedy(plan_path)}") from error
    if not isinstance(document, dict) or document.get("plan") != plan:
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
