"""A pretrained model without its weights, which each rank reads for its own stage."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evenpipe.partition.models import ModelError, made_in
from evenpipe.runtime.precisions import precision_name
from evenpipe.stage_code import files_of, opened

__all__ = ["Checkpoint", "Pretrained", "transformers", "weightless_model"]


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


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a folder under the model's names, each read and converted when it is asked for.

    Names change, and experts are put together, by transformers' own table, as in `from_pretrained`.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._core: Any = importlib.import_module("transformers.core_model_loading")
        table: Any = importlib.import_module("transformers.conversion_mapping")
        transforms = table.get_model_conversion_mapping(model)
        converters = [one for one in transforms if isinstance(one, self._core.WeightConverter)]
        renamings = [one for one in transforms if not isinstance(one, self._core.WeightConverter)]
        self._model: Any = model
        self._files = files_of(folder)
        self._converters = {pattern: one for one in converters for pattern in one.source_patterns}
        #: What is read for a name, each with the pattern of its converter.
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        #: The first of the names that a converter makes together, by each.
        self._first: dict[str, str] = {}
        known, prefix = model.state_dict(), getattr(model, "base_model_prefix", None)
        for key in sorted(self._files, key=self._core.dot_natural_key):
            name, pattern = self._core.rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = self._core.rename_source_key(key, [], [], prefix, known)
            self._sources.setdefault(name, []).append((key, pattern))
            made = self._converters[pattern].target_patterns if pattern is not None else [name]
            self._first |= {name.replace(made[0], one): name for one in made}

    def __contains__(self, name: object) -> bool:
        return name in self._first

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, name: str) -> Tensor:
        first = self._first[name]
        sources = self._sources[first]
        [(key, pattern), *_] = sources
        if pattern is None:
            return self._read(key)
        converter = copy.deepcopy(self._converters[pattern])
        for key, of_key in sources:
            converter.add_tensor(first, key, of_key, self._read(key))
        found = converter.convert(first, model=self._model, config=self._model.config)[name]
        value: Tensor = found[0] if isinstance(found, list) else found
        return value

    def _read(self, key: str) -> Tensor:
        with opened(self._files[key]) as file:
            value: Tensor = file.get_tensor(key)
        return value


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
