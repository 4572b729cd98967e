"""Layers that are cut among two model-parallel ranks, with all shards in one process or one in each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["SHARDS", "ShardedBlock", "ShardedEmbedding", "Shards", "project_sharded"]

SHARDS = 2


class Shards(NamedTuple):
    """The shards that this process computes: its `rank`'s, with the others of `group`, or all of them."""

    rank: int = 0
    group: dist.ProcessGroup | None = None

    def cut(self, weight: Tensor, dim: int) -> nn.ParameterList:
        """The shards of `weight` that are here, marked as Megatron and DeepSpeed mark them."""
        parts = [nn.Parameter(part.clone()) for part in weight.chunk(SHARDS, dim)]
        for shard, part in enumerate(parts):
            part.model_parallel, part.shard = True, shard
        return nn.ParameterList(parts if self.group is None else [parts[self.rank]])

    def enter(self, x: Tensor) -> Tensor:
        """What all shards read."""
        return x if self.group is None else _Enter.apply(x, self.group)

    def leave(self, parts: list[Tensor]) -> Tensor:
        """The sum of what the shards give."""
        return parts[0] + parts[1] if self.group is None else _Leave.apply(parts[0], self.group)

    def join(self, parts: list[Tensor]) -> Tensor:
        """What the shards give, one after the other."""
        return torch.cat(parts, -1) if self.group is None else _Join.apply(parts[0], self.group, self.rank)


class ShardedBlock(nn.Module):
    """Two linear layers, of which a shard has half of the features between; the rest is on both ranks."""

    def __init__(self, hidden: int, shards: Shards) -> None:
        super().__init__()
        self.shards = shards
        self.norm = nn.LayerNorm(hidden)
        self.up = shards.cut(torch.randn(4 * hidden, hidden) * 0.1, 0)
        self.down = shards.cut(torch.randn(hidden, 4 * hidden) * 0.1, 1)
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        given = self.shards.enter(self.norm(x))
        parts = [
            nn.functional.linear(nn.functional.gelu(nn.functional.linear(given, up)), down)
            for up, down in zip(self.up, self.down, strict=True)
        ]
        return x + self.shards.leave(parts) + self.bias


class ShardedEmbedding(nn.Module):
    """A shard has half of the vocabulary."""

    def __init__(self, vocabulary: int, hidden: int, sequence: int, shards: Shards) -> None:
        super().__init__()
        self.shards, self.size = shards, vocabulary // SHARDS
        self.weight = shards.cut(torch.randn(vocabulary, hidden) * 0.1, 0)
        self.position = nn.Parameter(torch.randn(sequence, hidden) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        parts = []
        for weight in self.weight:
            own = tokens - weight.shard * self.size
            here = (own >= 0) & (own < self.size)
            parts.append(nn.functional.embedding(own.where(here, 0), weight) * here.unsqueeze(-1).to(weight.dtype))
        return self.shards.leave(parts) + self.position[: tokens.shape[1]]


def project_sharded(embedding: Any, x: Tensor) -> Tensor:
    """The logits, by the embedding's weights."""
    given = embedding.shards.enter(x)
    return embedding.shards.join([nn.functional.linear(given, weight) for weight in embedding.weight])


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
        ctx.rank = rank
        parts = [torch.empty_like(x) for _ in range(SHARDS)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.chunk(SHARDS, -1)[ctx.rank].contiguous(), None, None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total
