"""Stage code beside its plan, and back to modules that share their parameters with the user's model."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from evenpipe.partition.profile import Profile
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.trace import Graph, attention_of, tensors_of
from evenpipe.report.files import write_atomically
from evenpipe.stage_code.form import check_form
from evenpipe.stage_code.part import Part, Scope, StageCodeError
from evenpipe.stage_code.writing import constants_apart, digest_of, stage_sources

__all__ = ["State", "files_of", "load_parts", "opened", "part_types", "place", "write_stages"]

#: By the names of the model's `state_dict`; a file or folder of safetensors, or the index of several.
State = Mapping[str, Tensor] | str | Path

_PLAN_LINE: Final = re.compile(r"^PLAN = ['\"]([0-9a-f]+)['\"]$", re.MULTILINE)
_INDEX: Final = "model.safetensors.index.json"


def write_stages(graph: Graph, profile: Profile, plan: Plan, plan_path: Path) -> tuple[Path, ...]:
    """Write `P.stage0.py` … beside `P.json`, each whole or not at all; large constants as `P.constants.pt`.

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
    """Return a stage's parts, in order of chunks; their parameters and buffers are the model's own.

    Where these are not on `device`, or there is a `state` (see `place`), the parts have their own, and the model, which
    may be on the meta device, stays as it is. `trust`: execute files that have changed since the plan, or that do more
    than operations on tensors (`check_form`). Raises StageCodeError, or PartitionError for the plan.
    """
    parts = tuple(part_type() for part_type in part_types(plan_path, stage, trust))
    path, plan = _stage_path(plan_path, stage), Plan.read(plan_path)
    device = device or next((tensor.device for tensor in tensors_of(model).values()), torch.device("cpu"))
    _check_attention(plan_path, plan.origin.attention, attention_of(model))
    for part in parts:
        _share(part, model, f"{path}: the model has")
        _check_modules(part, model, f"{path}: the model's")
    place([scope for part in parts for scope in part.modules()], model, device, state)
    for part in parts:
        _take_constants(part, plan_path, plan, device, trust)
    return parts


def part_types(plan_path: Path, stage: int, trust: bool = False) -> tuple[type[Part], ...]:
    """Return the classes of a stage's parts: what they take, give and use. Raises what `load_parts` does."""
    plan = Plan.read(plan_path)
    if not 0 <= stage < plan.stage_count:
        raise StageCodeError(f"{plan_path}: it has {plan.stage_count} stages, and none of number {stage}")
    path = _stage_path(plan_path, stage)
    source = _verified(path, plan_path, plan, trust).decode(errors="replace")
    named = _PLAN_LINE.search(source)
    if named is None or named[1] != digest_of(plan):
        raise StageCodeError(f"{path}: it is of another plan than {plan_path} is now: {_remedy(plan_path)}")
    if not trust:
        check_form(source, str(path))
    # Not by import, whose cache takes a file written in the same second for the one before.
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
        return tuple(module.PARTS)
    except Exception as error:
        raise StageCodeError(f"{path}: {type(error).__name__}: {error}: {_remedy(plan_path)}") from error


def _stage_path(plan_path: Path, stage: int) -> Path:
    return plan_path.with_name(f"{plan_path.stem}.stage{stage}.py")


def _constants_path(plan_path: Path) -> Path:
    return plan_path.with_name(f"{plan_path.stem}.constants.pt")


def _remedy(plan_path: Path) -> str:
    return f"write it with evenpipe partition … --out {plan_path}"


def _verified(path: Path, plan_path: Path, plan: Plan, trust: bool) -> bytes:
    """Return the bytes of a file beside the plan, if they are those that were written with it."""
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


def _check_attention(plan_path: Path, planned: str | None, models: str | None) -> None:
    if None not in (planned, models) and planned != models:
        raise StageCodeError(
            f"{plan_path}: the model has {models} attention, and the plan is of {planned}: make a plan with "
            f"--attention {models}, or the model with attn_implementation={planned!r}"
        )


def _check_modules(part: Part, model: nn.Module, models: str) -> None:
    """Check that the operations of the plan are those of the model's modules, as far as their types show."""
    known = dict(model.named_modules(remove_duplicate=False))
    for kind, names in part.MODULES.items():
        for name in names:
            if name in known and (now := type(known[name]).__name__) != kind:
                raise StageCodeError(
                    f"{models} {name} is a {now}, and the plan's was a {kind}: make a plan of this one"
                )


def _share(part: Part, model: nn.Module, model_has: str) -> None:
    """Share with the model what the part uses, under each name that it has there."""
    tensors, names = tensors_of(model), _names_of(model)
    for name, (dtype, shape) in part.STATE.items():
        tensor = tensors.get(name, _attribute(model, name))
        if tensor is None:
            raise StageCodeError(f"{model_has} no {name!r}, which the plan's had: give the model that it was made of")
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            other = f"{name!r} of {tuple(tensor.shape)}, {tensor.dtype}"
            raise StageCodeError(f"{model_has} {other}, and the plan's had {shape}, {dtype}: make a plan of this one")
        for alias in names.get(id(tensor), [name]):
            path, _, leaf = alias.rpartition(".")
            saved = alias in tensors and leaf not in model.get_submodule(path)._non_persistent_buffers_set
            _register(part, alias, tensor, persistent=saved)


def _names_of(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter and buffer, by its identity."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors_of(model).items():
        names.setdefault(id(tensor), []).append(name)
    return names


def _attribute(model: nn.Module, name: str) -> Tensor | None:
    """Return a tensor that is neither parameter nor buffer."""
    value: object = model
    for step in name.split("."):
        value = getattr(value, step, None)
    return value if isinstance(value, Tensor) else None


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


def _take_constants(part: Part, plan_path: Path, plan: Plan, device: torch.device, trust: bool) -> None:
    saved: dict[str, Tensor] = {}
    if any(tensor is None for tensor in part.CONSTANTS.values()):
        saved = _saved_constants(_constants_path(plan_path), plan_path, plan, trust)
    for name, tensor in part.CONSTANTS.items():
        _register(part, name, (saved[name] if tensor is None else tensor).to(device), persistent=False)


def _saved_constants(path: Path, plan_path: Path, plan: Plan, trust: bool) -> dict[str, Tensor]:
    """Return the tensors that are saved apart, if they are of this plan."""
    content = _verified(path, plan_path, plan, trust)
    try:
        document = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch.load raises whatever its parts do
        raise StageCodeError(f"{path}: {type(error).__name__}: no constants of a plan: {_remedy(plan_path)}") from error
    if not isinstance(document, dict) or document.get("plan") != digest_of(plan):
        raise StageCodeError(f"{path}: it is of another plan than {plan_path} is now: {_remedy(plan_path)}")
    tensors: dict[str, Tensor] = document["tensors"]
    return tensors


def place(scopes: Iterable[nn.Module], model: nn.Module, device: torch.device, state: State | None) -> None:
    """Put what `scopes` share with `model` on `device`, and leave the model as it is.

    What `model.state_dict()` would have is read from `state`, if there is one, and nothing else of it is. Raises
    StageCodeError where that lacks something, or where a tensor is on the meta device and nothing says its values.
    """
    names = _names_of(model)
    saved = set(model.state_dict())
    source = None if state is None else state if isinstance(state, Mapping) else files_of(Path(state))
    where = "state" if isinstance(state, Mapping) else str(state)
    placed: dict[int, Tensor] = {}

    def place_one(tensor: Tensor) -> Tensor:
        called = names.get(id(tensor), [])
        values: Tensor | None
        if source is not None and saved.intersection(called):
            values = _read(source, called, tensor, where)
        elif tensor.device == device:
            return tensor
        elif tensor.is_meta:
            values = _initialised(model, called[0], device) if called and not saved.intersection(called) else None
            if values is None:
                what = called[0] if called else "a tensor of the model's"
                raise StageCodeError(
                    f"{what}: is on the meta device, and has no values: give state=, a state dict or a file of "
                    "safetensors, and for what is in neither a model with values"
                )
        else:
            values = tensor.detach()
        moved = values.to(device, tensor.dtype, copy=source is not None)
        return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved

    for scope in scopes:
        tables: list[dict[str, Any]] = [scope._parameters, scope._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in placed:
                        placed[id(tensor)] = place_one(tensor)
                    table[name] = placed[id(tensor)]


def _initialised(model: nn.Module, name: str, device: torch.device) -> Tensor | None:
    """Return an unsaved buffer as its module, or a model of Hugging Face's, initializes it; None if neither does."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    buffers = module._buffers
    empty = buffers[leaf]
    if empty is None or not all(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return None  # lest it makes values anew
    whole = next((of_model for of_model in model.modules() if hasattr(of_model, "_init_weights")), None)
    initialised: list[Tensor] = []
    try:
        for filled in (0, 1):  # values that differ between the two do not come from the initialization
            buffers[leaf] = torch.full_like(empty, filled, device=device)
            with torch.no_grad():
                if whole is not None:
                    whole._init_weights(module)  # type: ignore[operator]
                elif hasattr(module, "reset_parameters"):
                    module.reset_parameters()  # type: ignore[operator]
            initialised.append(buffers[leaf])  # type: ignore[arg-type]
    finally:
        buffers[leaf] = empty
    return initialised[0] if torch.equal(*initialised) else None


def _read(source: Mapping[str, Tensor | Path], names: Sequence[str], like: Tensor, where: str) -> Tensor:
    """Return the tensor with one of these names, of the shape that `like` has, from memory or from its file."""
    name = next((name for name in names if name in source), None)
    if name is None:
        raise StageCodeError(f"{where}: has no {names[0]!r}: give the state of the plan's model")
    value = source[name]
    if isinstance(value, Path):
        with opened(value) as file:
            value = file.get_tensor(name)
    if value.shape != like.shape:
        shapes = f"{name!r} of {tuple(value.shape)}, and the model's is {tuple(like.shape)}"
        raise StageCodeError(f"{where}: has {shapes}: give the state of the plan's model")
    return value.detach()


def files_of(path: Path) -> dict[str, Path]:
    """Return the file of each tensor of a file, a folder or an index, by the tensor's name. Raises StageCodeError."""
    if path.is_dir():
        path = path / _INDEX if (path / _INDEX).is_file() else path / "model.safetensors"
    try:
        if path.suffix == ".json":
            table = json.loads(path.read_text())["weight_map"]
            return {str(name): path.parent / Path(str(file)).name for name, file in table.items()}
        with opened(path) as file:
            return dict.fromkeys(file.keys(), path)
    except OSError as error:
        raise StageCodeError(f"{path}: {error.strerror or error}: state= names a file of safetensors") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageCodeError(f"{path}: is no index of safetensors files: {error}") from error


def opened(path: Path) -> Any:
    """Open a file of safetensors. Raises StageCodeError, and OSError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise StageCodeError(f"{path}: safetensors is missing: pip install safetensors") from error
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise StageCodeError(f"{path}: no safetensors: {error}") from error
