"""A stage's parameters and buffers on its device, with the values of a model, of its state, or of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.partition.code.errors import StageCodeError

__all__ = ["State", "place"]

#: By the names of the model's `state_dict`; a file or folder of safetensors, or the index of several.
State = Mapping[str, Tensor] | str | Path

_INDEX = "model.safetensors.index.json"


def place(scopes: Iterable[nn.Module], model: nn.Module, device: torch.device, state: State | None) -> None:
    """Put what `scopes` share with `model` on `device`, and leave the model as it is.

    What `model.state_dict()` would have is read from `state`, if there is one, and nothing else of it is. Raises
    StageCodeError where that lacks something, or where a tensor is on the meta device and nothing says its values.
    """
    names: dict[int, list[str]] = {}
    for name, one in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(one), []).append(name)
    saved = set(model.state_dict())
    source = None if state is None else _Source(state)
    made: dict[int, Tensor] = {}

    def placed(one: Tensor) -> Tensor:
        called = names.get(id(one), [])
        found: Tensor | None
        if source is not None and saved.intersection(called):
            found = source.read(called, one)
        elif one.device == device:
            return one
        elif one.is_meta:
            found = _initialised(model, called[0], device) if called and not saved.intersection(called) else None
            if found is None:
                what = called[0] if called else "a tensor of the model's"
                raise StageCodeError(
                    f"{what}: is on the meta device, and has no values: give state=, a state dict or a file of "
                    "safetensors, and for what is in neither a model with values"
                )
        else:
            found = one.detach()
        moved = found.to(device, one.dtype, copy=source is not None)
        return nn.Parameter(moved, one.requires_grad) if isinstance(one, nn.Parameter) else moved

    for scope in scopes:
        tables: list[dict[str, Any]] = [scope._parameters, scope._buffers]
        for table in tables:
            for name, one in table.items():
                if one is not None:
                    table[name] = made[id(one)] if id(one) in made else made.setdefault(id(one), placed(one))


def _initialised(model: nn.Module, name: str, device: torch.device) -> Tensor | None:
    """A buffer that is not saved, as its module, or a model of Hugging Face's, initializes it; None if neither does."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    tables = module._buffers
    empty = tables[leaf]
    if empty is None or not all(one.is_meta for one in module.parameters(recurse=False)):
        return None  # lest it makes values anew
    whole = next((one for one in model.modules() if hasattr(one, "_init_weights")), None)
    found: list[Tensor] = []
    try:
        for filled in (0, 1):  # what is alike after both does not come from there
            tables[leaf] = torch.full_like(empty, filled, device=device)
            with torch.no_grad():
                if whole is not None:
                    whole._init_weights(module)  # type: ignore[operator]
                elif hasattr(module, "reset_parameters"):
                    module.reset_parameters()  # type: ignore[operator]
            found.append(tables[leaf])  # type: ignore[arg-type]
    finally:
        tables[leaf] = empty
    return found[0] if torch.equal(*found) else None


class _Source:
    """Reads tensors by name, each when it is asked for."""

    def __init__(self, state: State) -> None:
        self._given = state if isinstance(state, Mapping) else None
        self._where = "state" if isinstance(state, Mapping) else str(state)
        self._files: Mapping[str, Path] = {} if isinstance(state, Mapping) else _files(Path(state))

    def read(self, names: Iterable[str], like: Tensor) -> Tensor:
        """The tensor with one of these names, of the shape that `like` has."""
        known: Mapping[str, Any] = self._files if self._given is None else self._given
        name = next((one for one in names if one in known), None)
        if name is None:
            raise StageCodeError(f"{self._where}: has no {next(iter(names))!r}: give the state of the plan's model")
        found = self._given[name] if self._given is not None else _read(self._files[name], name)
        if found.shape != like.shape:
            shapes = f"{name!r} of {tuple(found.shape)}, and the model's is {tuple(like.shape)}"
            raise StageCodeError(f"{self._where}: has {shapes}: give the state of the plan's model")
        return found.detach()


def _files(path: Path) -> dict[str, Path]:
    """Which file has the tensor of a name."""
    if path.is_dir():
        path = path / _INDEX if (path / _INDEX).is_file() else path / "model.safetensors"
    try:
        if path.suffix == ".json":
            table = json.loads(path.read_text())["weight_map"]
            return {str(name): path.parent / Path(str(file)).name for name, file in table.items()}
        with _opened(path) as file:
            return dict.fromkeys(file.keys(), path)
    except OSError as error:
        raise StageCodeError(f"{path}: {error.strerror or error}: state= names a file of safetensors") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageCodeError(f"{path}: is no index of safetensors files: {error}") from error


def _read(path: Path, name: str) -> Tensor:
    with _opened(path) as file:
        found: Tensor = file.get_tensor(name)
    return found


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise StageCodeError(f"{path}: safetensors is missing: pip install safetensors") from error
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise StageCodeError(f"{path}: no safetensors: {error}") from error
