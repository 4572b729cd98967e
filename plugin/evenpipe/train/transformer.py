"""A small transformer as a list of pieces: embedding, layers, head. A stage's part of the model is some of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from evenpipe.train.options import TrainOptions

__all__ = ["Part", "initialised_piece", "pieces_of"]

_DEVIATION: Final = 0.02
_OUTPUT_PROJECTIONS: Final = ("projection.weight", "contract.weight")


class Embedding(nn.Module):
    """Tokens [batch, sequence] to hidden states [batch, sequence, hidden]: of the token plus of its position."""

    def __init__(self, options: TrainOptions, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, options.hidden)
        self.position = nn.Embedding(options.seq_length, options.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.token(tokens) + self.position.weight
        return hidden


class Layer(nn.Module):
    """Attention and a multi-layer perceptron of four times the width, each behind a norm and beside a residual."""

    def __init__(self, options: TrainOptions) -> None:
        super().__init__()
        hidden = options.hidden
        self.heads = options.heads
        #: A GPT predicts what follows; BERT looks both ways.
        self.causal = options.model == "gpt"
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.contract = nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, sequence, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, sequence, width))
        output: Tensor = hidden + self.contract(nn.functional.gelu(self.expand(self.norm(hidden))))
        return output


class Head(nn.Module):
    """Hidden states to logits [batch, sequence, vocabulary], with weights of its own."""

    def __init__(self, options: TrainOptions, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.hidden)
        self.output = nn.Linear(options.hidden, vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(hidden))
        return logits


class Part(nn.Module):
    """Consecutive pieces of the model, by their number in it: what one model chunk of a stage computes.

    Parameters are fp32. With a lower precision `dtype` compute is done in it, as `torch.autocast` decides, and every
    piece hands on tensors of it, so that how the model is cut changes nothing.
    """

    def __init__(self, pieces: dict[int, nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.pieces = nn.ModuleDict({str(number): piece for number, piece in pieces.items()})
        self.dtype = dtype

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast(value.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for piece in self.pieces.values():
                value = piece(value).to(self.dtype)
        return value

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """The pieces, with their number in the whole model."""
        return ((int(number), piece) for number, piece in self.pieces.items())


def pieces_of(options: TrainOptions, part: int, parts: int) -> range:
    """Return which pieces part `part` of `parts` has: as many layers as every other, and what is at the model's ends.

    Piece 0 is the embedding, 1 to `layers` are layers, and the one after them is the head.
    """
    layers = options.layers // parts
    first, last = part == 0, part == parts - 1
    return range(part * layers + (not first), (part + 1) * layers + 1 + last)


def initialised_piece(options: TrainOptions, vocabulary: int, number: int) -> nn.Module:
    """Return a piece with weights that depend on the seed and its place in the whole model alone.

    Matrices are normal with a deviation of 0.02, of what adds to the residual stream 0.02 / √(2 · layers) (GPT-2);
    norms begin as ones, biases as zeros.
    """
    piece: nn.Module
    if number == 0:
        piece = Embedding(options, vocabulary)
    elif number <= options.layers:
        piece = Layer(options)
    else:
        piece = Head(options, vocabulary)
    for name, parameter in piece.named_parameters():
        if parameter.dim() < 2:
            nn.init.constant_(parameter, float("norm" in name and name.endswith("weight")))
            continue
        digest = hashlib.sha256(f"{options.seed} {number} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
        narrowed = math.sqrt(2 * options.layers) if name in _OUTPUT_PROJECTIONS else 1.0
        nn.init.normal_(parameter, std=_DEVIATION / narrowed, generator=generator)
    return piece
