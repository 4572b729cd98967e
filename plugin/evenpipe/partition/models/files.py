"""Models that a user's own file describes: a Python function, or a configuration of Hugging Face's."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves

from evenpipe.partition.models.errors import ModelError
from evenpipe.partition.models.example import Example
from evenpipe.partition.models.huggingface import for_training, inputs_of
from evenpipe.partition.models.precision import made_in

__all__ = ["from_config", "from_function"]


def from_function(where: str, micro_batch_size: int | None = None) -> Example:
    """What `FILE.py:FUNCTION` returns: (model, inputs), inputs a dictionary of the arguments of the model's forward.

    `micro_batch_size` is passed on to a function that has a parameter of that name; the first dimension of the first
    tensor is to be that long. Raises ModelError, which names the file and line, where the function raises, and what is
    wrong with what it returns.
    """
    path, colon, name = where.rpartition(":")
    file = Path(path)
    if not colon or file.suffix != ".py" or not name.isidentifier():
        raise ModelError(f"{where}: it should read FILE.py:FUNCTION")
    if not file.is_file():
        raise ModelError(f"{where}: there is no file {file}")
    try:
        returned = _returned(file, name, micro_batch_size)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{where}: {_place(error, file)}{type(error).__name__}: {error}".split("\n")[0]) from error
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        raise ModelError(f"{where}: it should return (model, inputs), and returned {type(returned).__name__}")
    model, inputs = returned
    leaves = tree_leaves(dict(inputs)) if isinstance(inputs, Mapping) else []
    for argument, value in dict(inputs).items() if isinstance(inputs, Mapping) else ():
        if not isinstance(value, torch.Tensor) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            remedy = "give every tensor as an argument of its own"
            raise ModelError(f"{where}: inputs[{argument!r}] is a {type(value).__name__} of tensors: {remedy}")
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not sizes:
        raise ModelError(f"{where}: inputs should be a dictionary of forward's arguments, with a tensor among them")
    if micro_batch_size and sizes[0] != micro_batch_size:
        remedy = f"let {name} take micro_batch_size and give inputs of that length"
        raise ModelError(f"{where}: its inputs hold {sizes[0]} samples, not {micro_batch_size}: {remedy}")
    return Example(where, model.train(), inputs)


def from_config(
    path: Path,
    micro_batch_size: int,
    *,
    precision: str = "fp32",
    attention: str | None = None,
    sequence_length: int = 512,
) -> Example:
    """The model of a Hugging Face config.json, without its weights, as its `architectures` say. Raises ModelError.

    attention: eager or sdpa; None for transformers' own default, which is sdpa where a model has it.
    """
    try:
        configuration: Any = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: no JSON: {error}") from error
    if not isinstance(configuration, dict):
        raise ModelError(f"{path}: a configuration is a JSON object")
    with made_in(precision):
        model = for_training(configuration, attention, str(path))
    return Example(str(path), model, inputs_of(model, micro_batch_size, sequence_length))


def _returned(file: Path, name: str, micro_batch_size: int | None) -> Any:
    """Imports the file, which may import its neighbours as with `python FILE.py`, and calls the function."""
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None
    assert specification.loader is not None  # as for any .py file
    module = importlib.util.module_from_spec(specification)
    folder = str(file.parent.resolve())
    sys.path.insert(0, folder)
    try:
        specification.loader.exec_module(module)
        function = getattr(module, name)
        takes = micro_batch_size and "micro_batch_size" in inspect.signature(function).parameters
        return _with_values(lambda: function(**({"micro_batch_size": micro_batch_size} if takes else {})))
    finally:
        sys.path.remove(folder)


def _with_values(make: Callable[[], Any]) -> Any:
    """What it makes: weightless, if it is to be and can; a function that reads values of tensors gets real ones."""
    try:
        return make()
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException):
        with unset_fake_temporarily():
            return make()


def _place(error: BaseException, file: Path) -> str:
    """`FILE.py:LINE: `, of the last line in the user's file that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    path = file.absolute()  # as importlib has it
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    return f"{file}:{lines[-1]}: " if lines else ""
