"""A small transformer in plain torch, as layers that a PipelineModule deals out to its stages."""

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, BLOCKS, SEQUENCE = 64, 4, 8, 64


class Embedding(nn.Module):
    """Tokens [micro-batch, sequence] to activations [micro-batch, sequence, hidden]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, HIDDEN) * 0.02)
        self.position = nn.Parameter(torch.randn(SEQUENCE, HIDDEN) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight) + self.position


class Block(nn.Module):
    """Attention and a feed-forward network; `causal`: no token sees those after it."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.before_attention, self.before_feed_forward = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query_key_value, self.mixed = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.feed_forward = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.before_attention(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)  # each [micro-batch, head, sequence, hidden / heads]
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.mixed(seen.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.before_feed_forward(x))


def projected(embedding: Embedding, x: Tensor) -> Tensor:
    """Activations to logits [micro-batch, sequence, vocabulary], with the weights of the embedding."""
    return functional.linear(x, embedding.weight)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the positions whose label is no -100."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
