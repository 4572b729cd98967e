"""What a DeepSpeed checkpoint lacks of 2BW: the older weight version, in a file of its own for each stage."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.deepspeed.saying import tell

if TYPE_CHECKING:
    from evenpipe.deepspeed.two_buffered.steps import DeferredSteps

__all__ = ["resume", "save"]

_FORMAT: Final = 2


def save(engine: Any, steps: DeferredSteps, folder: str, tag: str) -> None:
    """Before DeepSpeed saves, which has the checkpoint loaded by its name from then on; `engine` has been drained.

    Replicas hold the same weights: one of them writes.
    """
    if engine.grid.get_data_parallel_id() != 0:
        return
    versions = steps.versions
    before = versions.tensors(versions.latest - 1) if steps.batch > 0 else None
    content = {
        "format": _FORMAT,
        "newest": _fingerprint(engine.module.parameters()),
        "before": None if before is None else [tensor.detach().cpu() for tensor in before],
        "skipped": steps.skipped,
    }
    path = _path(Path(folder, tag), engine.stage_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        torch.save(content, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def resume(engine: Any, steps: DeferredSteps, loaded_from: str, goes_on: bool) -> None:
    """Give `steps` what was saved with the weights that DeepSpeed has loaded from this file; all ranks call it.

    If any rank finds none (saved without 2BW, or on other stages), or the run does not go on from there, all start with
    both versions as loaded.
    """
    path = _path(Path(loaded_from).parent, engine.stage_id)
    found = torch.load(path, map_location="cpu", weights_only=True) if goes_on and path.exists() else None
    if found is not None and (
        found["format"] != _FORMAT or found["newest"] != _fingerprint(engine.module.parameters())
    ):
        found = None
    missing = torch.tensor([float(found is None)], device=engine.device)
    dist.all_reduce(missing)
    complete = not missing.item()
    if complete and found is not None:
        steps.restart(found["before"], found["skipped"])
        tell("2bw: both weight versions are as they were saved")
    else:
        steps.restart(None)
        tell("warning: 2bw: both weight versions are the loaded one: no older one goes with it")


def _path(checkpoint: Path, stage: int) -> Path:
    return checkpoint / f"evenpipe_2bw_stage_{stage:02d}.pt"


def _fingerprint(parameters: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        if getattr(parameter, "ds_pipe_replicated", False):
            # Of a tied layer DeepSpeed saves the first stage's, whose parameters beside the tied one differ.
            continue
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
