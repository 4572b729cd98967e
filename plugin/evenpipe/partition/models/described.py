"""Models that a user's file describes: a Python function, or a configuration of Hugging Face's without weights."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves

from evenpipe.runtime.precisions import PRECISIONS

__all__ = ["Example", "ModelError", "for_training", "from_config", "from_function", "inputs_of", "made_in"]

_ATTENTION: Final = ("eager", "sdpa")
#: A single segment and no padding are what GPT-2 and T5 are trained with: they need neither mask nor segments.
_SEGMENTED: Final = ("attention_mask", "token_type_ids")


class ModelError(ValueError):
    """A model cannot be had; the message is one line that names what was asked for and what to do."""


class Example(NamedTuple):
    """A model in training mode, and the keyword arguments of one micro-batch, with which its forward gives a loss."""

    name: str
    model: nn.Module
    inputs: Mapping[str, Any]


@contextlib.contextmanager
def made_in(precision: str) -> Iterator[None]:
    """Models and tensors made inside have this precision: afterwards a weightless model could not be changed to it.

    Raises ModelError for a precision that is none of PRECISIONS.
    """
    if precision not in PRECISIONS:
        raise ModelError(f"no precision {precision!r}: there are {', '.join(PRECISIONS)}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(PRECISIONS[precision])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def from_function(where: str, micro_batch_size: int | None = None) -> Example:
    """Return (model, inputs) of `FILE.py:FUNCTION`, inputs a dictionary of the arguments of the model's forward.

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
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"{where}: {_place(error, file)}{type(error).__name__}: {error}".split("\n")[0]) from error
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        raise ModelError(f"{where}: it should return (model, inputs), and returned {type(returned).__name__}")
    model, inputs = returned
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {}
    for argument, value in arguments.items():
        if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            remedy = "give every tensor as an argument of its own"
            raise ModelError(f"{where}: inputs[{argument!r}] is a {type(value).__name__} of tensors: {remedy}")
    sizes = [len(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes:
        raise ModelError(f"{where}: inputs should be a dictionary of forward's arguments, with a tensor among them")
    if micro_batch_size and sizes[0] != micro_batch_size:
        remedy = f"let {name} take micro_batch_size and give inputs of that length"
        raise ModelError(f"{where}: its inputs hold {sizes[0]} samples, not {micro_batch_size}: {remedy}")
    return Example(where, model.train(), inputs)


def _returned(file: Path, name: str, micro_batch_size: int | None) -> Any:
    """Import the file, which may import its neighbours as with `python FILE.py`, and call the function."""
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None
    assert specification.loader is not None  # as for any .py file
    module = importlib.util.module_from_spec(specification)
    folder = str(file.parent.resolve())
    sys.path.insert(0, folder)
    try:
        specification.loader.exec_module(module)
        function = getattr(module, name, None)
        if function is None:
            raise ModelError(f"{file}:{name}: the file has no {name}: name one of its functions")
        takes = micro_batch_size and "micro_batch_size" in inspect.signature(function).parameters
        return _with_values(lambda: function(**({"micro_batch_size": micro_batch_size} if takes else {})))
    finally:
        sys.path.remove(folder)


def _with_values(make: Callable[[], Any]) -> Any:
    """Return what it makes, weightless where it can; a function that reads values of tensors has real ones."""
    try:
        return make()
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException):
        with unset_fake_temporarily():
            return make()


def _place(error: BaseException, file: Path) -> str:
    """Return `FILE.py:LINE: `, of the last line in the user's file that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    path = file.absolute()  # as importlib has it
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    return f"{file}:{lines[-1]}: " if lines else ""


def from_config(
    path: Path,
    micro_batch_size: int,
    *,
    precision: str = "fp32",
    attention: str | None = None,
    sequence_length: int = 512,
) -> Example:
    """Return the model of a Hugging Face config.json, without its weights, as its `architectures` say.

    attention: eager or sdpa; None for transformers' own default, which is sdpa where a model has it. Raises ModelError.
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


def for_training(configuration: Mapping[str, Any], attention: str | None, source: str) -> nn.Module:
    """Return the model of the first of the configuration's `architectures`, which computes its own loss.

    attention: None for transformers' default. `source`: where the configuration is from, for messages. Raises
    ModelError.
    """
    if attention not in (None, *_ATTENTION):
        raise ModelError(f"no attention {attention!r}: there are {', '.join(_ATTENTION)}")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(f"{source}: transformers is missing: pip install 'evenpipe[huggingface]'") from error
    fields = copy.deepcopy(dict(configuration))
    kind = fields.pop("model_type", None)
    architecture = next(iter(fields.get("architectures") or ()), None)
    if not kind or not architecture:
        missing = "model_type" if not kind else "architectures"
        raise ModelError(f"{source}: it has no {missing!r}, which says what to build")
    build = getattr(transformers, architecture, None)
    if build is None:
        raise ModelError(f"{source}: transformers {transformers.__version__} has no {architecture}")
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
        if attention is not None:
            config._attn_implementation = attention
        config.use_cache = False  # keys and values kept for generation would be outputs that no training reads
        model: nn.Module = build(config)
        if fields.get("tie_word_embeddings") is False and config.tie_word_embeddings:
            # T5Config ties whatever its file says, as t5-v1.1's output layer of its own comes with its checkpoint.
            head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
            head.weight = nn.Parameter(torch.empty_like(head.weight).normal_(std=head.in_features**-0.5))
    except Exception as error:
        # A title that ends with a colon has the reason below it.
        reason = next(
            (line for line in str(error).split("\n") if line.strip()[-1:] not in ("", ":")), type(error).__name__
        )
        raise ModelError(f"{source}: {architecture} cannot be built: {reason.strip()}") from error
    return model.train()


def inputs_of(model: nn.Module, micro_batch_size: int, sequence_length: int) -> dict[str, Tensor]:
    """Return random token ids, an attention mask and the labels that the model's forward knows. Raises ModelError.

    Without a decoder's `decoder_input_ids`, which the models make from the labels.
    """
    shape = (micro_batch_size, sequence_length)
    config: Any = model.config
    classifies = "SequenceClassification" in type(model).__name__
    labelled, classes = ((micro_batch_size,), config.num_labels) if classifies else (shape, config.vocab_size)
    known: dict[str, Callable[[], Tensor]] = {
        "input_ids": lambda: torch.randint(config.vocab_size, shape),
        "attention_mask": lambda: torch.ones(shape, dtype=torch.long),
        "token_type_ids": lambda: torch.zeros(shape, dtype=torch.long),
        "labels": lambda: torch.randint(classes, labelled),
        "next_sentence_label": lambda: torch.randint(2, (micro_batch_size,)),
    }
    arguments = inspect.signature(model.forward).parameters
    for required in ("labels", "input_ids"):
        if required not in arguments:
            raise ModelError(f"{type(model).__name__} takes no {required}: --module takes any model")
    segmented = "next_sentence_label" in arguments
    return {name: make() for name, make in known.items() if name in arguments and (segmented or name not in _SEGMENTED)}
