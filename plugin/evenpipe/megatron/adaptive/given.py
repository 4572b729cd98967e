"""The arguments of a training call, whose micro-batches can be given another size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from evenpipe.tuner.samples import items_of, micro_batches_of

__all__ = ["Given"]


class Given(NamedTuple):
    """What Megatron passes to a forward-backward function of one model chunk."""

    arguments: dict[str, Any]

    @property
    def size(self) -> int:
        """Samples in a micro-batch of the loader's."""
        return int(self.arguments["micro_batch_size"])

    @property
    def micro_batches(self) -> int:
        """Of the loader's, in the batch."""
        return int(self.arguments["num_microbatches"])

    @property
    def samples(self) -> int:
        """In the batch, of this replica."""
        return self.size * self.micro_batches

    @property
    def source(self) -> Iterator[Any] | None:
        """The loader; None where this process reads nothing."""
        source = self.arguments["data_iterator"]
        loader: Iterator[Any] | None = source[0] if isinstance(source, list) else source
        return loader if loader is None or hasattr(loader, "__iter__") else items_of(loader)

    def reading(self, source: Iterator[Any] | None) -> Given:
        """The same, from another loader."""
        return Given(self.arguments | {"data_iterator": source})

    def in_micro_batches_of(self, size: int) -> dict[str, Any]:
        """The arguments for the same samples in micro-batches of `size`, which divides the batch."""
        return self.arguments | {
            "micro_batch_size": size,
            "num_microbatches": self.samples // size,
            "data_iterator": micro_batches_of(size, self.size, self.source),
        }
