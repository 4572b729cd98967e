"""What a framework's checkpoint lacks of 2BW, such as the older weight version: a file for each stage and shard."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.delayed.steps import DelayedSteps
from evenpipe.report.files import write_durably

__all__ = ["Part", "resume", "resume_parts", "write"]

_FORMAT: Final = "evenpipe.delayed/1"
# What files of before call their format: Megatron's were 1, DeepSpeed's 2.
_MEGATRON: Final = 1
_DEEPSPEED: Final = 2
_INTEGERS: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


class Part(NamedTuple):
    """Weights of a process that have a file of their own: where it may lie, and the `newest` it is used with only.

    `places` are those of the trainable ones among all of the process.
    """

    paths: Sequence[Path]
    newest: Sequence[Tensor]
    places: Sequence[int]


def write(
    path: Path,
    checkpoint: str,
    steps: DelayedSteps,
    newest: Iterable[Tensor],
    places: Sequence[int] | None = None,
) -> None:
    """Put the state of `steps`, which have been drained, at `path`: safe on disk as a whole when this returns, or not.

    `newest` are the weights that it is used with only; `places` as in `Part`, None: all. Raises RuntimeError, with one
    line that names `checkpoint`, when the file cannot be written.
    """
    content = {"format": _FORMAT, "newest": _fingerprint(newest), "state": steps.state_dict(places)}
    try:
        write_durably(path, lambda file: torch.save(content, file))
    except (OSError, RuntimeError) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise RuntimeError(
            f"the checkpoint {checkpoint} could not be saved: {path}: {said}: "
            "make room, and go on from the one before, which is whole"
        ) from error


def resume(steps: DelayedSteps, candidates: Iterable[Path], newest: Sequence[Tensor], device: torch.device) -> bool:
    """Give `steps` what was written with exactly these newest weights, and say whether; all ranks call it.

    If any rank finds none among its `candidates` (saved without 2BW, or with other sizes), all start with both versions
    as loaded.
    """
    return _resume(steps, _first(candidates, newest), device)


def resume_parts(steps: DelayedSteps, parts: Sequence[Part], device: torch.device) -> bool:
    """As `resume`, from what was written of each of the `parts`, which are all weights of this process."""
    states = [_first(part.paths, part.newest) for part in parts]
    return _resume(steps, _together(parts, [state for state in states if state is not None]), device)


def _resume(steps: DelayedSteps, state: Mapping[str, Any] | None, device: torch.device) -> bool:
    missing = torch.tensor([float(state is None)], device=device)
    dist.all_reduce(missing)
    complete = not missing.item()
    steps.load_state_dict(state if complete else None)
    return complete


def _first(candidates: Iterable[Path], newest: Sequence[Tensor]) -> Mapping[str, Any] | None:
    return next((found for path in candidates if (found := _read(path, newest)) is not None), None)


def _together(parts: Sequence[Part], states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """One state of those of all parts, which agree in all but the weights."""
    if len(states) < len(parts):
        return None
    before = [state["before"] for state in states]
    if len(parts) == 1 or None in before:
        return states[0]
    placed = {
        place: tensor
        for part, some in zip(parts, before, strict=True)
        for place, tensor in zip(part.places, some, strict=False)
    }
    return {**states[0], "before": [placed[place] for place in sorted(placed)]}


def _read(path: Path, newest: Sequence[Tensor]) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    found = torch.load(path, map_location="cpu", weights_only=True)
    form = found["format"]
    if form == _MEGATRON:
        state: Mapping[str, Any] = found["state"]
        return state if found["latest"] == _sums(newest) else None
    if form not in (_FORMAT, _DEEPSPEED) or found["newest"] != _fingerprint(newest):
        return None
    if form == _DEEPSPEED:
        skipped, before = found["skipped"], found["before"]
        return {"before": before, "outcome": (not skipped, None, None), "unlearnt": [] if before is None else [skipped]}
    state = found["state"]
    return state


def _fingerprint(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sums(tensors: Iterable[Tensor]) -> list[int]:
    """What files of before have in the place of a fingerprint: for each tensor, the sum of its bits as integers."""
    return [
        int(tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))
        for tensor in tensors
    ]
