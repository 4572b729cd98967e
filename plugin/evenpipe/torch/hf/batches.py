"""From a data set to batches whose lengths are those of a few buckets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

__all__ = ["IGNORED", "Batch", "bucket_of", "counted_labels", "filled", "padded", "samples_of", "split_constants"]

#: The label of a token that no loss counts.
IGNORED: Final = -100


class Batch(NamedTuple):
    """The tensors of a batch, and the arguments of the model's forward that are none.

    length: of its tokens before they were padded to that of a bucket; None without tokens.
    """

    tensors: dict[str, Tensor]
    constants: dict[str, Any]
    length: int | None = None


def samples_of(
    dataset: Any, model: nn.Module, order: Sequence[int], kept: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    """Yield samples in that order, with what the model's forward takes of them, and what `kept` names; None: all."""
    takes = {*inspect.signature(model.forward).parameters, *(kept or ())}
    for number in order:
        yield {name: value for name, value in dataset[number].items() if kept is None or name in takes}


def split_constants(collated: Mapping[str, Any]) -> Batch:
    """Return the collator's batch; lists of numbers become tensors, as models are given them."""
    tensors = {name: value for name, value in collated.items() if isinstance(value, Tensor)}
    return Batch(tensors, {name: value for name, value in collated.items() if name not in tensors})


def bucket_of(length: int, multiple: int) -> int:
    """Return the bucket of a length: the next power of two, not below `multiple`, or the next of its multiples.

    Between two powers of two lies one bucket more, so that less than a third of a batch is padding.
    """
    size = multiple
    while size < length:
        half = size + size // 2
        if length <= half and not (size // 2) % multiple:
            return half
        size *= 2
    return size


def padded(batch: Mapping[str, Tensor], to: int, values: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the batch with its sequences `to` long: all tensors as long as `input_ids` along their second dimension.

    `values`: what each name is padded with, 0 if left out; labels with `IGNORED`.
    """
    length = _length(batch)
    if length is None or length == to:
        return dict(batch)
    return {
        name: pad(one, (0, to - length), value=values.get(name, IGNORED if "label" in name else 0))
        if one.dim() == 2 and one.shape[1] == length
        else one
        for name, one in batch.items()
    }


def _length(batch: Mapping[str, Tensor]) -> int | None:
    tokens = batch.get("input_ids")
    return None if tokens is None or tokens.dim() != 2 else int(tokens.shape[1])


def filled(batch: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Return the batch with `samples` samples: the last one again, with labels that no loss counts."""
    missing = samples - next(len(one) for one in batch.values() if one.dim())
    if not missing:
        return dict(batch)

    def more(name: str, one: Tensor) -> Tensor:
        again = one[-1:].expand(missing, *one.shape[1:])
        return torch.cat([one, torch.full_like(again, IGNORED) if name == "labels" else again])

    return {name: more(name, one) if one.dim() else one for name, one in batch.items()}


def counted_labels(batch: Mapping[str, Tensor], parts: int) -> list[int] | None:
    """Return how many labels count in each of `parts` equal parts of the batch; None without labels."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return None
    return [int(one.ne(IGNORED).sum()) for one in labels.chunk(parts)]


#: Makes a batch of samples.
Collator = Callable[[list[Any]], Mapping[str, Any]]
