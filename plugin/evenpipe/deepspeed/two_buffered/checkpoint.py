"""The side file of 2BW in a checkpoint of DeepSpeed's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from evenpipe.deepspeed.log import print_once
from evenpipe.delayed import side_file
from evenpipe.delayed.steps import DelayedSteps

__all__ = ["resume", "save"]


def save(engine: Any, steps: DelayedSteps, folder: str, tag: str) -> None:
    """Before DeepSpeed saves, which has the checkpoint loaded by its name from then on; `engine` has been drained.

    Replicas hold the same weights: one of them writes. Raises RuntimeError, with one line, when it cannot.
    """
    if engine.grid.get_data_parallel_id() == 0:
        side_file.write(_path(Path(folder, tag), engine), tag, steps, _weights(engine))


def resume(engine: Any, steps: DelayedSteps, loaded_from: str, goes_on: bool) -> None:
    """Give `steps` what was saved with the weights that DeepSpeed has loaded from this file; all ranks call it.

    Not if the run does not go on from there. A line says whether it was found.
    """
    candidates = [_path(Path(loaded_from).parent, engine)] if goes_on else []
    if side_file.resume(steps, candidates, _weights(engine), engine.device):
        print_once("2bw: both weight versions are as they were saved")
    else:
        print_once("warning: 2bw: both weight versions are the loaded one: no older one goes with it")


def _path(checkpoint: Path, engine: Any) -> Path:
    return checkpoint / f"evenpipe_2bw_stage_{engine.stage_id:02d}.pt"


def _weights(engine: Any) -> list[Tensor]:
    """Of a tied layer DeepSpeed saves the first stage's, whose parameters beside the tied one differ."""
    return [one for one in engine.module.parameters() if not getattr(one, "ds_pipe_replicated", False)]
