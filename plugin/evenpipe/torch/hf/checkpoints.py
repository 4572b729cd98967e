"""Checkpoints from which a training goes on to the bit: the model, and each stage's optimizer and random state."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from evenpipe.partition.models import ModelError
from evenpipe.torch.hf.loading import Checkpoint, transformers
from evenpipe.torch.hf.saving import save_pretrained
from evenpipe.torch.planned import PlannedPipeline

__all__ = ["load_stage", "resumed_from", "save_checkpoint"]

_STATE: Final = "trainer_state.json"


def save_checkpoint(
    folder: Path, pipeline: PlannedPipeline, model: nn.Module, saved: Mapping[str, Any], state: Any, writes: bool
) -> None:
    """Write `folder`, which gets its name when all of it is there. All ranks call it; one replica `writes`.

    saved: the optimizer, and whatever else has a `state_dict`, by name.
    """
    draft = folder.with_name(f"{folder.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    if writes:
        save_pretrained(pipeline, model, draft)
        mine = {
            "names": [name for name, _ in pipeline.named_parameters()],
            **{name: one.state_dict() for name, one in saved.items()},
            "random": _random_state(),
        }
        torch.save(mine, _file(draft, pipeline))
    dist.barrier()
    if dist.get_rank() == 0:
        state.save_to_json(str(draft / _STATE))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(draft, folder)
    dist.barrier()


def resumed_from(given: str | Path | bool | None, output_dir: str) -> Path | None:
    """Return the folder to go on from: the given one, with True the newest of `output_dir`. Raises ModelError."""
    if given is None or given is False:
        return None
    if given is True:
        newest = Path(output_dir).is_dir() and transformers().trainer_utils.get_last_checkpoint(output_dir)
        if not newest:
            raise ModelError(f"resume_from_checkpoint=True: {output_dir} has no checkpoint: leave it out to begin anew")
        given = str(newest)
    folder = Path(given)
    if not (folder / _STATE).is_file():
        raise ModelError(f"resume_from_checkpoint={given}: no checkpoint of PipelineTrainer is there")
    return folder


def load_stage(folder: Path, pipeline: PlannedPipeline, model: nn.Module, into: Mapping[str, Any]) -> Any:
    """Take over what `save_checkpoint` wrote of this stage; return the trainer's state. Raises ModelError."""
    file = _file(folder, pipeline)
    if not file.is_file():
        stages = pipeline.plan.stage_count
        raise ModelError(f"{folder}: was saved by another number of stages than {stages}: start as many as it was")
    saved = torch.load(file, map_location="cpu", weights_only=True)
    if saved["names"] != [name for name, _ in pipeline.named_parameters()]:
        raise ModelError(f"{file}: is of other parameters than this stage has: resume with the settings of that run")
    weights = Checkpoint(folder, model)
    pipeline.load_state_dict({name: weights[name] for name in pipeline.state_dict() if name in weights})
    for name, one in into.items():
        if name not in saved:
            raise ModelError(f"{file}: has no state of the {name}: resume with the settings of that run")
        one.load_state_dict(saved[name])
    _set_random_state(saved["random"])
    return transformers().TrainerState.load_from_json(str(folder / _STATE))


def _file(folder: Path, pipeline: PlannedPipeline) -> Path:
    return folder / f"stage-{pipeline.stage + 1:05}-of-{pipeline.plan.stage_count:05}.pt"


def _random_state() -> dict[str, Any]:
    """Return the states that data sets and collators draw from; dropout draws by the number of the batch."""
    drawn: Any = np.random.get_state()
    name, keys, *rest = drawn
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": [name, keys.tolist(), *rest]}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
