"""A pretrained model without its weights, which each rank reads for its own stage."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from evenpipe.partition.models import ModelError, made_in
from evenpipe.runtime.precisions import precision_name

__all__ = ["Pretrained", "transformers", "weightless_model"]


class Pretrained(NamedTuple):
    """A model, and the folder of its safetensors, where it is on the meta device."""

    model: nn.Module
    folder: Path | None


def transformers() -> Any:
    """Return the package. Raises ModelError."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError("transformers is missing: pip install 'evenpipe[huggingface]'") from error


def weightless_model(name: str | Path, dtype: torch.dtype | None = None) -> Pretrained:
    """Return a pretrained model in training mode whose parameters take no memory, and where their values are.

    name: a folder, or a name on the Hub, whose safetensors are then downloaded. The class is the first of the
    configuration's `architectures`. dtype: the checkpoint's, if left out, as `from_pretrained` has it. Raises
    ModelError.
    """
    library, folder = transformers(), Path(name)
    try:
        if not folder.is_dir():
            hub: Any = importlib.import_module("huggingface_hub")
            folder = Path(hub.snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors"]))
        config = library.AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever the Hub's client and the configuration's class raise
        raise ModelError(f"{name}: {_first_line(error)}: name a folder or a model on the Hub") from error
    architecture = next(iter(config.architectures or ()), "")
    build = getattr(library, architecture, None)
    if build is None:
        raise ModelError(f"{name}: its config.json has no architecture of transformers {library.__version__}")
    precision = precision_name(dtype or getattr(config, "dtype", None) or torch.float32)
    with made_in(precision or ""), torch.device("meta"):
        model = build(config).train()
    if (folder / "generation_config.json").is_file():
        model.generation_config = library.GenerationConfig.from_pretrained(folder)
    return Pretrained(model, folder)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
