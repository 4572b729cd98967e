"""A Transformer, as what its stages compute and hold depends on it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from evenpipe.planner.descriptions.described import Described, Values

__all__ = ["Experts", "Latent", "Model"]


class Experts(Values):
    """A mixture of experts in place of the MLP.

    ``count`` experts with an inner size of ``ffn``, of which each token takes ``chosen``, and ``shared_ffn`` of experts
    that all tokens take. The first ``dense_layers`` layers have the model's own MLP; where these are others, ``layers``
    says of each layer whether it has experts.
    """

    count: int = Field(ge=2)
    chosen: int = Field(ge=1)
    ffn: int = Field(ge=1)
    shared_ffn: int = Field(default=0, ge=0)
    dense_layers: int = Field(default=0, ge=0)
    layers: tuple[bool, ...] = Field(default=(), strict=False)


class Latent(Values):
    """Multi-head latent attention (DeepSeek-V2 §2.1): ranks of what queries, and keys and values, are made from.

    A head's query and key have ``plain_dim`` + ``rotary_dim`` elements, its value ``value_dim``.
    """

    query_rank: int = Field(ge=1)
    key_value_rank: int = Field(ge=1)
    plain_dim: int = Field(ge=1)
    rotary_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)


class Model(Described):
    """A Transformer of equal layers between an embedding and a head.

    key_value_heads: of grouped-query attention; as many as heads, if left out. head_dim: hidden / heads, if left out.
    ffn: inner size of the MLP, 4 × hidden, if left out; gated: two projections in, as SwiGLU. biases: of all linear
    layers. dropout: of embedding, attention and residuals. causal: each token sees those before it; without it, the
    head is BERT's. tied: head and embedding are one matrix. mtp_layers: extra layers that predict further tokens
    (DeepSeek-V3 §2.2). framework: what it was trained with, as published.
    """

    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    key_value_heads: int = Field(default=0, ge=0)
    head_dim: int = Field(default=0, ge=0)
    ffn: int = Field(default=0, ge=0)
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    biases: bool = True
    dropout: bool = True
    positions: Literal["learned", "rotary"] = "learned"
    vocabulary: int = Field(ge=1)
    sequence: int = Field(ge=1)
    causal: bool = True
    tied: bool = True
    experts: Experts | None = None
    latent: Latent | None = None
    mtp_layers: int = Field(default=0, ge=0)
    framework: str = "megatron"

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} does not divide by heads={self.heads}: correct one, or add head_dim"
            )
        defaults = {
            "key_value_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "ffn": 4 * self.hidden,
        }
        for key, value in defaults.items():
            if not getattr(self, key):
                object.__setattr__(self, key, value)
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"heads={self.heads}: not divisible by key_value_heads={self.key_value_heads}: correct one"
            )
        if self.experts and self.experts.chosen > self.experts.count:
            raise ValueError(f"experts.chosen={self.experts.chosen}: there are {self.experts.count}: choose fewer")
        if self.experts and self.experts.layers and len(self.experts.layers) != self.layers:
            raise ValueError(f"experts.layers: has {len(self.experts.layers)} entries: give one a layer, {self.layers}")
        return self

    def expert_layers(self, first: int, end: int) -> int:
        """How many of the layers from ``first`` to before ``end`` have experts."""
        if self.experts is None:
            return 0
        if self.experts.layers:
            return sum(self.experts.layers[first:end])
        return max(0, end - max(first, self.experts.dense_layers))
