"""What a Megatron checkpoint lacks of 2BW: the older weight version, in a file of its own for each stage and shard."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from evenpipe.megatron.script.hooks import folders_loaded_from

if TYPE_CHECKING:
    from evenpipe.megatron.two_buffered import TwoBuffered

__all__ = ["resume", "save"]

_NAME: Final = "evenpipe_2bw"
_FORMAT: Final = 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def save(iteration: int, model: Sequence[Any], buffers: TwoBuffered, folder: str, write: Callable[[], Any]) -> Any:
    """Let `write` save what is Megatron's, once `buffers`, which have been drained, are safe on disk.

    Megatron's tracker moves on within `write` (or later, for an asynchronous save), so a checkpoint that can be loaded
    has both. It wants its own folder empty, so ours stay beside it until it is done. Raises RuntimeError, with one
    line, when a file cannot be written.
    """
    if not _writes():
        return write()
    ours = {
        "format": _FORMAT,
        "iteration": iteration,
        "latest": _fingerprint(model),
        "state": buffers.state_dict(),
    }
    beside, inside = _beside(folder, iteration), _inside(folder, iteration)
    try:
        _write(beside, ours)
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"the checkpoint of iteration {iteration} could not be saved: {beside}: {' '.join(str(error).split())}: "
            "make room, and go on from the one before, which is whole"
        ) from error
    result = write()
    inside.parent.mkdir(parents=True, exist_ok=True)
    os.replace(beside, inside)
    return result


def resume(args: Namespace, model: Sequence[Any], buffers: TwoBuffered) -> bool:
    """Give `buffers` what was saved with the weights that Megatron has loaded, and say whether; all ranks call it.

    If any rank has none (saved without 2BW, or with other sizes), all start with both versions as loaded, and say so.
    """
    if args.load is None or not args.iteration:
        return False
    state = _saved_with(_fingerprint(model), _candidates(args))
    missing = torch.tensor([float(state is None)], device=next(model[0].parameters()).device)
    dist.all_reduce(missing)
    complete = not missing.item()
    if complete:
        buffers.load_state_dict(state)
        said = "both weight versions are as they were saved"
    else:
        buffers.load_state_dict(None)
        said = (
            "it was saved without 2bw, or on other tensor- or pipeline-parallel sizes: both weight versions are the "
            "loaded one"
        )
    if args.rank == 0:
        print(f" [evenpipe] 2bw: checkpoint of iteration {args.iteration}: {said}", flush=True)
    return complete


def _candidates(args: Namespace) -> Iterator[Path]:
    for folder in folders_loaded_from(args):
        # Beside, where the job was killed after Megatron's tracker had moved on.
        yield from (_inside(folder, args.iteration), _beside(folder, args.iteration))


def _saved_with(latest: list[int], candidates: Iterable[Path]) -> Any:
    """The state that was saved with the weights of this fingerprint; None where no file has it."""
    for path in candidates:
        if path.exists():
            found = torch.load(path, map_location="cpu", weights_only=True)
            if found["format"] == _FORMAT and found["latest"] == latest:
                return found["state"]
    return None


def _fingerprint(model: Sequence[Any]) -> list[int]:
    """A number for each parameter, from all of its bits: exact on any device, whatever the order of the sum."""
    sums = [
        parameter.detach().contiguous().view(_BITS[parameter.element_size()]).sum(dtype=torch.int64)
        for chunk in model
        for parameter in chunk.parameters()
    ]
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []


def _writes() -> bool:
    """Replicas hold the same weights: one of them writes."""
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def _inside(folder: str, iteration: int) -> Path:
    return Path(folder, f"iter_{iteration:07d}", _NAME, f"{_shard()}.pt")


def _beside(folder: str, iteration: int) -> Path:
    return Path(folder, f".{_NAME}", f"{iteration:07d}_{_shard()}.pt")


def _shard() -> str:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return f"stage_{stage:02d}_shard_{parallel_state.get_tensor_model_parallel_rank():02d}"


def _write(path: Path, content: Any) -> None:
    """The whole file, on disk, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
