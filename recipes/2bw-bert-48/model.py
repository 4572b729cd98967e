"""A transformer in plain torch, as layers that PipelineModule deals out to its stages."""

import argparse

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

NOT_ASKED = -100  # the label of positions that the loss leaves out


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    for size in ("layers", "hidden", "ffn", "heads", "sequence", "vocabulary"):
        parser.add_argument(f"--{size}", type=int, required=True)
    parser.add_argument("--key-value-heads", type=int)
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--masked", action="store_true", help="a BERT: each token sees all others; some are hidden")
    for switch in ("gated", "rms-norm", "rotary", "no-biases", "untied"):
        parser.add_argument(f"--{switch}", action="store_true")


def layers_of(size: argparse.Namespace) -> list[LayerSpec]:
    """Two layers before the blocks, and two after them; the first and the last are one matrix unless --untied."""
    inside = [LayerSpec(Positions, size), *(LayerSpec(Block, size) for _ in range(size.layers)), LayerSpec(Last, size)]
    if size.untied:
        return [LayerSpec(Words, size), *inside, LayerSpec(Logits, size)]
    return [TiedLayerSpec("words", Words, size), *inside, TiedLayerSpec("words", Words, size, forward_fn=_logits)]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=NOT_ASKED)


def _norm(size: argparse.Namespace) -> nn.Module:
    return nn.RMSNorm(size.hidden) if size.rms_norm else nn.LayerNorm(size.hidden)


def _linear(size: argparse.Namespace, fan_in: int, fan_out: int) -> nn.Linear:
    linear = nn.Linear(fan_in, fan_out, bias=not size.no_biases)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


class Words(nn.Module):
    """Tokens [micro-batch, sequence] to vectors [micro-batch, sequence, hidden]."""

    def __init__(self, size: argparse.Namespace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size.vocabulary, size.hidden) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


def _logits(words: Words, x: Tensor) -> Tensor:
    return functional.linear(x, words.weight)


class Logits(Words):
    """Vectors to logits [micro-batch, sequence, vocabulary]."""

    def forward(self, x: Tensor) -> Tensor:
        return _logits(self, x)


class Positions(nn.Module):
    def __init__(self, size: argparse.Namespace) -> None:
        super().__init__()
        self.position = None if size.rotary else nn.Parameter(torch.randn(size.sequence, size.hidden) * 0.02)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x if self.position is None else x + self.position)


class Last(nn.Module):
    """The last norm, before which a BERT transforms once more."""

    def __init__(self, size: argparse.Namespace) -> None:
        super().__init__()
        transform = [_norm(size), _linear(size, size.hidden, size.hidden), nn.GELU()] if size.masked else []
        self.steps = nn.Sequential(*transform, _norm(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, size: argparse.Namespace) -> None:
        super().__init__()
        self.causal, self.rotary, self.gated, self.dropout = not size.masked, size.rotary, size.gated, size.dropout
        self.heads = size.heads
        self.key_value_heads = size.key_value_heads or size.heads
        self.head_dim = size.head_dim or size.hidden // size.heads
        width = (self.heads + 2 * self.key_value_heads) * self.head_dim
        self.before_attention, self.before_mlp = _norm(size), _norm(size)
        self.query_key_value = _linear(size, size.hidden, width)
        self.projection = _linear(size, self.heads * self.head_dim, size.hidden)
        self.up = _linear(size, size.hidden, size.ffn * (2 if size.gated else 1))
        self.down = _linear(size, size.ffn, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self._attention(self.before_attention(x)))
        return x + self._dropped(self._mlp(self.before_mlp(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)

    def _attention(self, x: Tensor) -> Tensor:
        parts = (self.heads, self.key_value_heads, self.key_value_heads)
        every = self.query_key_value(x).unflatten(-1, (sum(parts), self.head_dim)).transpose(1, 2)
        query, key, value = every.split(parts, dim=1)  # each [micro-batch, head, sequence, head_dim]
        if self.rotary:
            query, key = _rotated(query), _rotated(key)
        times = self.heads // self.key_value_heads
        if times > 1:
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal, dropout_p=dropout)
        return self.projection(seen.transpose(1, 2).flatten(2))

    def _mlp(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if self.gated:
            gate, inner = inner.chunk(2, dim=-1)
            return self.down(functional.silu(gate) * inner)
        return self.down(functional.gelu(inner))


def _rotated(x: Tensor) -> Tensor:
    """Each pair of channels, turned by its position (Su et al. 2021)."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = torch.outer(places, 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half))
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
