"""The side file of 2BW beside, and then in, a checkpoint of Megatron's."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core import parallel_state

from evenpipe.delayed import side_file
from evenpipe.megatron.script.hooks import folders_loaded_from
from evenpipe.megatron.script.log import say
from evenpipe.report.files import move_durably

if TYPE_CHECKING:
    from evenpipe.delayed.steps import DelayedSteps

__all__ = ["resume", "save"]

_NAME: Final = "evenpipe_2bw"


def save(iteration: int, model: Sequence[Any], steps: DelayedSteps, folder: str, write: Callable[[], Any]) -> Any:
    """Let `write` save what is Megatron's, once the state of `steps`, which have been drained, is safe on disk.

    Megatron's tracker moves on within `write` (or later, for an asynchronous save), so a checkpoint that can be loaded
    has both. It wants its own folder empty, so ours stay beside it until it is done. Raises RuntimeError, with one
    line, when a file cannot be written.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return write()  # replicas hold the same weights: one of them writes
    inside, beside = _paths(folder, iteration)
    side_file.write(beside, f"of iteration {iteration}", steps, _weights(model))
    result = write()
    move_durably(beside, inside)
    return result


def resume(args: Namespace, model: Sequence[Any], steps: DelayedSteps) -> bool:
    """Give `steps` what was saved with the weights that Megatron has loaded, and say whether; all ranks call it."""
    if args.load is None or not args.iteration:
        return False
    weights = _weights(model)
    device = weights[0].device if weights else torch.device(torch.cuda.current_device())
    # Beside, where the job was killed after Megatron's tracker had moved on.
    candidates = (path for folder in folders_loaded_from(args) for path in _paths(folder, args.iteration))
    complete = side_file.resume(steps, candidates, weights, device)
    if args.rank == 0:
        found = (
            "both weight versions are as they were saved"
            if complete
            else "it was saved without 2bw, or on other tensor- or pipeline-parallel sizes: both weight versions are "
            "the loaded one"
        )
        say(f"2bw: checkpoint of iteration {args.iteration}: {found}")
    return complete


def _weights(model: Sequence[Any]) -> list[torch.Tensor]:
    return [parameter for chunk in model for parameter in chunk.parameters()]


def _paths(folder: str, iteration: int) -> tuple[Path, Path]:
    """Inside the checkpoint's own folder, and beside it."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    shard = f"stage_{stage:02d}_shard_{parallel_state.get_tensor_model_parallel_rank():02d}"
    inside = Path(folder, f"iter_{iteration:07d}", _NAME, f"{shard}.pt")
    return inside, Path(folder, f".{_NAME}", f"{iteration:07d}_{shard}.pt")
