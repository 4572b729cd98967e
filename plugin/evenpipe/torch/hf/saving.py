"""A pipeline's model as `from_pretrained` reads it: each rank writes its own stage."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from evenpipe.report.files import write_atomically
from evenpipe.torch.planned import PlannedPipeline

__all__ = ["save_pretrained"]

_INDEX: Final = "model.safetensors.index.json"


def save_pretrained(pipeline: PlannedPipeline, model: nn.Module, folder: str | Path) -> None:
    """Write the model to `folder`, which all ranks see: a safetensors file a stage, their index, the configuration.

    transformers' `from_pretrained(folder)` loads it; names are those of its `save_pretrained`, and an older
    `model.safetensors`, which it would load instead, is removed. The index is written last. All ranks of the pipeline
    call it. Raises OSError.
    """
    safetensors: Any = importlib.import_module("safetensors.torch")
    folder, stages = Path(folder), pipeline.plan.stage_count
    folder.mkdir(parents=True, exist_ok=True)
    core: Any = importlib.import_module("transformers.core_model_loading")
    own = {name: one.cpu() for name, one in pipeline.own_state().items()}
    mine = {name: one.contiguous() for name, one in core.revert_weight_conversion(model, own).items()}
    file = folder / f"model-{pipeline.stage + 1:05}-of-{stages:05}.safetensors"
    draft = file.with_suffix(".partial")
    safetensors.save_file(mine, draft, metadata={"format": "pt"})
    os.replace(draft, file)
    rows: list[Any] = [None] * stages
    dist.all_gather_object(rows, (file.name, sorted(mine), sum(one.nbytes for one in mine.values())), pipeline.group)
    if pipeline.stage == 0:
        described: Any = model
        described.config.save_pretrained(folder)
        if getattr(described, "generation_config", None) is not None:
            described.generation_config.save_pretrained(folder)
        table = {name: file for file, names, _ in rows for name in names}
        index = {"metadata": {"total_size": sum(nbytes for *_, nbytes in rows)}, "weight_map": table}
        write_atomically(folder / _INDEX, json.dumps(index, indent=2, sort_keys=True))
        (folder / "model.safetensors").unlink(missing_ok=True)
    dist.barrier(pipeline.group)
