"""Parameters of which several stages have a copy: the copies' gradients add up, so that they stay equal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations

import torch
from torch import Tensor, nn

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.connections import open_channels

__all__ = ["Ties"]

_KIND = "tied"


class Ties:
    """One stage's side of it: a channel to and from every stage that it shares a parameter with, and no others.

    holders: of every stage, the names of its parameters, under which copies are found; the same on all.
    mine: this stage's parameters by these names.
    ranks: the global rank of every stage.

    All ranks of the pipeline make it alike.
    """

    def __init__(
        self,
        holders: Sequence[Collection[str]],
        mine: Mapping[str, nn.Parameter],
        stage: int,
        ranks: Sequence[int],
        device: torch.device,
    ) -> None:
        sets = [frozenset(names) for names in holders]
        shared = {(s, t): sorted(sets[s] & sets[t]) for s, t in permutations(range(len(sets)), 2)}
        links = {pair: (_KIND, ranks[pair[0]], ranks[pair[1]]) for pair, names in shared.items() if names}
        opened = open_channels(list(links.values()), "nccl" if device.type == "cuda" else "gloo", device)
        self._stage = stage
        self._channels = {pair: opened[link] for pair, link in links.items() if stage in pair}
        self._names = {pair: shared[pair] for pair in self._channels}
        tied = frozenset(name for pair in self._channels for name in shared[pair])
        self._tied = {name: mine[name] for name in mine if name in tied}
        self._mine: dict[str, Tensor] = {}
        self._found: dict[str, dict[int, Tensor]] = {}  # by name and stage, while they are under way
        self._under_way: list[Transfer] = []

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Give each copy's gradient the sum of what backwards inside add to it on all stages with a copy.

        The sum is made in the order of the stages, on all of them: the same bits everywhere.
        """
        before = {name: parameter.grad for name, parameter in self._tied.items()}
        for parameter in self._tied.values():
            parameter.grad = None
        try:
            yield
        except BaseException:
            for name, parameter in self._tied.items():
                parameter.grad = before[name]
            raise
        self.fill()
        self.start({id(one): one.grad for one in self._tied.values() if one.grad is not None})
        self.finish()
        for name, parameter in self._tied.items():
            if (earlier := before[name]) is not None:
                assert parameter.grad is not None
                parameter.grad = earlier.add_(parameter.grad)

    def __bool__(self) -> bool:
        """Return whether this stage has any."""
        return bool(self._tied)

    def fill(self) -> None:
        """Give copies that no gradient came to one of zeros, to which those of other stages are added."""
        for parameter in self._tied.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def start(self, gradients: Mapping[int, Tensor]) -> None:
        """Send this stage's gradients, by the ids of parameters, and wait for nobody."""
        self._mine = {name: gradients[id(one)] for name, one in self._tied.items()}
        self._found = {name: {self._stage: gradient} for name, gradient in self._mine.items()}
        for (source, target), channel in self._channels.items():
            names = self._names[source, target]
            if source == self._stage:
                self._under_way.append(channel.send([self._mine[name] for name in names]))
                continue
            copies = [torch.empty_like(self._mine[name], memory_format=torch.contiguous_format) for name in names]
            self._under_way.append(channel.receive(copies))
            for name, copy in zip(names, copies, strict=True):
                self._found[name][source] = copy

    def finish(self) -> None:
        """Wait for the others': what `start` was given are the sums. Nothing to do twice."""
        for transfer in self._under_way:
            transfer.wait()
        self._under_way.clear()
        for name, of_stage in self._found.items():
            self._mine[name].copy_(_sum(of_stage))
        self._found = {}

    def close(self) -> None:
        """Destroy the channels, once nothing is under way."""
        for channel in self._channels.values():
            channel.close()


def _sum(of_stage: Mapping[int, Tensor]) -> Tensor:
    first, *others = (gradient for _, gradient in sorted(of_stage.items()))
    total = first.clone()
    for gradient in others:
        total += gradient
    return total
