"""Models of Hugging Face's transformers, made from a configuration, without pretrained weights."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.partition.models.errors import ModelError

__all__ = ["for_training", "inputs_of"]

_ATTENTION = ("eager", "sdpa")


def for_training(configuration: Mapping[str, Any], attention: str | None, source: str) -> nn.Module:
    """The model of the first of the configuration's `architectures`, to be trained with the loss that it computes.

    attention: None for what transformers itself takes. `source`: where the configuration is from, for messages. Raises
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
        raise ModelError(f"{source}: {architecture} cannot be built: {_one_line(error)}") from error
    return model.train()


def inputs_of(model: nn.Module, micro_batch_size: int, sequence_length: int) -> dict[str, Tensor]:
    """Random token ids, an attention mask and the labels that the model's forward knows. Raises ModelError.

    Without a decoder's `decoder_input_ids`, which the models make from the labels.
    """
    shape = (micro_batch_size, sequence_length)
    config: Any = model.config
    classifies = "SequenceClassification" in type(model).__name__
    labelled, classes = ((micro_batch_size,), config.num_labels) if classifies else (shape, config.vocab_size)
    known = {
        "input_ids": lambda: torch.randint(config.vocab_size, shape),
        "attention_mask": lambda: torch.ones(shape, dtype=torch.long),
        "token_type_ids": lambda: torch.zeros(shape, dtype=torch.long),
        "labels": lambda: torch.randint(classes, labelled),
        "next_sentence_label": lambda: torch.randint(2, (micro_batch_size,)),
    }
    asked = inspect.signature(model.forward).parameters
    if "input_ids" not in asked or "labels" not in asked:
        name = type(model).__name__
        raise ModelError(f"{name} takes no {'input_ids' if 'labels' in asked else 'labels'}: --module takes any model")
    # A single segment and no padding are what GPT-2 and T5 are trained with: they need neither mask nor segments.
    wanted = [name for name in known if name in asked and (name not in _SEGMENTED or "next_sentence_label" in asked)]
    return {name: known[name]() for name in wanted}


_SEGMENTED = ("attention_mask", "token_type_ids")


def _one_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
