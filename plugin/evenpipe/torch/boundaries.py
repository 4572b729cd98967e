"""The tensors that pass between two parts of a model: from the user's example, or found with one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.stage import Edges
from evenpipe.schedule import Places, Unit
from evenpipe.torch.batches import buffers_kept

__all__ = ["Between", "edges_of", "inferred", "learning"]

#: Gives the tensors that leave the part at a position.
Between = Callable[[int], Sequence[Tensor]]


class _Described(NamedTuple):
    """A tensor's shape, its dtype, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


def learning(boundary: Tensor | Between, places: Places) -> Between:
    """Return what leaves each part, by the user's example: floats have a gradient, or only those that are marked."""

    def given(position: int) -> list[Tensor]:
        return list(boundary(position)) if callable(boundary) else [boundary]

    last = len(places.order) - 1
    marked = any(one.requires_grad for position in range(last) for one in given(position))

    def between(position: int) -> list[Tensor]:
        floats = [(one, one.is_floating_point()) for one in given(position)]
        return [one.detach().requires_grad_(one.requires_grad if marked else learns) for one, learns in floats]

    return between


def edges_of(places: Places, positions: Sequence[int], between: Between) -> Edges:
    """Return what the parts at these positions take and give; the last one of the model gives the loss."""
    last, loss = len(places.order) - 1, [torch.empty((), requires_grad=True)]
    return Edges(
        [list(between(position - 1)) if position else [] for position in positions],
        [loss if position == last else list(between(position)) for position in positions],
    )


def inferred(
    places: Places,
    stage: int,
    chunks: Sequence[nn.Module],
    compute: Callable[[Unit, list[Tensor] | None], Any],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Between:
    """Return what leaves each part of the model, found by forwarding one micro-batch through all but the last.

    compute: forwards a unit on this stage. Received tensors are made up as zeros. Random numbers and buffers are
    afterwards as before. All ranks of `group` call it. Raises ValueError, on all of them, where a part fails.
    """
    ranks = dist.get_process_group_ranks(group)
    found: list[list[Tensor]] = []
    for position, place in enumerate(places.order[:-1]):
        sent: list[Any] = [None]
        cause: Exception | None = None
        if place.stage == stage:
            inputs = found[-1] if found else None
            try:
                with _unchanged(chunks[place.chunk], device), torch.enable_grad():
                    sent = [_described(position, compute(Unit(0, place.chunk), inputs))]
            except Exception as error:  # of any kind: the user's module raised it, and other stages wait
                sent, cause = [f"{type(error).__name__}: {error}"], error
        dist.broadcast_object_list(sent, src=ranks[place.stage], group=group)
        [described] = sent
        if isinstance(described, str):
            raise ValueError(f"part {position} of the model fails on a micro-batch: {described}") from cause
        found.append(
            [torch.zeros(one.shape, dtype=one.dtype, device=device, requires_grad=one.learns) for one in described]
        )
    # Shapes are all that is needed from now on: these take no memory.
    like = [[one.new_zeros(()).expand(one.shape).requires_grad_(one.requires_grad) for one in of] for of in found]
    return lambda position: like[position]


def _described(position: int, returned: Any) -> list[_Described]:
    outputs = list(returned) if isinstance(returned, tuple) else [returned]
    for number, one in enumerate(outputs):
        if not isinstance(one, Tensor):
            raise TypeError(f"output {number} of part {position} is a {type(one).__name__}: return tensors only")
    return [_Described(tuple(one.shape), one.dtype, one.requires_grad) for one in outputs]


@contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), buffers_kept([module]):
        yield
