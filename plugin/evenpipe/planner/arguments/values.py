"""Megatron's arguments by name, and what several of them say together."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

__all__ = ["FlagError", "Values", "expert_layers", "padded_vocabulary"]


class FlagError(ValueError):
    """Flags from which nothing can be told; the message is one line that names the flag and the remedy."""


class Values:
    """Arguments by name; what a release does not have, or the user has not given, is the default."""

    def __init__(self, args: Namespace) -> None:
        self._args = args

    def __call__(self, name: str, default: Any) -> Any:
        found = getattr(self._args, name, None)
        return default if found is None else found

    def needed(self, name: str) -> int:
        """Raises FlagError where it is not given."""
        found = self(name, None)
        if found is None:
            raise FlagError(f"--{name.replace('_', '-')}: not given, and nothing says what it is: add it")
        return int(found)

    @property
    def group_count(self) -> int:
        """Of keys and values."""
        heads = self.needed("num_attention_heads")
        return int(self("num_query_groups", heads)) if self("group_query_attention", False) else heads

    @property
    def gated(self) -> bool:
        """Whether the MLP is."""
        return bool(self("swiglu", False) or self("quick_geglu", False))

    @property
    def ffn(self) -> int:
        """Inner size of the MLP, as Megatron completes it."""
        hidden = self.needed("hidden_size")
        return int(self("ffn_hidden_size", 0)) or (int(4 * hidden * 2 / 3 / 64) * 64 if self.gated else 4 * hidden)

    @property
    def learned_positions(self) -> bool:
        """Whether positions have parameters."""
        rotary = self("use_rotary_position_embeddings", False)  # the older flag
        return self("position_embedding_type", "learned_absolute") == "learned_absolute" and not rotary

    @property
    def precision(self) -> str:
        """fp32, bf16 or fp16."""
        return "bf16" if self("bf16", False) else "fp16" if self("fp16", False) else "fp32"

    @property
    def recompute(self) -> str | None:
        """Full, selective or None."""
        return self("recompute_granularity", "selective" if self("recompute_activations", False) else None)  # type: ignore[no-any-return]


def padded_vocabulary(value: Values) -> int:
    """As Megatron pads it; its NullTokenizer has one token more than it is told."""
    if value("padded_vocab_size", 0):
        return int(value("padded_vocab_size", 0))
    if value("vocab_size", None) is None:
        raise FlagError("--vocab-size: not given: add it, with the size of your tokenizer (before padding)")
    multiple = value("make_vocab_size_divisible_by", 128) * value("tensor_model_parallel_size", 1)
    tokens = value("vocab_size", 0) + (value("tokenizer_type", None) == "NullTokenizer")
    return int(-(-tokens // multiple) * multiple)


def expert_layers(frequency: int | str | Sequence[int], layers: int) -> tuple[bool, ...]:
    """`--moe-layer-freq`: every N-th layer, or one 1 (experts) or 0 (dense) a layer, as in "([0]*3+[1]*58)"."""
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(layers))
    pattern = _pattern(frequency) if isinstance(frequency, str) else frequency
    if len(pattern) != layers:
        raise FlagError(f"--moe-layer-freq: {len(pattern)} entries for {layers} layers: give one a layer")
    return tuple(bool(entry) for entry in pattern)


def _pattern(text: str) -> list[int]:
    """The value of an expression of lists, `+` and `*`, without running it."""
    try:
        found = _value_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        found = None
    if not isinstance(found, list):
        raise FlagError(f"--moe-layer-freq {text}: neither a number nor a list such as ([0]*3+[1]*58)")
    return found


def _value_of(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value_of(node.left), _value_of(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    return ast.literal_eval(node)
